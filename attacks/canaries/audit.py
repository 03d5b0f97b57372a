"""An audit of a finished run's noise, in one more run of its releases with canaries in place of the data.

A canary stands for one of the units that the ledger is about, an example or a client. By a fair coin of its own its
gradient is the largest that the mechanism lets through, along a coordinate that no other canary of the client has, or
what the adjacency has in its place: the opposite under replace-one, nothing under zero-out. The clients' own plans draw
the batches and release them, with noise that the run never had. The adversary is the ledger's: it hears every release,
and knows who is in which batch unless the plan keeps that secret. A canary's score is the sum, over the releases that
it may be in, of their products with its gradient (Steinke, Nasr and Jagielski 2023, Section 6; Andrew et al. 2024).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.attacks.canaries.report import CanaryAudit
from fedpriv.attacks.epsilon import Bools, Floats, canary_epsilon, independent_canary_epsilon, is_gaussian
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.figure import CONFIDENCE, EpsilonBound, refuse_exceeded
from fedpriv.core.files import writing
from fedpriv.core.finished import completed_summary, rebuilt_world
from fedpriv.core.plan import Plan
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import Secret, numpy_stream
from fedpriv.core.records import Ledger, RoundRecord
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World
from fedpriv.gradients import DenseGradients, Vector

Rows = NDArray[np.int64]

# About how many of the canaries, those that look surest, a guess may be made.
_GUESSED_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# A tight bound that holds with 95 % is above the truth in one of twenty audits.
_SURE = 0.999
_LARGE = 1e12  # above every clip norm; its square is a number of float32

_GAME = (
    "Canaries stand in the place of {units}. By a fair coin each one's gradient is the largest that the mechanism lets "
    "through, along a coordinate of its own, or {other}. The clients' plans draw and release the batches of all "
    "rounds once more, with new noise. The adversary hears every release{known}, and adds up its products with the "
    "canary's gradient."
)


@dataclass(frozen=True, eq=False)
class Share:
    """A client that has canaries in the place of m of its examples, or of its updates."""

    plan: Plan  # the client's
    rounds: tuple[int, ...]  # in which it was asked
    shapes: Mapping[str, torch.Size]  # of the network's parameters
    places: Tensor  # (m, parts), a coordinate of each canary in every part of a gradient that has noise of its own
    signs: Tensor  # (m, parts), 1 or -1
    canaries: Rows  # (examples,), the number of the canary in the place of each example, or -1

    @classmethod
    def of(cls, world: World, client: int, rounds: Sequence[int], examples: Rows) -> Self:
        """Draw a client's canaries, in the place of some of its examples."""
        plan, parts = world.plans[client], np.array(world.plans[client].dimensions)
        canaries = len(examples)
        numbers = np.full(1 if plan.is_whole else plan.sampling.examples, -1)
        numbers[examples] = np.arange(canaries)
        shapes = {name: value.shape for name, value in world.initial.parameters.items()}
        inside = np.arange(canaries)[:, None] % parts
        # Parts with fewer coordinates than canaries have several on each: what they add to each other is 0 on average.
        signs = numpy_stream(world.experiment.seed, "canary-signs", client).choice((1.0, -1.0), size=inside.shape)
        begin = np.cumsum((0, *parts[:-1]))
        places = torch.from_numpy(begin + inside)
        return cls(plan, tuple(rounds), shapes, places, torch.from_numpy(signs).float(), numbers)

    def __len__(self) -> int:
        """How many canaries there are."""
        return len(self.places)

    @property
    def is_known(self) -> bool:
        """Whether who is in which batch is no secret: the ledger counts such batches as if everybody knew them."""
        return _is_known(self.plan)

    def gradients(self, rows: Rows, factors: Floats, more: int = 0) -> Vector:
        """Write out the gradients of some canaries times a factor each, and as many zeros as are wanted behind."""
        flat = torch.zeros(len(rows) + more, sum(self.plan.tensors))
        values = self.signs[rows] * torch.from_numpy(factors * _LARGE).float()[:, None]
        flat[: len(rows)].scatter_(1, self.places[rows], values)
        parts = zip(self.shapes.items(), flat.split(self.plan.tensors, dim=1), strict=True)
        return {name: part.view(-1, *shape) for (name, shape), part in parts}

    def update(self, row: int, factor: float) -> Vector:
        """Return the gradient of one canary times a factor."""
        return {name: value[0] for name, value in self.gradients(np.array([row]), np.array([factor])).items()}

    def products(self, released: Vector, rows: Rows) -> Floats:
        """Return the products of a release with some canaries, (len(rows),)."""
        flat = torch.cat([value.flatten() for value in released.values()])
        return (flat[self.places[rows]] * self.signs[rows]).sum(dim=1).double().numpy()

    def middles(self) -> Floats:
        """Half of what one release holds of each canary whose coin is up, if it is in the batch, (m,)."""
        mechanism = self.plan.config.mechanism(self.plan.redistribution)
        divisor = 1 if self.plan.is_whole else self.plan.sampling.batch_size
        expected = [mechanism.expected(self.update(row, 1.0)) for row in range(len(self))]
        found = [self.products(vector, np.array([row])) for row, vector in enumerate(expected)]
        return np.concatenate(found) / divisor / 2


def audit_canaries(folder: RunFolder, count: int, progress: Progress) -> CanaryAudit:
    """Bound a run's epsilon from below, and return what is written to canaries.json, also where the bound is above the
    ledger's.
    """
    if count < 2:
        raise InputError(key="--canaries", given=count, allowed="a number from 2")
    summary, experiment, ledger = completed_summary(folder), folder.experiment(), folder.ledger()
    _check(folder, experiment)
    if ledger is None:
        raise InputError(f"{folder.path} has no ledger: there is no epsilon to compare with")
    world, replaces = rebuilt_world(folder, experiment), ledger.worst.replaces
    shares = _shares(world, ledger, folder.rounds(), count)
    with cpu_threads(experiment.engine.threads):
        bounds = _bounds(experiment, shares, replaces, progress)
    found = CanaryAudit(
        game=_game(shares[0], replaces),
        clients=len(shares),
        epsilon_bound=bounds[0],
        surer_bound=bounds[1],
        proven_epsilon=ledger.worst.epsilon,
        adjacency=ledger.worst.adjacency,
    )
    with writing():
        folder.write(found)
        folder.write_summary(summary.with_found({"canaries": found}))
    refuse_exceeded([found.figure])
    return found


def canary_scores(share: Share, inside: Bools, replaces: bool, noise: Secret) -> Floats:
    """Release a client's canaries as its plan does, and return their scores, (m,), above 0 if the coin looks up."""
    plan, scores = share.plan, np.zeros(len(share))
    factors = np.where(inside, 1.0, -1.0 if replaces else 0.0)
    middles = np.zeros(len(share)) if replaces else share.middles()
    often = 1.0 if share.is_known or plan.is_whole else plan.sampling.rate
    for batch, released in _releases(share, factors, noise):
        rows = batch if share.is_known else np.arange(len(share))
        scores[rows] += share.products(released, rows) - often * middles[rows]
    return scores


def _check(folder: RunFolder, experiment: Experiment) -> None:
    """Refuse a run in which clients add no noise to what they send."""
    mechanism = experiment.mechanism
    if not experiment.protects:
        raise InputError(f"{folder.path} has no mechanism: there is no epsilon to bound")
    if reason := algorithm_of(experiment).not_audited:
        raise InputError(f"{folder.path}: {reason}")
    if not mechanism.on_gradients or mechanism.noise_at != "clients":
        raise InputError(
            key="mechanism.name",
            given=mechanism.name,
            allowed="canaries are for mechanisms whose noise each client adds to its gradients or updates",
        )


def _shares(world: World, ledger: Ledger, records: Sequence[RoundRecord], count: int) -> list[Share]:
    """Who has canaries, and how many: clients of which least is proven come first."""
    shares: list[Share] = []
    for client in (client for line in ledger.clients for members in line.ranges for client in members):
        plan, rounds = world.plans[client], tuple(record.round for record in records if client in record.clients)
        own = _examples(plan, rounds)[: min(sum(plan.tensors), count - sum(map(len, shares)))]
        if rounds and len(own):
            shares.append(Share.of(world, client, rounds, own))
    if sum(map(len, shares)) < 2:
        raise InputError("canaries take two examples, or two clients with a mechanism on updates; the run has fewer")
    return shares


def _is_known(plan: Plan) -> bool:
    return not plan.is_whole and plan.sampling.kind == "shuffled"


def _examples(plan: Plan, rounds: Sequence[int]) -> Rows:
    """In whose place canaries may be; known batches leave out those that no batch has, of which nothing is released."""
    if not _is_known(plan):
        return np.arange(1 if plan.is_whole else plan.sampling.examples)
    batches = [plan.batch(step) for number in rounds for step in plan.steps(number)]
    often = np.bincount(np.concatenate(batches), minlength=plan.sampling.examples)
    return np.argsort(-often, kind="stable")[: np.count_nonzero(often)]


def _releases(share: Share, factors: Floats, noise: Secret) -> Iterator[tuple[Rows, Vector]]:
    """What a client releases in each step, with the canaries that are in the batch."""
    plan = share.plan
    for number in share.rounds:
        if plan.is_whole:
            yield np.arange(1), plan.release_update(share.update(0, factors[0]), noise.stream("noise", number))
            continue
        for step in plan.steps(number):
            batch = plan.batch(step)
            rows = share.canaries[batch]
            rows = rows[rows >= 0]
            gradients = share.gradients(rows, factors[rows], more=len(batch) - len(rows))
            yield rows, plan.release_gradient(DenseGradients(gradients), noise.stream("noise", step))


def _bounds(experiment: Experiment, shares: Sequence[Share], replaces: bool, progress: Progress) -> list[EpsilonBound]:
    """The bound, and the one that is surer. Which theorem it is follows from the mechanism alone.

    Normal noise leaves the scores of canaries independent. Otherwise how many guesses are made is what was best in an
    earlier run, with other coins and noise.
    """
    delta, levels = experiment.mechanism.delta, (CONFIDENCE, _SURE)
    if is_gaussian(experiment):
        played = _played(experiment, shares, replaces, "canaries", progress)
        return [independent_canary_epsilon(*played, 0.0, delta, level) for level in levels]
    guesses = best_guesses(*_played(experiment, shares, replaces, "canaries of the pilot", progress), delta)
    played = _played(experiment, shares, replaces, "canaries", progress)
    return [canary_epsilon(*played, guesses, delta, level) for level in levels]


def _played(
    experiment: Experiment, shares: Sequence[Share], replaces: bool, name: str, progress: Progress
) -> tuple[Floats, Bools]:
    """The scores of all clients' canaries, and their coins."""
    secret, scores, coins = Secret.of_seed(experiment.seed), [], []
    progress.stage(f"releasing {sum(map(len, shares))} {name}")
    for done, share in enumerate(shares, 1):
        inside = numpy_stream(secret.seed(name), "coins", share.plan.client).random(len(share)) < 0.5
        scores.append(canary_scores(share, inside, replaces, secret.derived(name, share.plan.client)))
        coins.append(inside)
        progress.advanced("clients", done, len(shares))
    return np.concatenate(scores), np.concatenate(coins)


def best_guesses(scores: Floats, inside: Bools, delta: float) -> int:
    """Return how many guesses show most of epsilon; only for the scores of another run."""
    numbers = {max(2, 2 * int(len(scores) * share / 2)) for share in _GUESSED_SHARES}
    return max(sorted(numbers), key=lambda guesses: canary_epsilon(scores, inside, guesses, delta).epsilon)


def _game(share: Share, replaces: bool) -> str:
    return _GAME.format(
        units="clients" if share.plan.is_whole else "examples",
        other="the opposite" if replaces else "zero",
        known=", knows who is in which batch" if share.is_known else "",
    )
