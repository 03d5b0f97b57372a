"""Membership inference on the folder of an earlier run: who was in the training data, told from its models."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.attacks.epsilon import canary_epsilon, canary_gaussian_epsilon, is_gaussian
from fedpriv.attacks.intervals import Bools, Floats, RocCurve, auc_interval, bootstrap_intervals, curve
from fedpriv.attacks.membership.attacks import (
    ATTACKS,
    Signals,
    label_logits,
    write_scores,
    write_signals,
    wrong_log_probabilities,
)
from fedpriv.attacks.membership.report import Curve, Membership, MembershipAttack
from fedpriv.attacks.observation import list_observations, read_observation
from fedpriv.attacks.references import (
    MemberPairs,
    Pool,
    Reference,
    build_pool,
    draw_candidates,
    mapped_network,
    refuse_unaudited,
    train_references,
)
from fedpriv.core.errors import InputError
from fedpriv.core.figure import EpsilonBound, refuse_exceeded
from fedpriv.core.files import writing
from fedpriv.core.finished import completed_summary, final_checkpoint, final_state, finished_world
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import RoundRecord
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World
from fedpriv.gradients import Vector

_GAME = (
    "Candidates: as many members, drawn from all clients' data, as test images. References: the same training on the "
    "same data, but for each pair of candidates a coin decides which of the two is in. The adversary knows all other "
    "examples. The bound on epsilon is of the first reference, whose coins are independent; attacks are on the run."
)


def audit_run(folder: RunFolder, references: int, pairs: int, progress: Progress) -> Membership:
    """Attack the membership in a run's training data. It returns what is written to membership.json."""
    if references < 6 or references % 2:
        raise InputError(key="--references", given=references, allowed="expected an even number from 6")
    summary = completed_summary(folder)
    proven = summary.ledger
    experiment = folder.experiment()
    try:
        refuse_unaudited(experiment)
    except InputError as error:
        raise InputError(f"{folder.path}: {error}") from None
    world = finished_world(folder, experiment)
    records = [record for record in folder.rounds() if record.used]
    target = _models(folder, world, records)
    candidates = draw_candidates(world, pairs, experiment.seed)
    drawn, inside = draw_references(world, candidates, references, experiment.seed)
    schedule = {record.round: record.used for record in records if record.round <= max(target)}
    found = len(candidates.members)
    fewer = f"; {found} pairs, which is all that the data have, not {pairs}" if found < pairs else ""
    progress.stage(f"training {references} reference models{fewer}")
    with cpu_threads(experiment.engine.threads):
        signals = membership_signals(world, build_pool(world), target, candidates, drawn, inside, schedule, progress)
    # Which attack the canaries are guessed by, and which bound, is settled before any score of theirs is seen.
    attack = "lira-rounds" if len(target) > 1 else "lira-online"
    bound = canaries_in_references(signals, attack, experiment.mechanism.delta, is_gaussian(experiment))
    scores = {name: attack(signals) for name, attack in ATTACKS.items()}
    comparable = proven is not None and proven.replaces
    membership = Membership(
        game=_GAME,
        references=references,
        rounds=tuple(sorted(target)),
        attacks=make_attacks(scores, candidates.truth, experiment.seed),
        epsilon_bound=bound,
        proven_epsilon=proven.epsilon if proven is not None and comparable else None,
        proven_adjacency=None if proven is None else proven.adjacency,
    )
    with writing():
        (folder.path / "membership").mkdir(exist_ok=True)
        write_signals(folder.path / "membership" / "signals.npz", signals)
        write_scores(folder.path / "membership" / "scores.npz", scores, candidates.truth)
        folder.write(membership)
        folder.write_summary(summary.with_found({"membership": membership}))
    refuse_exceeded([membership.figure])
    return membership


def _models(folder: RunFolder, world: World, records: list[RoundRecord]) -> dict[int, Vector]:
    """Round -> the global model after it: the final one, and those that were heard before later rounds."""
    checkpoint = final_checkpoint(folder, "audit")
    done = [record.round for record in records if record.round <= checkpoint.round]
    if not done:
        raise InputError(f"{folder.path} holds no model after a round: there is nothing to audit")
    return {**_heard(folder, records, done), done[-1]: final_state(folder, world, "audit").parameters}


def _heard(folder: RunFolder, records: list[RoundRecord], done: list[int]) -> dict[int, Vector]:
    """The models that the adversary saw clients start from; parameters of an active server's making are no model."""
    crafted = {(record.round, client) for record in records for client in record.crafted}
    models: dict[int, Vector] = {}
    for path in list_observations(folder.observations):
        observation = read_observation(path)
        before = [number for number in done if number < observation.round]
        if before and (observation.round, observation.client) not in crafted:
            models[before[-1]] = dict(observation.parameters)
    return models


# The game: candidates, references, signals, scores.
#
# Candidates come in pairs: an example that the target was trained with, and one from the test data that it was not. A
# reference holds, by a coin of its own for each pair, the one or the other in that place of the same client's data; all
# other examples are the target's own. So the adversary knows everything but the candidates, the worst case that privacy
# is defined for. References come in twos with opposite coins, so that each candidate is in half of them.


# Fixed before any score is seen: about so many of the canaries, those that look surest, a guess is made.
GUESSED_SHARE = 0.25

RATES = (0.01, 0.001)


def draw_references(
    world: World, candidates: MemberPairs, count: int, seed: int
) -> tuple[list[Reference], NDArray[np.bool_]]:
    """Draw what references are trained with, and with which candidate, (R, 2 C), in twos of opposite coins."""
    if count < 2 or count % 2:
        raise InputError(key="references", given=count, allowed="an even number from 2")
    rng = numpy_stream(seed, "membership-coins")
    coins = rng.random((count // 2, len(candidates.members))) < 0.5
    both = np.stack([coins, ~coins], axis=1).reshape(count, -1)
    seeds = rng.integers(2**31, size=count).tolist()
    shares = [_shares(world, candidates, coin) for coin in both]
    references = [Reference(*drawn) for drawn in zip(seeds, shares, strict=True)]
    return references, np.concatenate([both, ~both], axis=1)


def membership_signals(
    world: World,
    pool: Pool,
    target: Mapping[int, Vector],
    candidates: MemberPairs,
    references: Sequence[Reference],
    inside: NDArray[np.bool_],
    schedule: Mapping[int, Sequence[int]],
    progress: Progress | None = None,
) -> Signals:
    """Train the references and compute every signal once."""
    rounds = sorted(target)
    trained = train_references(world, pool, references, schedule, rounds, progress=progress)
    network = mapped_network(world.model)
    own = {
        number: {name: value.unsqueeze(0).to(pool.images) for name, value in target[number].items()}
        for number in rounds
    }

    def examples(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(rows).to(pool.images.device)
        return pool.images[chosen], pool.labels[chosen]

    def logits(stacks: Mapping[int, Vector], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """(models, T, len(rows))."""
        x, y = examples(rows)
        rounds_logits = [label_logits(network.outputs(stacks[number], x), y).cpu().numpy() for number in rounds]
        return np.stack(rounds_logits, axis=1)

    def others(stacks: Mapping[int, Vector]) -> NDArray[np.float64]:
        """(models, 2 C, K), of the final models."""
        x, y = examples(candidates.rows)
        return wrong_log_probabilities(network.outputs(stacks[rounds[-1]], x), y).cpu().numpy()

    return Signals(
        target=logits(own, candidates.rows)[0],
        references=logits(trained, candidates.rows),
        inside=inside,
        population=logits(own, candidates.population)[0],
        reference_population=logits(trained, candidates.population),
        rounds=np.array(rounds, dtype=np.int64),
        others=others(own)[0],
        reference_others=others(trained),
    )


def make_attacks(
    scores: Mapping[str, Floats], truth: NDArray[np.bool_], seed: int, confidence: float = 0.95
) -> tuple[MembershipAttack, ...]:
    """Score every attack by its scores of candidates; ``truth``: (N,), which candidates are members."""
    return tuple(
        score_membership(name, each, truth, numpy_stream(seed, "membership-bootstrap", number), confidence)
        for number, (name, each) in enumerate(scores.items())
    )


def score_membership(
    attack: str, scores: Floats, members: Bools, rng: np.random.Generator, confidence: float = 0.95, repeats: int = 1000
) -> MembershipAttack:
    """Return all figures of an attack with their intervals, and its curve."""
    whole = curve(scores, members)
    figures: dict[str, Callable[[RocCurve], float]] = {
        "tpr_at_1_percent": lambda points: points.tpr_at(RATES[0]),
        "tpr_at_01_percent": lambda points: points.tpr_at(RATES[1]),
        "advantage": lambda points: points.advantage,
    }
    intervals = bootstrap_intervals(scores, members, figures, rng, confidence, repeats)
    return MembershipAttack(
        attack=attack,
        members=int(members.sum()),
        non_members=int((~members).sum()),
        auc=whole.auc,
        tpr_at_1_percent=whole.tpr_at(RATES[0]),
        tpr_at_01_percent=whole.tpr_at(RATES[1]),
        advantage=whole.advantage,
        intervals={"auc": auc_interval(scores, members, confidence), **intervals},
        confidence=confidence,
        curve=Curve(*(tuple(rates.tolist()) for rates in whole.log_points())),
    )


def canaries_in_references(signals: Signals, attack: str, delta: float, gaussian: bool = False) -> EpsilonBound:
    """Bound epsilon of the training that target and references share, from one run with canaries.

    The first reference plays the target: its pairs were filled by independent coins, so that Steinke, Nasr and
    Jagielski (2023), or with ``gaussian`` Mahloujifar, Melis and Chaudhuri (2025), applies to the guesses which of a
    pair is in, under replace-one adjacency. Its opposite, which knows its coins, is left out of the references.
    """
    if len(signals.references) < 6:
        raise InputError(f"canaries need at least 6 reference models; there are {len(signals.references)}")
    posed = Signals(
        target=signals.references[0],
        references=signals.references[2:],
        inside=signals.inside[2:],
        population=signals.reference_population[0],
        reference_population=signals.reference_population[2:],
        rounds=signals.rounds,
        others=signals.reference_others[0],
        reference_others=signals.reference_others[2:],
    )
    scores = ATTACKS[attack](posed)
    pairs = len(scores) // 2
    differences = scores[:pairs] - scores[pairs:]
    guesses = max(2, 2 * int(pairs * GUESSED_SHARE / 2))
    bound = canary_gaussian_epsilon if gaussian else canary_epsilon
    return bound(differences, signals.inside[0, :pairs], guesses, delta)


def _shares(world: World, candidates: MemberPairs, coins: NDArray[np.bool_]) -> tuple[np.ndarray, ...]:
    """The clients' rows of the pool, with the non-member in each pair's place where its coin is not up."""
    shares = [rows.copy() for rows in world.partitions]
    for index in np.flatnonzero(~coins):
        shares[candidates.clients[index]][candidates.positions[index]] = candidates.non_members[index]
    return tuple(shares)
