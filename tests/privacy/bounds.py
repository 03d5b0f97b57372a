"""Lower limits on epsilon from two samples, and the search for the set of answers that gives the highest one.

An (epsilon, delta)-private release has P(S) <= exp(epsilon) Q(S) + delta for every set S of answers, where P and Q are
the laws under two neighbouring data sets. So limits of Clopper and Pearson (1934) on P(S) and Q(S) give a lower limit
on epsilon at any delta, and with delta = 0 on the pure epsilon. The set is a number that the adversary computes from an
answer, a threshold, and a side of it. It is chosen on draws of its own, the pilot, which the limits do not see.

Each of the two limits fails with probability ``ALARM`` at most, and a game uses one pair, at all deltas. A game ends
after the pilot where not even a lucky reading of it gives hope for a limit above the claim: whoever ends early without
an alarm raises no false one.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = ["ALARM", "DELTAS", "Claims", "Draw", "Event", "Scores", "Verdict", "lower_limit", "play"]

ALARM = 1e-9
DELTAS = (1e-5, 1e-2, 1e-1, 3e-1)

# So many standard deviations the rates behind a pilot may be better than the pilot shows, for a game to go on.
LUCK = 1.5

THRESHOLDS = 200

Floats = NDArray[np.float64]
Scores = Mapping[str, Floats]
"""The adversary's numbers: name -> one for each run, (n,)."""

Draw = Callable[[str, int], Scores]
"""(``left`` or ``right``, n) -> the numbers of n new independent runs on that data set."""

Claims = Mapping[float, float]
"""delta -> epsilon that the ledger prints; delta = 0 stands for the pure figure."""


@cache
def _limits(draws: int) -> tuple[Floats, Floats]:
    """For 0 to ``draws`` hits the least and the most that their probability can be, each but for ``ALARM``."""
    hits = np.arange(draws + 1)
    least, most = np.zeros(draws + 1), np.ones(draws + 1)
    least[1:] = stats.beta.ppf(ALARM, hits[1:], draws - hits[1:] + 1)
    most[:-1] = stats.beta.ppf(1 - ALARM, hits[:-1] + 1, draws - hits[:-1])
    return least, most


def lower_limit(hits: NDArray[np.int64], false_hits: NDArray[np.int64], draws: int, delta: float) -> Floats:
    """What epsilon is at least, where ``draws`` from P hit S ``hits`` times and as many from Q ``false_hits`` times."""
    least, most = _limits(draws)
    return np.log(np.maximum(least[hits] - delta, 1e-300) / most[false_hits])


@dataclass(frozen=True)
class Event:
    """The set S of answers whose number ``statistic`` is at least ``threshold``, or is below it."""

    statistic: str
    threshold: float
    above: bool  # which of the two
    likelier: str  # the data set, left or right, under which S is taken to be the likelier one

    def hits(self, scores: Scores) -> int:
        """How many of the runs are in S."""
        reached = int((scores[self.statistic] >= self.threshold).sum())
        return reached if self.above else len(scores[self.statistic]) - reached


@dataclass(frozen=True)
class Verdict:
    """How a game ended."""

    # by how much the lower limit is above the printed epsilon; minus infinity where the pilot gave no hope
    excess: float
    bound: float  # the lower limit
    printed: float  # the ledger's figure at the same delta
    delta: float  # where the excess is largest; 0: pure
    event: Event  # the set S
    # how often S was hit in the draws that the limits are computed from, likelier side first
    rates: tuple[float, float]

    @property
    def violation(self) -> bool:
        """Whether the ledger is found out."""
        return self.excess > 0

    def __str__(self) -> str:
        if math.isinf(self.excess):
            return "no hope after the pilot"
        claim = "pure" if self.delta == 0 else f"delta = {self.delta:g}"
        return (
            f"printed epsilon {self.printed:.3g} ({claim}), lower limit {self.bound:.3g} from {self.event.statistic} "
            f"(rates {self.rates[0]:.3g} and {self.rates[1]:.3g})"
        )


def play(draw: Draw, claims: Claims, runs: int) -> Verdict:
    """Choose a set on a quarter of ``runs``, then compare its lower limits on epsilon with the claims.

    Args:
        draw: plays the runs.
        claims: what the ledger prints.
        runs: on each of the two data sets, after the pilot, which takes a quarter as many more.
    """
    pilot = {side: draw(side, max(8, runs // 4)) for side in ("left", "right")}
    event, hope = _best(pilot, claims, runs)
    if hope <= 0:
        return Verdict(-math.inf, 0.0, min(claims.values()), max(claims), event, (0.0, 0.0))
    other = "right" if event.likelier == "left" else "left"
    hits, false_hits = event.hits(draw(event.likelier, runs)), event.hits(draw(other, runs))
    bounds = {delta: float(lower_limit(np.array(hits), np.array(false_hits), runs, delta)) for delta in claims}
    delta = max(claims, key=lambda each: bounds[each] - claims[each])
    rates = (hits / runs, false_hits / runs)
    return Verdict(bounds[delta] - claims[delta], bounds[delta], claims[delta], delta, event, rates)


def _best(pilot: Mapping[str, Scores], claims: Claims, runs: int) -> tuple[Event, float]:
    """The set with the largest excess that the pilot makes expect, and the largest excess that it leaves hope for."""
    found = [(excess, hope, event) for event, excess, hope in _candidates(pilot, claims, runs)]
    _, _, event = max(found, key=lambda each: each[0])
    return event, max(hope for _, hope, _ in found)


def _candidates(pilot: Mapping[str, Scores], claims: Claims, runs: int) -> Iterator[tuple[Event, float, float]]:
    """For each statistic, side and likelier data set the best threshold, with its excess, expected and hoped for."""
    for name in pilot["left"]:
        thresholds = _thresholds(np.concatenate([pilot["left"][name], pilot["right"][name]]))
        draws = len(pilot["left"][name])
        below = {side: np.searchsorted(np.sort(scores[name]), thresholds) / draws for side, scores in pilot.items()}
        for above in (True, False):
            rates = {side: 1 - rate if above else rate for side, rate in below.items()}
            for likelier, other in (("left", "right"), ("right", "left")):
                excess = _excess(rates[likelier], rates[other], draws, runs, claims, 0.0)
                hope = _excess(rates[likelier], rates[other], draws, runs, claims, LUCK)
                best = int(excess.argmax())
                yield Event(name, float(thresholds[best]), above, likelier), float(excess[best]), float(hope.max())


def _thresholds(numbers: Floats) -> Floats:
    """Thresholds between the numbers, at most ``THRESHOLDS`` of them."""
    values = np.unique(numbers)
    if len(values) == 1:
        return values
    between: Floats = values[:-1] / 2 + values[1:] / 2
    chosen = np.linspace(0, len(between) - 1, min(THRESHOLDS, len(between)))
    return between[np.rint(chosen).astype(np.int64)]


def _excess(p: Floats, q: Floats, pilot: int, runs: int, claims: Claims, luck: float) -> Floats:
    """The excess over the claims to be expected in ``runs`` from rates in the pilot, ``luck`` deviations better."""
    p, q = (p * pilot + 0.5) / (pilot + 1), (q * pilot + 0.5) / (pilot + 1)
    p, q = p + luck * np.sqrt(p * (1 - p) / pilot), q - luck * np.sqrt(q * (1 - q) / pilot)
    hits, false_hits = (np.rint(np.clip(rate, 0, 1) * runs).astype(np.int64) for rate in (p, q))
    limits = [lower_limit(hits, false_hits, runs, delta) - epsilon for delta, epsilon in claims.items()]
    return np.max(limits, axis=0)
