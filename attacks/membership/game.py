"""The game of membership on a trained model: candidates, references, signals, scores.

Candidates come in pairs: an example that the target was trained with, and one from the test data that it was not. A
reference holds, by a coin of its own for each pair, the one or the other in that place of the same client's data; all
other examples are the target's own. So the adversary knows everything but the candidates, the worst case that privacy
is defined for. References come in twos with opposite coins, so that each candidate is in half of them.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.attacks.epsilon import canary_epsilon, canary_gaussian_epsilon
from fedpriv.attacks.membership import records
from fedpriv.attacks.membership.attacks import ATTACKS, Signals, label_logits, wrong_log_probabilities
from fedpriv.attacks.membership.records import MembershipAttack
from fedpriv.attacks.pairs import MemberPairs
from fedpriv.attacks.references import Pool, Reference, mapped_network, train_references
from fedpriv.attacks.scores import Bools, Floats, RocCurve, auc_interval, bootstrap_intervals, curve
from fedpriv.core.errors import InputError
from fedpriv.core.figure import EpsilonBound
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.world import World
from fedpriv.gradients import Vector

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
        curve=records.Curve(*(tuple(rates.tolist()) for rates in whole.log_points())),
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
