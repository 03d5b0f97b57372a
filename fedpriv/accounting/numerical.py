"""Composition of dominating pairs by privacy-loss distributions (PLD): tighter than Renyi accounting, and slower.

A pair is put on a grid by its exact deltas, interpolated from above ("connect the dots", Doroshenko et al. 2022), and
composed by a fast Fourier transform between bounds that dp-accounting finds (Koskela, Jälkö and Honkela 2020).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np
import scipy
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.accounting.pairs import Pair, interpolated

__all__ = ["ComposedPair", "LossDistribution", "TooManyCellsError", "composed_epsilon"]

Array = NDArray[np.float64]

# The Fourier transform rounds absolutely, by about 1e-17 a release: from a delta of about 1e-11 down its epsilon comes
# out too SMALL (the tests compare). It serves only above these deltas, 0.1 % held back.
_SMALLEST_DELTA, _DELTA_PER_RELEASE = 1e-9, 1e-12
_HELD_BACK = 1e-3
_LARGEST_EPSILON = 1e6
_TRUNCATED = 1e-15  # of the probability at each composition; it counts as an infinite loss
_FINEST, _COARSEST = 1e-6, 500.0  # grids; on finer ones differences of deltas drown in rounding, exp of 710 overflows
_MOST_CELLS = 2**23  # of a grid after composition: half a second, a quarter of a GiB
# The grid adds at most a quarter of its square to the variance of each loss.
_SHARE_OF_SPREAD, _SHARE_OF_EPSILON = 0.1, 2e-3
_LOWEST_LOSS = -60.0  # a smaller one has a probability below exp(-60)
_NEGLIGIBLE = 1e-40  # sums of smaller probabilities overflow in scipy
_CERTAIN = 1e-12  # the probability of a finite loss that does not matter any more
_COMPOUNDED_CELLS = 2**15
_ORDERS = 2.0 ** np.arange(-4, 5)


def composed_epsilon(parts: tuple[tuple[Pair, int], ...], delta: float, known: float) -> float | None:
    """Return epsilon of releases that are dominated by pairs, adaptively composed.

    Args:
        parts: pairs, and how many releases each dominates.
        delta: in (0, 1).
        known: an epsilon that is proven already, finite; it sets how coarse a grid will do.

    Returns:
        Epsilon; None where the numbers are out of the range in which composition is accurate and fast.
    """
    releases = sum(count * pair.pieces for pair, count in parts)
    if delta < max(_SMALLEST_DELTA, _DELTA_PER_RELEASE * releases) or not 0 < known <= _LARGEST_EPSILON:
        return None
    interval = max(_interval(parts), known / 1e5, _SHARE_OF_EPSILON * known / math.sqrt(releases))
    if not _FINEST <= interval <= _COARSEST:
        return None
    try:
        epsilon = _composed(parts, interval).epsilon(delta * (1 - _HELD_BACK))
    except TooManyCellsError:
        return None
    return epsilon if math.isfinite(epsilon) else None


class TooManyCellsError(Exception):
    """Losses that are so large compared with their spread, as rare ones are, that no grid holds their sum."""


@dataclass(frozen=True)
class LossDistribution:
    """The privacy loss on a grid, so that no delta is too small.

    Attributes:
        interval: of the grid, above 0.
        lowest: the lowest loss, in intervals.
        masses: (N,) the probabilities of the losses from there on.
        infinite: the probability of an infinite loss.
    """

    interval: float
    lowest: int
    masses: Array
    infinite: float

    @classmethod
    def of(cls, pair: Pair, interval: float) -> "LossDistribution":
        """Put a pair's loss on a grid: the masses whose deltas are linear in exp(epsilon) between those of the grid."""
        cells = max(1, math.ceil(pair.largest / interval))
        losses = np.arange(cells + 1, dtype=np.float64) * interval
        deltas = pair.deltas(losses)
        steps = np.minimum(np.diff(deltas), 0.0)
        above = np.empty(cells)
        above[:-1] = steps[1:] / math.expm1(interval) + steps[:-1] / math.expm1(-interval)
        above[-1] = steps[-1] / math.expm1(-interval)
        above = np.maximum(above, 0.0)
        # By symmetry a loss and its opposite have probabilities in the ratio exp(loss).
        kept = min(cells, math.ceil(-_LOWEST_LOSS / interval))
        below = above[:kept] * np.exp(-losses[1 : kept + 1])
        rest = max(0.0, 1 - float(deltas[-1]) - float(above.sum()) - float(below.sum()))
        return cls(interval, -kept, np.concatenate([below[::-1], [rest], above]), float(deltas[-1]))

    @classmethod
    def rounded(cls, losses: Array, masses: Array, interval: float) -> "LossDistribution":
        """Put a discrete loss (N,) with its probabilities (N,) under P on a grid that 0 lies on.

        Each is split between the two points beside it so that P and Q keep their sums: no delta gets smaller.
        """
        below = np.floor(losses / interval)
        upward = masses * np.expm1(below * interval - losses) / math.expm1(-interval)
        cells = below.astype(np.int64)
        lowest, highest = min(int(cells.min()), 0), max(int(cells.max()), 0) + 1
        size = highest - lowest + 1
        kept = np.bincount(cells - lowest, masses - upward, size) + np.bincount(cells - lowest + 1, upward, size)
        return cls(interval, lowest, np.where(kept > _NEGLIGIBLE, kept, 0.0), 0.0)

    @classmethod
    def under(cls, lowest: int, deltas: Array, interval: float) -> "LossDistribution":
        """Return the loss whose delta is the largest convex function of exp(epsilon) that is at most this.

        Args:
            lowest: the lowest epsilon, in intervals.
            deltas: (N,) upper bounds of delta from there on, N at least 2.
            interval: of the grid.
        """
        odds = np.exp((lowest + np.arange(deltas.size)) * interval)
        widths = np.diff(odds, prepend=0.0)
        slopes = scipy.optimize.isotonic_regression(np.diff(deltas, prepend=1.0) / widths, weights=widths).x
        masses = odds * np.diff(slopes, append=0.0)
        return cls(interval, lowest, masses, max(0.0, 1 - float(masses.sum())))

    def tagged(self, rate: float) -> "LossDistribution":
        """Return the loss of a release that happens with probability ``rate``, and both worlds show whether it did."""
        lowest = min(self.lowest, 0)
        above = max(1 - self.lowest - self.masses.size, 0)
        masses = np.pad(rate * self.masses, (self.lowest - lowest, above))  # a loss of 0 need not be among them
        masses[-lowest] += 1 - rate
        return LossDistribution(self.interval, lowest, masses, rate * self.infinite)

    def compounded(self, count: int) -> "LossDistribution":
        """Return the loss of ``count`` of these releases, for any count: by squaring, the grid coarser as they spread.

        To look at every other point costs as much as the grid did at first, because the spread has doubled by then.
        """
        power, result = self, LossDistribution(self.interval, 0, np.ones(1), 0.0)
        while count:
            if power.infinite > 1 - _CERTAIN:
                return replace(power, infinite=1.0)
            result = result.composed_with(power) if count % 2 else result
            count //= 2
            power = power.repeated(2) if count else power
            if power.masses.size > _COMPOUNDED_CELLS:
                power, result = power.coarser(), result.coarser()
        return result

    def coarser(self) -> "LossDistribution":
        """Return the loss on every other point of the grid, rounded as :meth:`rounded` does it."""
        return replace(self.rounded(self.losses, self.masses, 2 * self.interval), infinite=self.infinite)

    def narrowed(self, largest: float) -> "LossDistribution":
        """Return the loss without negligible tails and without losses above ``largest``: these count as infinite.

        At least two cells are left, so that deltas can be interpolated.
        """
        first = min(int(np.searchsorted(np.cumsum(self.masses), _TRUNCATED)), self.masses.size - 2)
        last = self.masses.size - int(np.searchsorted(np.cumsum(self.masses[::-1]), _TRUNCATED))
        last = min(last, math.floor(largest / self.interval) - self.lowest + 1)
        if last <= first:
            return self._certain()
        last = max(last, first + 2)
        dropped = float(self.masses[:first].sum() + self.masses[last:].sum())
        return LossDistribution(self.interval, self.lowest + first, self.masses[first:last], self.infinite + dropped)

    def _certain(self) -> "LossDistribution":
        """An infinite loss, on two cells, so that deltas can be interpolated."""
        return LossDistribution(self.interval, 0, np.zeros(2), 1.0)

    def success(self, baseline: float) -> float:
        """Return sup P(E) over events with Q(E) <= ``baseline``: min over epsilon of exp(epsilon) baseline + delta."""
        with np.errstate(over="ignore"):
            return min(1.0, float(np.min(np.exp(self.losses) * baseline + self.deltas)))

    def repeated(self, count: int, most: int = _MOST_CELLS) -> "LossDistribution":
        """Return the loss of ``count`` of these releases: infinite where it is finite with a negligible probability.

        Raises:
            TooManyCellsError: it takes more cells than ``most``.
        """
        if count == 1:
            return self
        low, high = self._bounds(count)
        if high < low:
            return self._certain()
        if high - low > most:
            raise TooManyCellsError
        size = scipy.fft.next_fast_len(max(high - low + 1, self.masses.size), real=True)
        rolled = scipy.fft.irfft(scipy.fft.rfft(self.masses, size) ** count, size)
        masses = np.maximum(np.roll(rolled, -low)[: high - low + 1], 0.0)
        infinite = _TRUNCATED - math.expm1(count * math.log1p(-self.infinite))
        return LossDistribution(self.interval, count * self.lowest + low, masses, infinite)

    def _bounds(self, count: int) -> tuple[int, int]:
        """Between which sums of ``count`` positions all but a negligible probability lies (Chernoff's bound)."""
        from dp_accounting.pld import common  # here, because the import takes a second

        positions = np.arange(self.masses.size)
        mean = positions @ self.masses / self.masses.sum()
        variance = (positions - mean) ** 2 @ self.masses
        # The best order for a normal law, and others around it.
        normal = math.sqrt(-2 * math.log(_TRUNCATED) / (count * max(variance, 1e-6)))
        orders = np.concatenate([-normal * _ORDERS, normal * _ORDERS])
        low, high = common.compute_self_convolve_bounds(self.masses, count, _TRUNCATED, orders)
        return int(low), int(high)

    def composed_with(self, other: "LossDistribution") -> "LossDistribution":
        """Return the loss of this release and another one, on the same grid."""
        from scipy.signal import fftconvolve

        masses = np.maximum(fftconvolve(self.masses, other.masses), 0.0)
        infinite = self.infinite + other.infinite
        return LossDistribution(self.interval, self.lowest + other.lowest, masses, infinite)

    @cached_property
    def losses(self) -> Array:
        """(N,) the losses."""
        return np.asarray((self.lowest + np.arange(self.masses.size)) * self.interval, np.float64)

    @cached_property
    def deltas(self) -> Array:
        """(N,) delta at an epsilon of each loss."""
        from scipy.signal import lfilter

        # delta at a loss: what lies above it counts for 1 - exp(-interval), and exp(-interval) of the next delta.
        beyond = np.append(self._tails[1:] - self.infinite, 0.0)
        gains = -math.expm1(-self.interval) * np.maximum(beyond[::-1], 0.0)
        return np.asarray(self.infinite + lfilter([1.0], [1.0, -math.exp(-self.interval)], gains)[::-1], np.float64)

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon, at least 0, at which delta is at most this; infinity if none is."""
        low_enough = np.flatnonzero((self.deltas <= delta) & (self.losses >= 0))
        if low_enough.size == 0:
            return math.inf
        first = int(low_enough[0])
        # Down to the loss before delta is the tail's probability less exp(epsilon) times a constant.
        constant = self._tails[first] - self.deltas[first]
        if constant <= 0 or self._tails[first] <= delta:
            return max(0.0, float(self.losses[first] - self.interval))
        return max(0.0, float(self.losses[first] + math.log((self._tails[first] - delta) / constant)))

    @cached_property
    def _tails(self) -> Array:
        """(N,) the probability of at least each loss."""
        return np.asarray(np.cumsum(self.masses[::-1])[::-1] + self.infinite, np.float64)


@dataclass(frozen=True)
class ComposedPair(Pair):
    """Several pairs released together, as those of the blocks of a gradient.

    Attributes:
        parts: pairs, and how many of each.
    """

    parts: tuple[tuple[Pair, int], ...]

    @property
    @override
    def pieces(self) -> int:
        return sum(count * pair.pieces for pair, count in self.parts)

    @cached_property
    @override
    def largest(self) -> float:
        return self._distribution.epsilon(max(1e-14, 2 * self._distribution.infinite))

    @property
    @override
    def spread(self) -> float:
        return math.sqrt(sum(count * pair.spread**2 for pair, count in self.parts))

    @override
    def deltas(self, epsilons: Array) -> Array:
        losses = self._distribution.losses
        inside = interpolated(losses, self._distribution.deltas, np.maximum(epsilons, losses[0]))
        return np.where(epsilons < losses[0], 1.0, inside)

    @cached_property
    def _distribution(self) -> LossDistribution:
        return _composed(self.parts, _interval(self.parts))


def _composed(parts: tuple[tuple[Pair, int], ...], interval: float) -> LossDistribution:
    single = [LossDistribution.of(pair, interval).repeated(count) for pair, count in parts]
    return reduce(LossDistribution.composed_with, single)


def _interval(parts: tuple[tuple[Pair, int], ...]) -> float:
    count = sum(number for _, number in parts)
    square = sum(number * pair.spread**2 for pair, number in parts) / count
    widest = max(pair.largest for pair, _ in parts)
    return max(_SHARE_OF_SPREAD * math.sqrt(square), widest / 1e6)
