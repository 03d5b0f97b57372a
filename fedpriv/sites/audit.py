"""Play the games of site and property inference at the final model of a run.

Each client's own code makes uploads at the final model, as in rounds after the last. Of half of them the adversary
knows who sent them. It names the sender of the others (linear discriminant analysis of a sketch of the upload), and it
tells which classes, and which values of a table's columns, a client has more of than the public data: by ridge
regression, learned from uploads of shadow clients, which hold public examples with other shares and run the same code.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedpriv.accounting.memorisation import Statement, of_copies
from fedpriv.attacks.intervals import best_interval
from fedpriv.clients.training import local_upload
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.columns import slices
from fedpriv.core.errors import InputError
from fedpriv.core.figure import refuse_exceeded
from fedpriv.core.files import writing
from fedpriv.core.finished import completed_summary, final_checkpoint, final_state, finished_world
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import numpy_stream, torch_stream
from fedpriv.core.records import Ledger, LedgerLine
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import State, World
from fedpriv.sites.report import SiteGame, Sites

MOST_CLIENTS = 32  # that are compared, those of the lowest numbers
SKETCH = 512  # numbers in the sketch of an upload
SHADOWS = 160  # shadow clients
SPREAD = 0.7  # the concentration of their class shares (Dirichlet): from nearly one class to nearly equal shares
PENALTIES = np.logspace(-3, 3, 13)  # of ridge regression, of which cross-validation chooses one


def audit_sites(folder: RunFolder, uploads: int, progress: Progress) -> Sites:
    """Measure what uploads say of clients as a whole. It returns what is written to sites.json."""
    if uploads < 4 or uploads % 2:
        raise InputError(key="--sites", given=uploads, allowed="an even number from 4")
    summary, experiment = completed_summary(folder), folder.experiment()
    if not algorithm_of(experiment).trains_in_steps:
        raise InputError(
            f"{folder.path}: clients of federation.algorithm = {experiment.federation.algorithm!r} upload "
            "no gradients and no changes by training, which an audit with --sites reads"
        )
    world = finished_world(folder, experiment)
    if world.unchanged is not None or experiment.federation.clients < 2:
        raise InputError(f"{folder.path}: an audit with --sites needs two clients, and labels that are not changed")
    after, state = final_checkpoint(folder, "audit").round, final_state(folder, world, "audit")
    clients = range(min(experiment.federation.clients, MOST_CLIENTS))
    with cpu_threads(experiment.engine.threads), writing():
        progress.stage(f"{uploads} uploads of each of {len(clients)} clients")
        sketches = _sketches(world, clients, state, range(after + 1, after + uploads + 1))
        progress.stage(f"uploads of {SHADOWS} clients with public examples")
        shadows, shadow_shares = _shadows(world, state, after + 1)
        known = uploads // 2
        ledger = folder.ledger()
        games = (
            *_sender_games(sketches, known, lambda count, guess: _ceiling(world, ledger, clients, count, guess)),
            *_share_games(world, clients, sketches, (shadows, shadow_shares), ledger),
        )
        found = Sites(clients=len(clients), known=known, games=games)
        folder.write(found)
        folder.write_summary(summary.with_found({"sites": found}))
    refuse_exceeded(found.measured)
    return found


def _sketches(world: World, clients: Sequence[int], state: State, rounds: Sequence[int]) -> np.ndarray:
    """Sketches (clients, rounds, SKETCH) of uploads."""
    place = _buckets(world)
    made = [[_sketch(local_upload(world, client, state, number), *place) for number in rounds] for client in clients]
    return np.array(made)


def _buckets(world: World) -> tuple[Tensor, Tensor]:
    """The bucket and the sign of each coordinate of an upload."""
    size = sum(value.numel() for value in world.initial.parameters.values())
    generator = torch_stream(world.experiment.seed, "sites")
    return torch.randint(SKETCH, (size,), generator=generator), torch.randn(size, generator=generator).sign()


def _sketch(upload: State, bucket: Tensor, sign: Tensor) -> np.ndarray:
    """A count sketch (Charikar, Chen and Farach-Colton 2002), of length one: what is said is in its direction."""
    flat = torch.cat([value.flatten() for value in upload.parameters.values()]).double()
    sums = torch.zeros(SKETCH, dtype=torch.float64).index_add(0, bucket[: len(flat)], flat * sign[: len(flat)])
    return (sums / sums.norm().clamp(min=1e-300)).numpy()


def _sender_games(
    sketches: np.ndarray, known: int, ceiling: Callable[[int, float], tuple[float | None, str]]
) -> list[SiteGame]:
    """Who sent it: from one upload, and from all uploads of one sender together."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    count, uploads, _ = sketches.shape
    senders = np.arange(count)
    judge = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uploads without noise may all be the same, or lie in one plane
        judge.fit(sketches[:, :known].reshape(count * known, -1), senders.repeat(known))
        logs = judge.decision_function(sketches[:, known:].reshape(-1, sketches.shape[2]))
    # Of two classes there is one number: how much likelier the second is.
    scores = np.stack([-logs / 2, logs / 2], axis=1) if count == 2 else logs
    scores = scores.reshape(count, uploads - known, count)
    games = []
    for together, votes in ((1, scores), (uploads - known, scores.sum(axis=1, keepdims=True))):
        right = int((votes.argmax(axis=2) == senders[:, None]).sum())
        trials = votes.shape[0] * votes.shape[1]
        measured = best_interval(right, trials)
        proven, theorem = ceiling(together, 1 / count)
        what = f"which of {count} clients sent it"
        games.append(SiteGame(what, together, right, trials, 1 / count, measured.low, measured.high, proven, theorem))
    return games


def _properties(world: World, images: Tensor, labels: Tensor) -> dict[str, np.ndarray]:
    """What (N, k) examples are: of which class, and of a table which values of a category they have."""
    dataset = world.dataset
    kinds = {"class": np.eye(len(dataset.counted))[dataset.kinds(labels).numpy()]}
    flat = images.flatten(1).numpy()
    places = [slice_ for column, slice_ in slices(dataset.columns) if column.kind == "category"]
    if places:
        kinds["attribute"] = np.concatenate([flat[:, place] / max(flat.max(), 1) for place in places], axis=1)
    return kinds


def _shadows(world: World, state: State, number: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Sketches (SHADOWS, SKETCH) of clients that hold public examples, and their shares."""
    dataset, place = world.dataset, _buckets(world)
    generator = numpy_stream(world.experiment.seed, "sites")
    kinds = dataset.kinds(dataset.y_test).numpy()
    sizes = np.bincount(kinds, minlength=len(dataset.counted))
    partitions = []
    for _ in range(SHADOWS):
        weights = (generator.dirichlet(np.full(len(sizes), SPREAD)) / np.maximum(sizes, 1))[kinds]
        rows = generator.choice(len(kinds), size=int(world.sizes[0]), p=weights / weights.sum())
        partitions.append(np.sort(rows))
    public = replace(dataset, x_train=dataset.x_test, y_train=dataset.y_test)
    plans = [replace(world.plans[0], client=each) for each in range(SHADOWS)]
    shadow = replace(world, dataset=public, partitions=partitions, plans=plans)
    made = [_sketch(local_upload(shadow, each, state, number + each), *place) for each in range(SHADOWS)]
    known = _properties(world, dataset.x_test, dataset.y_test)
    return np.array(made), {
        name: np.array([value[rows].mean(axis=0) for rows in partitions]) for name, value in known.items()
    }


def _share_games(
    world: World,
    clients: Sequence[int],
    sketches: np.ndarray,
    shadows: tuple[np.ndarray, dict[str, np.ndarray]],
    ledger: Ledger | None,
) -> list[SiteGame]:
    """Whether a client has more of a class, or of a value, than the public data: from one upload, and from all."""
    from sklearn.linear_model import RidgeCV

    dataset = world.dataset
    public = _properties(world, dataset.x_test, dataset.y_test)
    own = [
        _properties(
            world,
            dataset.x_train[torch.from_numpy(world.partitions[each])],
            dataset.y_train[torch.from_numpy(world.partitions[each])],
        )
        for each in clients
    ]
    games = []
    for name, shares in shadows[1].items():
        usual = public[name].mean(axis=0)
        truth = np.array([each[name].mean(axis=0) for each in own]) > usual
        guess = float(np.maximum(truth.mean(axis=0), 1 - truth.mean(axis=0)).mean())
        told = RidgeCV(alphas=PENALTIES).fit(shadows[0], shares)
        for together, read in ((1, sketches[:, 0]), (sketches.shape[1], sketches.mean(axis=1))):
            right = (told.predict(read) > usual) == truth
            # Answers about one client go together, so a client counts as one trial.
            ends = best_interval(round(float(right.mean(axis=1).sum())), len(right))
            proven, theorem = _ceiling(world, ledger, clients, together, guess)
            what = f"whether a client has more of {'a class' if name == 'class' else 'an attribute'} than the public"
            games.append(
                SiteGame(what, together, int(right.sum()), right.size, guess, ends.low, ends.high, proven, theorem)
            )
    return games


def _ceiling(
    world: World, ledger: Ledger | None, clients: Sequence[int], uploads: int, guess: float
) -> tuple[float | None, str]:
    """What no answer about a client exceeds, and by which theorem."""
    mechanism = world.experiment.mechanism
    if ledger is None or not mechanism.protects or mechanism.noise_at != "clients":
        return None, "uploads have no noise of their clients'"
    plans = [world.plans[client] for client in clients]
    alike = {(plan.steps_per_round, plan.sampling.batch_size, str(plan.config)) for plan in plans}
    sizes = {plan.sampling.examples for plan in plans} if ledger.unit == "example" else {0}
    if len(alike) > 1 or len(sizes) > 1:
        return None, "clients differ in sizes or settings, which uploads may show"
    line = _worst(ledger, clients)
    if line is None or (line.epsilon, line.pure_epsilon) == (None, None):
        return None, "the ledger has no (epsilon, delta) of them"
    if line.participations < uploads * world.plans[0].steps_per_round:
        return None, f"the ledger is about {line.participations} participations, and these are more"
    # A client's whole data: one unit, or all its examples; where a unit is taken away, one goes and another comes.
    together = (1 if ledger.unit == "update" else int(world.sizes[list(clients)].max())) * (1 if line.replaces else 2)
    proven = [(line.epsilon, line.delta), (line.pure_epsilon, 0.0)]
    statements = [of_copies(Statement(epsilon, delta), together) for epsilon, delta in proven if epsilon is not None]
    words = "the ledger's line of a client" if together == 1 else f"the ledger's line for a group of {together}"
    return min(share_ceiling(each, guess) for each in statements), f"{words}, over the whole run"


def _worst(ledger: Ledger, clients: Sequence[int]) -> LedgerLine | None:
    """The first line, worst first, of one of the clients."""
    return next((line for line in ledger.clients if any(set(clients) & set(each) for each in line.ranges)), None)


def share_ceiling(statement: Statement, guess: float) -> float:
    """Return how often an answer is right under (epsilon, delta)-DP, if a guess is with this probability."""
    epsilon, delta = statement
    by_right = math.exp(min(epsilon, 700.0)) * guess + delta
    by_wrong = 1 - math.exp(-min(epsilon, 700.0)) * max(0.0, 1 - guess - delta)
    return min(1.0, by_right, by_wrong)
