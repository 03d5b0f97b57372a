"""What the votes of a network with Gaussian noise prove: margins, and the bounds on probabilities that they need.

For any g with values in [0, 1] and z = h(x) + N(0, Sigma), Phi^-1(E g) changes by at most |Sigma^(-1/2) W alpha|_2 when
x moves by alpha. So with the chosen class above ``lower`` and every other below ``upper`` the vote cannot change while
that is below the margin m = (Phi^-1(lower) - Phi^-1(upper)) / 2 (Cohen et al. 2019; for ellipsoids Eiras et al. 2022).
No larger margin holds for all g. The other margins are what weaker theorems prove of the same votes.

Certificates are theorems about real numbers; networks compute in floating point (Voracek and Hein 2023).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import optimize, special, stats

from fedpriv.accounting.gaussian import analytic_sigma, classic_sigma, extended_sigma
from fedpriv.attacks.intervals import binomial_lower, binomial_upper

Rivals = Literal["each", "together"]

_LARGEST_EPSILON = 50.0  # e^50 is far beyond any ratio of two probabilities that votes can show
_POINTS = 48
_LARGEST_ORDER = 1e8


@dataclass(frozen=True)
class Bounds:
    """What is known of the probabilities of the classes."""

    lower: float  # of the chosen class, from 0 to 1; it is at least that
    upper: float  # of every other class, from 0 to 1; none is more

    @property
    def decides(self) -> bool:
        """Whether the chosen class is known to be ahead."""
        return self.lower > self.upper


# ---- votes -----------------------------------------------------------------------------------------------------------


def hoeffding_deviation(trials: int, alpha: float) -> float:
    """Return by how much a mean of ``trials`` numbers from [0, 1] exceeds its expectation at most (Hoeffding 1963)."""
    return math.sqrt(math.log(1 / alpha) / (2 * trials))


def vote_bounds(counts: Sequence[int], chosen: int, alpha: float, rivals: Rivals) -> Bounds:
    """Return what the votes say of the classes; wrong with probability alpha at most; ``alpha``: in (0, 1)."""
    trials = sum(counts)
    if rivals == "together":
        lower = binomial_lower(counts[chosen], trials, alpha)
        return Bounds(lower, 1 - lower)
    share = alpha / len(counts)
    lower = binomial_lower(counts[chosen], trials, share)
    largest = max(count for number, count in enumerate(counts) if number != chosen)
    return Bounds(lower, min(binomial_upper(largest, trials, share), 1 - lower))


def hoeffding_bounds(counts: Sequence[int], chosen: int, alpha: float) -> Bounds:
    """Return the bounds of the paper's own rule, each of the C classes at alpha / C; arguments as above."""
    trials = sum(counts)
    deviation = hoeffding_deviation(trials, alpha / len(counts))
    largest = max(count for number, count in enumerate(counts) if number != chosen)
    return Bounds(max(0.0, counts[chosen] / trials - deviation), min(1.0, largest / trials + deviation))


def wrong_at_most(certificates: int, alpha: float) -> int:
    """Return how many of so many certificates may be wrong: no more are with 95 % confidence."""
    return int(stats.binom.ppf(0.95, certificates, alpha))


# ---- margins ---------------------------------------------------------------------------------------------------------


def margins(bounds: Bounds, paper: Bounds) -> dict[str, float]:
    """Return every margin of an image, 0 where nothing is proven; ``paper``: by the paper's own rule."""
    return {
        "main": main_margin(bounds),
        "renyi": renyi_margin(bounds),
        "analytic": analytic_margin(bounds),
        "classic": classic_margin(bounds),
        "extended": extended_margin(bounds),
        "paper": extended_margin(paper),
    }


def main_margin(bounds: Bounds) -> float:
    """Return (Phi^-1(lower) - Phi^-1(upper)) / 2, the largest margin that holds for all networks behind the noise."""
    if not bounds.decides:
        return 0.0
    return float(special.ndtri(bounds.lower) - special.ndtri(bounds.upper)) / 2


@lru_cache(maxsize=4096)
def extended_margin(bounds: Bounds) -> float:
    """Return what PixelDP proves with the extended Gaussian mechanism (Phan et al. 2019, Eq. 4, 11 and Theorem 2).

    That is the largest 1 / sigma(epsilon, delta) with delta = (lower - e^(2 epsilon) upper) / (1 + e^epsilon) > 0.
    Every epsilon gives a sound margin, so a search that misses the best one is sound, too.
    """
    return _best(bounds, _LARGEST_EPSILON, lambda epsilon, delta: 1 / extended_sigma(epsilon, delta))


@lru_cache(maxsize=4096)
def classic_margin(bounds: Bounds) -> float:
    """Return the same with the classic calibration, which is proven for epsilon <= 1 (Lecuyer et al. 2019)."""
    return _best(bounds, 1.0, lambda epsilon, delta: 1 / classic_sigma(epsilon, delta))


@lru_cache(maxsize=4096)
def analytic_margin(bounds: Bounds) -> float:
    """Return the same with the smallest noise that is (epsilon, delta)-private (Balle and Wang 2018), epsilon >= 0."""
    return _best(bounds, _LARGEST_EPSILON, lambda epsilon, delta: 1 / analytic_sigma(epsilon, delta))


@lru_cache(maxsize=4096)
def renyi_margin(bounds: Bounds) -> float:
    """Return what Renyi divergences prove (Li et al. 2019, Theorem 1): the best order a > 1 of

    m^2 = -(2 / a) ln(1 - p1 - p2 + 2 (p1^(1-a) / 2 + p2^(1-a) / 2)^(1 / (1-a))),    p1 = lower, p2 = upper.
    """
    if not bounds.decides or bounds.upper <= 0:
        return 0.0
    low, high = math.log(1e-6), math.log(_LARGEST_ORDER)
    return math.sqrt(_largest(lambda log_order: _renyi_square(bounds, 1 + math.exp(log_order)), low, high))


def _renyi_square(bounds: Bounds, order: float) -> float:
    logs = (1 - order) * np.log([bounds.lower, bounds.upper])
    mean = math.exp((float(special.logsumexp(logs)) - math.log(2)) / (1 - order))
    rest = min(1.0, 1 - bounds.lower - bounds.upper + 2 * mean)
    return -2 / order * math.log(rest) if rest > 0 else 0.0


def _best(bounds: Bounds, most: float, margin: Callable[[float, float], float]) -> float:
    """The largest margin over epsilon of (epsilon, delta)-privacy that leaves the chosen class ahead."""
    lower, upper = bounds.lower, bounds.upper
    if not bounds.decides:
        return 0.0
    # Beyond half the logarithm of the ratio no delta above 0 is left.
    end = min(most, math.log(lower / upper) / 2) if upper > 0 else most

    def at(epsilon: float) -> float:
        delta = (lower - math.exp(2 * epsilon) * upper) / (1 + math.exp(epsilon))
        return margin(epsilon, delta) if delta > 1e-300 else 0.0

    return _largest(at, end * 1e-6, end)


def _largest(function: Callable[[float], float], low: float, high: float) -> float:
    """The largest value on an interval: on a grid, then between the neighbours of the best point (Brent)."""
    grid = np.linspace(low, high, _POINTS)
    values = [function(float(point)) for point in grid]
    best = int(np.argmax(values))
    ends = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, _POINTS - 1)])
    peak = optimize.minimize_scalar(
        lambda x: -function(float(x)), bounds=ends, method="bounded", options={"xatol": 1e-7}
    )
    return max(values[best], float(-peak.fun), 0.0)
