"""Balls in bins: in a pass each example takes part in one of T steps, which it chooses uniformly and secretly.

Let L be the density ratio of a step with the example and of the same step with nothing in its place (zero, or for
directional noise a uniform direction), and L' that of a step with another example. Where steps are drawn without either
they are independent, and the neighbours' ratios are the means of L_t and L'_t over the steps of a pass. So

    delta(epsilon) = E max(mean(L_t) - exp(epsilon) mean(L'_t), 0).

That grows with the convex order of each L_t - exp(epsilon) L'_t, which is largest for opposite gradients: there L is a
growing function of one coordinate, and L' its mirror image. The proof is in docs/account-proofs-batches.md. Splitting a
probability between two points of a grid keeps the mean, so it never makes delta smaller.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
import scipy
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.accounting.numerical import powered
from fedpriv.accounting.pairs import Pair, interpolated
from fedpriv.accounting.references import CeilingReference, batch_loss
from fedpriv.accounting.renyi import ORDERS

Array = NDArray[np.float64]

_OUTSIDE = 1e-15  # the probability of a sum outside of the Fourier transform
_ROUNDING, _STEP_ROUNDING = 4e-14, 5e-16  # of a sum's probability; up to 3e-16 a step was seen where delta is 0
_SMALL = 1e-10  # a delta at which losses may count as infinite
_RARE, _MOST_RARE = 1e-3, 4  # of a pass has a rare ratio in other steps, more than four with less than 1e-17
_ORDERS, _SMALLEST = 120, 1e-300
_CELL = 0.1  # in standard deviations of a step's ratio, of whose variance it adds 0.2 %
_FINE_CELL = 0.005  # where one sum serves all epsilons, and small ratios matter
_FINE, _COARSE = (2**16, 40), (2**13, 25)  # cells of a sum, and a third of the epsilons of a table
_LEAST_SPREAD, _LARGEST_SPREAD, _LARGEST_DIVERGENCE = 1e-4, 6.0, 19.0  # of a step's loss; normal: 6^2 / 2
_SEARCHED, _MARGIN = 16, 1.25  # of the largest loss, which grids round up
_NEAR = 4.0  # spreads, up to which epsilons of a table are close to each other


def amplifies(reference: CeilingReference) -> bool:
    """Whether the noise of a step is neither so small that no pass hides it, nor so large that a pass costs nothing."""
    divergence = float(reference.rdp(ORDERS[:1])[0])
    return _LEAST_SPREAD <= reference.batch_spread <= _LARGEST_SPREAD and divergence <= _LARGEST_DIVERGENCE


@dataclass(frozen=True)
class AllocationPair(Pair):
    """One pass: one of ``slots`` steps has the example, and for the neighbour another example in its place."""

    reference: CeilingReference  # of a step with the example, against one with nothing in its place
    slots: int  # T, at least 1
    coarse: bool = False  # a larger delta, ten times as fast

    @property
    @override
    def pieces(self) -> int:
        return 2  # deltas are rounded absolutely

    @property
    @override
    def spread(self) -> float:
        return self._distance * math.sqrt(math.expm1(min(self.reference.batch_spread, 1.0) ** 2) / self.slots)

    @property
    @override
    def largest(self) -> float:
        return float(self._tabulated[0][-1])

    @override
    def deltas(self, epsilons: Array) -> Array:
        return np.where(epsilons > self.largest, self._tabulated[1][-1], interpolated(*self._tabulated, epsilons))

    @property
    def _grid(self) -> tuple[int, int]:
        return _COARSE if self.coarse else _FINE

    @property
    def _rounding(self) -> float:
        """What the probabilities of sums of steps are off by at most."""
        return 6 * _OUTSIDE + _ROUNDING + _STEP_ROUNDING * self.slots

    def _rounded_up(self, weights: Array, chances: Array) -> float:
        """Return the sum of weights times probabilities, or more; of negative weights those that are nearly 0 are 0."""
        off = self._rounding
        return float(weights @ np.where(weights > 0, np.minimum(chances + off, 1.0), np.maximum(chances - off, 0.0)))

    @property
    def _distance(self) -> float:
        """Of the two neighbours' losses, in that of a step with the example and without it."""
        return 2.0

    @cached_property
    def _tabulated(self) -> tuple[Array, Array]:
        """Epsilons from 0 to the largest, close to each other where the loss lies, and their deltas."""
        coarse = np.linspace(0, _MARGIN * self._highest(_ratios(self.reference), self.slots), _SEARCHED)
        # Beyond where delta is so small, by a cell; a continuous function of the noise, so that calibration finds it.
        small = max(_SMALL, 4 * self._rounding)
        end = float(coarse[1] + np.interp(-math.log(small), -np.log(self._bounds(coarse)), coarse))
        near = min(_NEAR * self.spread, end / 3)
        count = self._grid[1]
        points = np.concatenate([np.linspace(0, near, count), np.linspace(near, end, 2 * count)[1:]])
        return points, self._bounds(points)

    def _bounds(self, epsilons: Array) -> Array:
        """Return delta or slightly more at ascending epsilons."""
        ratios = _ratios(self.reference)
        deltas = self._above(ratios, epsilons) + ratios.infinite + self._rounding
        return np.asarray(np.minimum.accumulate(np.minimum(deltas, 1.0)), np.float64)

    def _highest(self, ratios: "_Ratios", slots: int) -> float:
        """Return about the largest loss."""
        low, high = _sums(ratios, slots - 1)
        return math.log((ratios.values[-1] + high) / (ratios.least + low))

    def _above(self, ratios: "_Ratios", epsilons: Array) -> Array:
        """Return delta or more, but for the rounding of single numbers.

        With S the event that the sum of all differences is above 0, T steps alike give E max(sum, 0) / T = E(D; S), D
        the difference of one of them. The neighbour's rare ratios are lowered to the largest that is not rare, which
        makes delta a little larger; a difference of another step that makes the sum positive anyway needs no exact
        value.
        """
        large, small, masses = ratios.opposite()
        masses = np.concatenate([masses, masses])
        rare = ratios.rare(self.slots)
        low, high = _sums(ratios, self.slots - 1)
        found = np.empty(epsilons.size)
        for number, odds in enumerate(np.exp(epsilons)):
            own = np.concatenate([large, small]) - odds * np.minimum(np.concatenate([small, large]), rare)
            enough = odds * (high + rare)
            lowered = np.minimum(own, enough)
            ends = low - odds * high, high - odds * low + _MOST_RARE * float(lowered.max())
            others = _Sum.of(lowered, masses, self.slots - 1, ends, self._grid[0])
            cells, cell_masses = _split(own, masses, others.cell)
            found[number] = self._rounded_up(cell_masses * cells * others.cell, others.above(-cells))
        return found


@dataclass(frozen=True)
class ZeroOutAllocationPair(AllocationPair):
    """One pass with the example, against one with nothing in its place; exchanged where it ``comes``."""

    comes: bool = False

    @property
    @override
    def exchanged(self) -> Self:
        return replace(self, comes=not self.comes)

    @property
    @override
    def _grid(self) -> tuple[int, int]:
        cells, count = super()._grid
        return cells, 5 * count if self.comes else count  # one sum serves all epsilons, and delta falls fast

    @property
    @override
    def _distance(self) -> float:
        return 1.0

    @override
    def _highest(self, ratios: "_Ratios", slots: int) -> float:
        low, high = _sums(ratios, slots - 1)
        return math.log(slots / (ratios.least + low) if self.comes else (ratios.values[-1] + high) / slots)

    @override
    def _above(self, ratios: "_Ratios", epsilons: Array) -> Array:
        count, odds = self.slots - 1, np.exp(epsilons)
        low, high = _sums(ratios, count)
        if self.comes:
            # Here rare ratios are lowered to the largest that is not rare, which makes delta a little larger.
            values = np.minimum(ratios.values, ratios.rare(self.slots))
            others = _Sum.of(values, ratios.masses, count, (low, high), self._grid[0], _FINE_CELL)
            cells, masses = _split(values, ratios.masses, others.cell)
            own = cells * others.cell
            return np.array(
                [
                    self._rounded_up(masses * (1 - b * own), others.below(self.slots / b / others.cell - cells))
                    for b in odds
                ]
            )
        found = np.empty(epsilons.size)
        for number, enough in enumerate(self.slots * odds):
            lowered = np.minimum(ratios.values, enough)
            ends = low, high + _MOST_RARE * float(lowered.max())
            others = _Sum.of(lowered, ratios.masses, count, ends, self._grid[0])
            cells, masses = _split(ratios.values, ratios.masses, others.cell)
            own = cells * others.cell - odds[number]
            found[number] = self._rounded_up(masses * own, others.above(enough / others.cell - cells))
        return found


@dataclass(frozen=True, eq=False)
class _Ratios:
    """The density ratio of a step with the example and without it, where it is drawn without."""

    values: Array  # (N,), ascending, from 0 on
    masses: Array  # (N,), their probabilities
    infinite: float  # the probability, with the example, of what does not happen without it

    @property
    def least(self) -> float:
        """The smallest ratio above 0."""
        return float(self.values[self.values > 0][0])

    @cached_property
    def _beyond(self) -> Array:
        """(N,), the probability of at least each value."""
        return np.cumsum(self.masses[::-1])[::-1]

    def rare(self, steps: int) -> float:
        """Return what the ratios of so many steps exceed with a small probability."""
        return float(self.values[np.flatnonzero(self._beyond * steps > _RARE)[-1]])

    def opposite(self) -> tuple[Array, Array, Array]:
        """Return the larger and the smaller of the ratios of two opposite gradients, and half of the probabilities.

        Where one ratio is at its quantile s, the other is at 1 - s.
        """
        ends = [np.cumsum(masses) for masses in (self.masses[::-1], self.masses)]
        cuts = np.unique(np.concatenate([*(end[end < 0.5] for end in ends), [0.5]]))
        widths = np.diff(cuts, prepend=0.0)
        large, small = (np.searchsorted(end, cuts - widths / 2).clip(0, self.values.size - 1) for end in ends)
        return self.values[::-1][large], self.values[small], widths


@lru_cache(maxsize=4)
def _ratios(reference: CeilingReference) -> _Ratios:
    """The ratios of a step."""
    loss = batch_loss(reference)
    likely = loss.masses > 0
    values = np.exp(loss.losses[likely])
    masses = loss.masses[likely] / values
    rest = max(0.0, 1 - float(masses.sum()))
    return _Ratios(np.append(0.0, values), np.append(rest, masses), loss.infinite)


@lru_cache(maxsize=8)
def _sums(ratios: _Ratios, count: int) -> tuple[float, float]:
    """Between what the sum of so many ratios lies (Chernoff's bound), where rare ones are lowered."""
    values, masses = np.minimum(ratios.values, ratios.rare(count + 1)), ratios.masses
    deviation = math.sqrt(float(masses @ values**2) - float(masses @ values) ** 2)
    falling = np.geomspace(1e-4, 1e3, _ORDERS) / deviation
    growing = np.geomspace(min(1e-4 / deviation, 1 / values[-1]), 500 / values[-1], _ORDERS)
    moments = np.maximum(np.exp(-np.outer(falling, values)) @ masses, _SMALLEST)
    lows = (-count * np.log(moments) + math.log(_OUTSIDE)) / falling
    highs = (count * np.log(np.exp(np.outer(growing, values)) @ masses) - math.log(_OUTSIDE)) / growing
    return max(0.0, float(lows.max())), min(float(highs.min()), count * float(values[-1]))


@dataclass(frozen=True)
class _Sum:
    """The sum of the values of several steps, on a grid."""

    cell: float  # above 0
    first: int  # the lowest sum, in cells
    probabilities: Array  # (N,), of the sums from there on

    @classmethod
    def of(
        cls, values: Array, masses: Array, count: int, ends: tuple[float, float], most: int, share: float = _CELL
    ) -> "_Sum":
        """Return the sum of ``count`` steps, which lies between these ends, on about ``most`` cells."""
        low, high = ends
        width = max(high - low, float(np.ptp(values)), 1e-9)
        deviation = math.sqrt(max(float(masses @ values**2) - float(masses @ values) ** 2, 0.0))
        cell = max(share * deviation, width / most)
        # What the splitting of values between cells adds lies between (Hoeffding's inequality).
        reach = math.ceil(math.sqrt(-count * math.log(_OUTSIDE) / 2))
        size = scipy.fft.next_fast_len(math.ceil(width / cell) + 2 * reach + 4, real=True)
        cells, cell_masses = _split(values, masses, cell)
        placed = np.bincount(cells.astype(np.int64) % size, cell_masses, size)
        first = math.floor(low / cell) - 1 - reach
        summed = scipy.fft.irfft(powered(scipy.fft.rfft(placed), count), size)
        return cls(cell, first, np.roll(summed, -(first % size)))

    def above(self, cells: Array) -> Array:
        """Return the probability of a sum above so many cells."""
        return self._at_least[self._position(np.floor(cells) + 1)]

    def below(self, cells: Array) -> Array:
        """Return the probability of a sum below so many cells."""
        return self._before[self._position(np.ceil(cells))]

    def _position(self, cells: Array) -> NDArray[np.int64]:
        return np.clip(cells - self.first, 0, self.probabilities.size).astype(np.int64)

    @cached_property
    def _at_least(self) -> Array:
        return np.append(np.cumsum(self.probabilities[::-1])[::-1], 0.0)

    @cached_property
    def _before(self) -> Array:
        return np.append(0.0, np.cumsum(self.probabilities))


def _split(values: Array, masses: Array, cell: float) -> tuple[Array, Array]:
    """Values in cells, and their probabilities: each is split between two cells so that its mean stays."""
    lower = np.floor(values / cell)
    upward = masses * (values / cell - lower)
    return np.concatenate([lower, lower + 1]), np.concatenate([masses - upward, upward])
