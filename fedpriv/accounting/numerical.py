"""Composition of dominating pairs by privacy-loss distributions (PLD): tighter than Renyi accounting, and slower.

A pair is put on a grid by its exact deltas, interpolated from above ("connect the dots", Doroshenko et al. 2022), and
composed by a fast Fourier transform between Chernoff's bounds (Koskela, Jälkö and Honkela 2020).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np
import scipy
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.accounting.pairs import Pair, interpolated

Array = NDArray[np.float64]

# Pairs end where their deltas are negligible, also of many releases.
_SMALLEST_DELTA, _DELTA_PER_RELEASE = 1e-20, 1e-25
# Deltas of several pairs that were composed by a plain Fourier transform are rounded absolutely.
_SMALLEST_COMPOSED_DELTA, _DELTA_PER_COMPOSED_RELEASE = 1e-9, 1e-12
_HELD_BACK, _RELEASES_HELD_BACK = 1e-3, 1e-13  # for rounding, the latter for each release
_LARGEST_EPSILON = 1e6
_TRUNCATED = 1e-15  # of the probability at each composition; it counts as an infinite loss
_BEYOND_ENDS = 1e-6  # of delta
_ENDS = np.geomspace(1e-9, 1, 500)  # of the largest loss
_COARSEST = 500.0  # grid; exp of 710 overflows
_MOST_CELLS, _MOST_TILTED_CELLS = 2**23, 2**21  # of a grid after composition
_MOST_COARSER = 16  # times; on coarser grids a figure tells nothing
# The grid adds at most a quarter of its square to the variance of each loss.
_SHARE_OF_SPREAD = 0.1
_LOWEST_LOSS, _LOWEST_CELL = -60.0, 2**16  # a smaller loss has a probability below exp(-60)
_NEGLIGIBLE = 1e-40  # sums of smaller probabilities overflow in scipy
_CERTAIN = 1e-12  # the probability of a finite loss that does not matter any more
_COMPOUNDED_CELLS = 2**15
_LARGEST_EXPONENT = 600.0  # exp of 710 overflows
_MOST_ORDER = 50.0  # a cell's probability is negligible compared with that of the next
_LEAST_ORDER = 1e-3
_CELLS_KEPT = 1000


def composed_epsilon(
    parts: tuple[tuple[Pair, int], ...], delta: float, known: float, share_of_spread: float = _SHARE_OF_SPREAD
) -> float | None:
    """Return epsilon of releases that are dominated by pairs, adaptively composed; None: out of an accurate range."""
    count = sum(number for _, number in parts)
    if delta < _smallest_delta(parts) or not 0 < known <= _LARGEST_EPSILON:
        return None
    allowed = delta * (1 - _HELD_BACK - _RELEASES_HELD_BACK * count)
    ends = [_end(pair, _BEYOND_ENDS * allowed / count) for pair, _ in parts]
    interval = max(_interval(parts, max(ends), share_of_spread), *(pair.finest for pair, _ in parts))
    epsilon = _on_grids(parts, ends, interval, allowed)
    return epsilon if math.isfinite(epsilon) else None


def _end(pair: Pair, chance: float) -> float:
    """Return a loss beyond which delta is at most this: what lies there may count as infinite."""
    losses = pair.largest * _ENDS
    low_enough = np.flatnonzero(pair.deltas(losses) <= chance)
    return float(losses[low_enough[0]]) if low_enough.size else pair.largest


def _smallest_delta(parts: tuple[tuple[Pair, int], ...]) -> float:
    releases = sum(count * pair.pieces for pair, count in parts)
    if any(pair.pieces > 1 for pair, _ in parts):
        return max(_SMALLEST_COMPOSED_DELTA, _DELTA_PER_COMPOSED_RELEASE * releases)
    return max(_SMALLEST_DELTA, _DELTA_PER_RELEASE * releases)


def _on_grids(parts: tuple[tuple[Pair, int], ...], ends: list[float], interval: float, delta: float) -> float:
    """Return epsilon on a grid, or the next coarser one that holds the sum; losses round up. Infinity: none does."""
    coarsest = min(_COARSEST, _MOST_COARSER * interval)
    while interval <= coarsest:
        laws = [LossDistribution.of(pair, interval, end) for (pair, _), end in zip(parts, ends, strict=True)]
        try:
            return _tilted_epsilon(list(zip(laws, (count for _, count in parts), strict=True)), delta)
        except TooManyCellsError:
            interval *= 2
    return math.inf


class TooManyCellsError(Exception):
    """Losses that are so large compared with their spread, as rare ones are, that no grid holds their sum."""


@dataclass(frozen=True)
class LossDistribution:
    """The privacy loss on a grid, so that no delta is too small."""

    interval: float  # of the grid, above 0
    lowest: int  # the lowest loss, in intervals
    masses: Array  # (N,) the probabilities of the losses from there on
    infinite: float  # the probability of an infinite loss

    @classmethod
    def of(cls, pair: Pair, interval: float, end: float = math.inf) -> "LossDistribution":
        """Put a pair's loss on a grid, deltas linear in exp(epsilon) in between; beyond ``end`` it is infinite."""
        above, infinite = _masses(pair, interval, end)
        # The opposite loss of the exchanged pair has a probability that is exp(loss) times as large.
        below = above if pair.exchanged is pair else _masses(pair.exchanged, interval, _LOWEST_CELL * interval)[0]
        below = below * np.exp(-interval * np.arange(1.0, below.size + 1))
        # Losses below the lowest that is kept are rounded up to it.
        kept = min(below.size, math.ceil(-_LOWEST_LOSS / interval), _LOWEST_CELL)
        below = np.append(below[: kept - 1], below[kept - 1 :].sum())
        rest = max(0.0, 1 - infinite - float(above.sum()) - float(below.sum()))
        return cls(interval, -kept, np.concatenate([below[::-1], [rest], above]), infinite)

    @classmethod
    def rounded(cls, losses: Array, masses: Array, interval: float) -> "LossDistribution":
        """Put a discrete loss (N,) with probabilities (N,) on a grid, split so that no delta gets smaller."""
        below = np.floor(losses / interval)
        upward = masses * np.expm1(below * interval - losses) / math.expm1(-interval)
        cells = below.astype(np.int64)
        lowest, highest = min(int(cells.min()), 0), max(int(cells.max()), 0) + 1
        size = highest - lowest + 1
        kept = np.bincount(cells - lowest, masses - upward, size) + np.bincount(cells - lowest + 1, upward, size)
        return cls(interval, lowest, np.where(kept > _NEGLIGIBLE, kept, 0.0), 0.0)

    @classmethod
    def under(cls, lowest: int, deltas: Array, interval: float) -> "LossDistribution":
        """Return the loss whose delta is the largest convex function of exp(epsilon) below bounds (N,), N >= 2."""
        odds = np.exp((lowest + np.arange(deltas.size)) * interval)
        widths = np.diff(odds, prepend=0.0)
        slopes = scipy.optimize.isotonic_regression(np.diff(deltas, prepend=1.0) / widths, weights=widths).x
        masses = odds * np.maximum(np.diff(slopes, append=0.0), 0.0)  # by rounding some would be below 0
        return cls(interval, lowest, masses, max(0.0, 1 - float(masses.sum())))

    def tagged(self, rate: float) -> "LossDistribution":
        """Return the loss of a release that happens with probability ``rate``, and both worlds show whether it did."""
        lowest = min(self.lowest, 0)
        above = max(1 - self.lowest - self.masses.size, 0)
        masses = np.pad(rate * self.masses, (self.lowest - lowest, above))  # a loss of 0 need not be among them
        masses[-lowest] += 1 - rate
        return LossDistribution(self.interval, lowest, masses, rate * self.infinite)

    def compounded(self, count: int) -> "LossDistribution":
        """Return the loss of ``count`` of these releases by squaring, on a grid that gets coarser as they spread."""
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
        """Return the loss with negligible tails, and losses above ``largest``, as infinite; two cells stay."""
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
        """Return the loss of ``count`` of these releases: infinite where it is finite with a negligible probability."""
        if count == 1:
            return self
        low, high = self._bounds(count)
        if high < low:
            return self._certain()
        if high - low > most:
            raise TooManyCellsError
        size = scipy.fft.next_fast_len(max(high - low + 1, self.masses.size), real=True)
        rolled = scipy.fft.irfft(powered(scipy.fft.rfft(self.masses, size), count), size)
        masses = np.maximum(np.roll(rolled, -low)[: high - low + 1], 0.0)
        infinite = _TRUNCATED - math.expm1(count * math.log1p(-self.infinite))
        return LossDistribution(self.interval, count * self.lowest + low, masses, infinite)

    def _bounds(self, count: int) -> tuple[int, int]:
        """Between which sums of ``count`` positions all but a negligible probability lies (Chernoff's bound)."""
        grid, chance = _Tilting.of(replace(self, lowest=0), count), math.log(_TRUNCATED / 2)
        mirrored = grid.mirrored()
        rarest = _best_order([grid], chance), _best_order([mirrored], chance)
        high, low = _exceeded([grid], rarest[0], chance), -_exceeded([mirrored], rarest[1], chance)
        return max(math.floor(low), 0), min(math.ceil(high), count * (self.masses.size - 1))

    def composed_with(self, other: "LossDistribution") -> "LossDistribution":
        """Return the loss of this release and another one, on the same grid."""
        masses = np.maximum(_convolved(self.masses, other.masses), 0.0)
        infinite = self.infinite + other.infinite
        return LossDistribution(self.interval, self.lowest + other.lowest, masses, infinite)

    @cached_property
    def losses(self) -> Array:
        """(N,) the losses."""
        return np.asarray((self.lowest + np.arange(self.masses.size)) * self.interval, np.float64)

    @cached_property
    def deltas(self) -> Array:
        """(N,) delta at an epsilon of each loss."""
        # delta at a loss: what lies above it counts for 1 - exp(-interval), and exp(-interval) of the next delta.
        beyond = np.append(self._tails[1:] - self.infinite, 0.0)
        gains = -math.expm1(-self.interval) * np.maximum(beyond[::-1], 0.0)
        return np.asarray(self.infinite + _recurrence(gains, math.exp(-self.interval))[::-1], np.float64)

    def deltas_at(self, epsilons: Array) -> Array:
        """Return delta, or slightly more, at each epsilon (N,)."""
        inside = interpolated(self.losses, self.deltas, np.maximum(epsilons, self.losses[0]))
        # Below all losses it is 1 less exp(epsilon) times all of Q that is on the grid.
        below = 1 - np.exp(np.minimum(epsilons - self.losses[0], 0.0)) * (1 - self.deltas[0])
        return np.where(epsilons < self.losses[0], below, inside)

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


def powered(base: NDArray[np.complex128], count: int) -> NDArray[np.complex128]:
    """Return base ** count by squaring, ten times as fast as numpy's complex powers."""
    result = np.ones_like(base)
    while count:
        result = result * base if count % 2 else result
        base = base * base
        count //= 2
    return result


# scipy.signal has both of these, and takes longer to import than an account takes to compute.


def _convolved(left: Array, right: Array) -> Array:
    count = left.size + right.size - 1
    size = scipy.fft.next_fast_len(count, real=True)
    spectrum = scipy.fft.rfft(left, size) * scipy.fft.rfft(right, size)
    return np.asarray(scipy.fft.irfft(spectrum, size)[:count], np.float64)


def _recurrence(gains: Array, factor: float) -> Array:
    """x_i = gains_i + factor x_(i - 1): a system with ones on its diagonal and -factor below it."""
    bands = np.empty((2, gains.size), order="F")
    bands[0], bands[1] = 1.0, -factor
    return np.asarray(scipy.linalg.blas.dtbsv(1, bands, gains, lower=1, diag=1), np.float64)


def _tilted_epsilon(laws: list[tuple[LossDistribution, int]], delta: float) -> float:
    """Return epsilon on one grid, accurate for small delta: laws are composed tilted by Chernoff's order."""
    infinite = -math.expm1(sum(count * math.log1p(-law.infinite) for law, count in laws))
    if infinite >= delta:
        return math.inf
    grids = [_Tilting.of(law, count) for law, count in laws]
    interval, log_chance = laws[0][0].interval, math.log(_TRUNCATED / 2)
    order = _best_order(grids, math.log(delta), interval)
    most = _exceeded(grids, order, math.log(delta))
    tilted = [grid.by(order) for grid in grids]
    mirrored = [grid.mirrored() for grid in tilted]
    high = _exceeded(tilted, _best_order(tilted, log_chance), log_chance)
    low = -_exceeded(mirrored, _best_order(mirrored, log_chance), log_chance)
    first, last = math.floor(low), math.ceil(high)
    if last - first > _MOST_TILTED_CELLS:
        raise TooManyCellsError
    size = scipy.fft.next_fast_len(max(last - first + 1, *(law.masses.size for law, _ in laws)), real=True)
    spectrum = reduce(np.multiply, (grid.spectrum(size) for grid in tilted))
    start = sum(grid.start for grid in grids)
    masses = np.roll(scipy.fft.irfft(spectrum, size), -((first - start) % size))[: last - first + 1]
    # exp(log M - order * most) is delta: probabilities are in units of it.
    density = np.exp(np.clip(order * (most - np.arange(first, last + 1)), -_LARGEST_EXPONENT, _LARGEST_EXPONENT))
    beyond = infinite / delta + _TRUNCATED * float(density[-1])
    law = LossDistribution(interval, first, np.maximum(masses, 0.0) * density, beyond)
    return max(law.epsilon(1.0), first * interval)


@dataclass(frozen=True)
class _Tilting:
    """The finite losses of ``count`` like releases, for other densities."""

    start: int  # the sum of the lowest losses, in intervals
    positions: Array  # (N,) losses of one release in intervals, ascending
    log_masses: Array  # (N,) logarithms of their probabilities
    lowest: int  # of one release
    count: int  # how many releases

    @classmethod
    def of(cls, law: LossDistribution, count: int) -> "_Tilting":
        """Of so many releases with this law."""
        kept = np.flatnonzero(law.masses)
        return cls(
            count * law.lowest, law.lowest + kept.astype(np.float64), np.log(law.masses[kept]), law.lowest, count
        )

    def log_moment(self, order: float) -> float:
        """Return log of the mean of exp(order * loss) of all releases, losses in intervals."""
        exponents = self.log_masses + order * self.positions
        largest = float(exponents.max())
        return self.count * (largest + math.log(float(np.exp(exponents - largest).sum())))

    def lumped(self) -> "_Tilting":
        """Return about the same on fewer cells: far from 0 those within a thousandth of each other are one."""
        far = np.geomspace(_CELLS_KEPT, max(np.abs(self.positions).max(), _CELLS_KEPT) + 1, 10 * _CELLS_KEPT)
        edges = np.concatenate([-far[::-1], np.arange(1 - _CELLS_KEPT, _CELLS_KEPT), far])
        starts = np.searchsorted(self.positions, edges)
        starts = starts[(starts < self.positions.size) & (np.diff(starts, prepend=-1) > 0)]
        masses = np.exp(self.log_masses)
        sums, moments = np.add.reduceat(masses, starts), np.add.reduceat(masses * self.positions, starts)
        likely = sums > 0
        return replace(self, positions=moments[likely] / sums[likely], log_masses=np.log(sums[likely]))

    def by(self, order: float) -> "_Tilting":
        """Return it with the density exp(order * loss), normalised."""
        logs = self.log_masses + order * self.positions
        return replace(self, log_masses=logs - self.log_moment(order) / self.count)

    def mirrored(self) -> "_Tilting":
        """Return it with the opposite losses."""
        return replace(self, positions=-self.positions[::-1], log_masses=self.log_masses[::-1])

    def spectrum(self, size: int) -> NDArray[np.complex128]:
        """Return the Fourier transform of the law of the sum, from ``start`` on."""
        masses = np.zeros(size)
        masses[(self.positions - self.lowest).astype(np.int64)] = np.exp(self.log_masses)
        return powered(scipy.fft.rfft(masses), self.count)


def _exceeded(grids: list[_Tilting], order: float, log_chance: float) -> float:
    """Return what the sum of all losses exceeds with this probability at most, by Chernoff's bound at an order."""
    return (sum(grid.log_moment(order) for grid in grids) - log_chance) / order


def _best_order(grids: list[_Tilting], log_chance: float, interval: float | None = None) -> float:
    """Return the order of the best of Chernoff's bounds, which are nearly flat around it."""
    lumped = [grid.lumped() for grid in grids]
    least = _LEAST_ORDER / sum(grid.count * float(np.ptp(grid.positions)) + 1 for grid in grids)

    def bound(log_order: float) -> float:
        order = math.exp(log_order)
        share = (
            0.0 if interval is None else -math.log1p(order / interval) - order / interval * math.log1p(interval / order)
        )
        return _exceeded(lumped, order, log_chance - share)

    ends = math.log(least), math.log(_MOST_ORDER)
    found = scipy.optimize.minimize_scalar(bound, bounds=ends, method="bounded", options={"xatol": 0.05})
    return math.exp(found.x)


@dataclass(frozen=True)
class ComposedPair(Pair):
    """Several pairs released together, as those of the blocks of a gradient."""

    parts: tuple[tuple[Pair, int], ...]  # pairs, and how many of each

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
        return self._distribution.deltas_at(epsilons)

    @cached_property
    def _distribution(self) -> LossDistribution:
        interval = _interval(self.parts, max(pair.largest for pair, _ in self.parts))
        single = [LossDistribution.of(pair, interval).repeated(count) for pair, count in self.parts]
        return reduce(LossDistribution.composed_with, single)


def _masses(pair: Pair, interval: float, end: float) -> tuple[Array, float]:
    """Return the probabilities of losses of 1, 2, ... intervals, and of an infinite one."""
    cells = max(1, math.ceil(min(pair.largest, end) / interval))
    deltas = pair.deltas(np.arange(cells + 1, dtype=np.float64) * interval)
    steps = np.minimum(np.diff(deltas), 0.0)
    above = np.empty(cells)
    above[:-1] = steps[1:] / math.expm1(interval) + steps[:-1] / math.expm1(-interval)
    above[-1] = steps[-1] / math.expm1(-interval)
    return np.maximum(above, 0.0), float(deltas[-1])


def _interval(parts: tuple[tuple[Pair, int], ...], widest: float, share: float = _SHARE_OF_SPREAD) -> float:
    count = sum(number for _, number in parts)
    square = sum(number * pair.spread**2 for pair, number in parts) / count
    return max(share * math.sqrt(square), widest / 1e6)
