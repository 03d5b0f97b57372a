"""Reference pairs: a participation of the secret z (P) against the same run with something in its place (Q).

Any law that does not depend on z may stand there, so it need not be that of a neighbouring data set: zero in the place
of a clipped gradient, a uniform direction in the place of a draw. That is half as far away as the opposite gradient of
the ledger. A pair here need not be symmetric: delta(epsilon) = sup over events of P - exp(epsilon) Q, epsilon of either
sign.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce

import numpy as np
import scipy
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.accounting.amplification import LARGEST_SAMPLED_ORDER, poisson_gaussian_rdp, tagged_rdp
from fedpriv.accounting.numerical import LossDistribution, TooManyCellsError
from fedpriv.accounting.pairs import DirectionalPair, Pair
from fedpriv.accounting.renyi import gaussian_rdp, laplace_rdp
from fedpriv.accounting.vmf_functions import log_mgf, mean_resultant_length

Array = NDArray[np.float64]

_DEVIATIONS = 9.0  # beyond so many standard deviations a normal law has a probability of 1e-19
_LOWER_DEVIATIONS = 50.0  # and a Gamma law, which directions in few dimensions come close to, 1e-16
_LOWEST_LOSS = -600.0  # exp of 710 overflows
_PLAIN_CELLS = 500  # of the coordinate, beside those that are asked for
SHARE_OF_SPREAD = 0.003  # a grid of so many standard deviations of a loss adds 1e-6 of its variance
MOST_CELLS = 10**5  # of a single loss
_AT_ONCE = 2**20  # cells after composition by a single transform
_JOINED_CELLS = 2**15  # of the losses of several blocks: a thousandth of their spread
LARGEST_LOSS = 600.0  # exp of 710 overflows
_ROUNDING = 1e-12  # the Fourier transform rounds absolutely
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)
_NOTHING = np.empty(0)


class ReferencePair(Pair):
    """A pair by the density of P in a coordinate of which the loss is a monotone function, and by atoms."""

    @property
    @abstractmethod
    def ends(self) -> tuple[float, float]:
        """The coordinates between which all but a probability of about 1e-16 of P lies outside its atoms."""

    @abstractmethod
    def coordinates(self, losses: Array) -> Array:
        """Return where the loss has these values; any end where it has not."""

    @abstractmethod
    def losses(self, coordinates: Array) -> Array:
        """Return log P / Q."""

    @abstractmethod
    def log_density(self, coordinates: Array) -> Array:
        """Return the log of the density of P, but for a constant."""

    @property
    def atoms(self) -> tuple[Array, Array]:
        """Losses with a probability of their own, and their probabilities."""
        return _NOTHING, _NOTHING

    @property
    @override
    def largest(self) -> float:
        return float(np.max(np.concatenate([self.losses(np.array(self.ends)), self.atoms[0]])))

    @property
    def smallest(self) -> float:
        """The smallest loss."""
        return float(np.min(np.concatenate([self.losses(np.array(self.ends)), self.atoms[0]])))

    @abstractmethod
    def rdp(self, orders: Array) -> Array:
        """Return the Renyi divergence of P from Q at orders above 1."""

    @property
    def is_normal(self) -> bool:
        """Whether both distributions are normal, ``spread`` standard deviations apart."""
        return False

    def law(self, edges: Array) -> tuple[Array, Array]:
        """Return the loss under P, values and probabilities, no cell between ``edges`` crossed (Gauss-Legendre)."""
        low, high = self.ends
        losses, masses = self.atoms
        if low == high:
            return losses, masses
        inside = np.clip(self.coordinates(edges), low, high)
        cells = np.unique(np.concatenate([np.linspace(low, high, _PLAIN_CELLS + 1), inside]))
        halves = np.diff(cells)[:, None] / 2
        nodes = (cells[:-1, None] + halves * (1 + _NODES)).ravel()
        log_density = self.log_density(nodes)
        density = np.exp(log_density - log_density.max()) * (halves * _WEIGHTS).ravel()
        density *= (1 - masses.sum()) / density.sum()
        return np.concatenate([losses, self.losses(nodes)]), np.concatenate([masses, density])

    @override
    def deltas(self, epsilons: Array) -> Array:
        """Return delta at each epsilon (N,), of either sign."""
        losses, masses = self.law(epsilons)
        order = np.argsort(-losses)
        losses, masses = losses[order], masses[order]
        above = np.searchsorted(-losses, -epsilons)
        second_masses = masses * np.exp(-np.maximum(losses, _LOWEST_LOSS))
        first, second = (np.concatenate([[0.0], np.cumsum(law)])[above] for law in (masses, second_masses))
        return np.asarray(np.clip(first - np.exp(epsilons) * second, 0.0, 1.0), np.float64)


@dataclass(frozen=True)
class CeilingReference:
    """What a mechanism's ceiling compares a run with."""

    parts: tuple[tuple[ReferencePair, int], ...]  # pairs of one participation, and how many of each; at least one
    theorem: str  # which two runs they are, in words, and why these pairs compose
    is_hidden: bool = False  # whether the pair is that of a sampled step already

    @property
    def pieces(self) -> int:
        """How many releases one participation consists of."""
        return sum(number for _, number in self.parts)

    @property
    def batch_spread(self) -> float:
        """The standard deviation of the loss of one participation."""
        return math.sqrt(sum(number * pair.spread**2 for pair, number in self.parts))

    @property
    def spread(self) -> float:
        """Of a single release, in the root of the mean square."""
        return self.batch_spread / math.sqrt(self.pieces)

    def rdp(self, orders: Array) -> Array:
        """Return the Renyi divergence of one participation."""
        return np.asarray(sum(number * pair.rdp(orders) for pair, number in self.parts), np.float64)

    @property
    def interval(self) -> float:
        """The grid on which the loss of a participation is put."""
        widest = max(min(pair.largest, LARGEST_LOSS) - max(pair.smallest, -LARGEST_LOSS) for pair, _ in self.parts)
        largest = min(max(pair.largest for pair, _ in self.parts), LARGEST_LOSS)
        return grid_interval(self.spread, widest, largest)


@dataclass(frozen=True)
class NormalReference(ReferencePair):
    """(1 - q) N(0, sigma^2) + q N(1, sigma^2) against N(0, sigma^2): with z, which Poisson batches have, or without it.

    The coordinate is that of the noise, in standard deviations. Tight (Hayes, Mahloujifar and Balle 2023).
    """

    sigma: float  # noise standard deviation over clip_norm, above 0
    rate: float = 1.0  # q in (0, 1]; 1: in every batch

    @property
    @override
    def is_normal(self) -> bool:
        return self.rate == 1

    @property
    @override
    def spread(self) -> float:
        return 1 / self.sigma if self.is_normal else self.rate * math.sqrt(math.expm1(min(self.sigma**-2, 1.0)))

    @override
    def rdp(self, orders: Array) -> Array:
        # Who took part could be told, too.
        divergences = tagged_rdp(orders, gaussian_rdp(orders, self.sigma), self.rate)
        within = (orders <= LARGEST_SAMPLED_ORDER) & (self.rate < 1)
        if np.any(within):
            hidden = poisson_gaussian_rdp(orders[within], self.sigma, self.rate)
            divergences[within] = np.minimum(divergences[within], hidden)
        return divergences

    @property
    @override
    def ends(self) -> tuple[float, float]:
        return (1 / self.sigma if self.is_normal else 0.0) - _DEVIATIONS, 1 / self.sigma + _DEVIATIONS

    @override
    def coordinates(self, losses: Array) -> Array:
        with np.errstate(divide="ignore"):  # log 0 for losses below the smallest
            near = np.log(np.maximum(np.expm1(np.minimum(losses, 1.0)) + self.rate, 0.0))
            far = losses + np.log1p((self.rate - 1) * np.exp(-np.maximum(losses, 1.0)))
        return self.sigma * (np.where(losses < 1, near, far) - math.log(self.rate)) + 0.5 / self.sigma

    @override
    def losses(self, coordinates: Array) -> Array:
        used = math.log(self.rate) + (coordinates - 0.5 / self.sigma) / self.sigma
        return used if self.is_normal else np.logaddexp(math.log1p(-self.rate), used)

    @override
    def log_density(self, coordinates: Array) -> Array:
        return self.losses(coordinates) - coordinates**2 / 2


@dataclass(frozen=True)
class LaplaceReference(ReferencePair):
    """Laplace distributions on the line at a distance of ``shift`` scales; the coordinate is the loss."""

    shift: float  # above 0

    @property
    @override
    def spread(self) -> float:
        return min(self.shift, 1.0)

    @override
    def rdp(self, orders: Array) -> Array:
        return laplace_rdp(orders, self.shift)

    @property
    @override
    def ends(self) -> tuple[float, float]:
        return max(-self.shift, self.shift - 80.0), self.shift

    @property
    @override
    def atoms(self) -> tuple[Array, Array]:
        return np.array([-self.shift, self.shift]), np.array([math.exp(-self.shift) / 2, 0.5])

    @override
    def coordinates(self, losses: Array) -> Array:
        return losses

    @override
    def losses(self, coordinates: Array) -> Array:
        return coordinates

    @override
    def log_density(self, coordinates: Array) -> Array:
        return coordinates / 2


@dataclass(frozen=True)
class DirectionalReference(ReferencePair):
    """A VMF law against the uniform one, the pair of docs/ceilings.md: the loss is kappa t - log M_K(kappa).

    t is the cosine of the draw with its direction; the coordinate is their angle. For large K this is nearly the pair
    of normal distributions at a distance of kappa / sqrt(K).
    """

    kappa: float  # at least 0
    dimension: int  # K, at least 1

    @property
    @override
    def spread(self) -> float:
        return DirectionalPair(self.kappa, self.dimension).spread / 2 if self.kappa > 0 else 0.0

    @override
    def rdp(self, orders: Array) -> Array:
        divergences = (log_mgf(self.dimension, orders * self.kappa) - orders * self._log_mgf) / (orders - 1)
        return np.clip(divergences, 0.0, self.kappa - self._log_mgf)

    @cached_property
    @override
    def ends(self) -> tuple[float, float]:
        if self._is_discrete:
            return 0.0, 0.0
        mean = self.kappa * float(mean_resultant_length(self.dimension, self.kappa)) - self._log_mgf
        reach = np.array([mean + _DEVIATIONS * self.spread, mean - _LOWER_DEVIATIONS * self.spread])
        low, high = self.coordinates(np.maximum(reach, _LOWEST_LOSS))
        return float(low), float(high)

    @property
    @override
    def atoms(self) -> tuple[Array, Array]:
        if not self._is_discrete:
            return super().atoms
        masses = scipy.special.expit(np.array([-2.0, 2.0]) * self.kappa)
        return np.array([-1.0, 1.0]) * self.kappa - self._log_mgf, masses

    @override
    def coordinates(self, losses: Array) -> Array:
        shares = (self.kappa - self._log_mgf - losses) / (2 * self.kappa)
        return np.asarray(2 * np.arcsin(np.sqrt(np.clip(shares, 0.0, 1.0))), np.float64)

    @override
    def losses(self, coordinates: Array) -> Array:
        return self.kappa - self._log_mgf - 2 * self.kappa * np.sin(coordinates / 2) ** 2

    @override
    def log_density(self, coordinates: Array) -> Array:
        log_sine = np.log1p(-np.minimum(np.cos(coordinates) ** 2, 0.5)) / 2
        log_sine = np.where(np.abs(np.cos(coordinates)) < 0.7, log_sine, np.log(np.sin(coordinates)))
        return (self.dimension - 2) * log_sine - 2 * self.kappa * np.sin(coordinates / 2) ** 2

    @property
    def _is_discrete(self) -> bool:
        return self.dimension == 1 or self.kappa == 0

    @cached_property
    def _log_mgf(self) -> float:
        return float(log_mgf(self.dimension, self.kappa))


def grid_interval(spread: float, widest: float, largest: float, finest: float = 0.0) -> float:
    """Return the grid of a loss; the largest, which may have a probability of its own, lies on it."""
    return largest / math.ceil(largest / max(SHARE_OF_SPREAD * spread, widest / MOST_CELLS, finest))


def grid(first: int, last: int, interval: float) -> Array:
    """Return the points of a grid from ``first`` to ``last`` intervals."""
    return np.arange(first, last + 1, dtype=np.float64) * interval


def rounded_loss(pair: ReferencePair, interval: float) -> LossDistribution:
    """Return the loss of a pair on a grid, rounded so that no delta gets smaller."""
    ends = max(pair.smallest, -LARGEST_LOSS), min(pair.largest, LARGEST_LOSS)
    edges = grid(math.floor(ends[0] / interval), math.ceil(ends[1] / interval), interval)
    losses, masses = pair.law(edges)
    far = losses > LARGEST_LOSS
    kept = np.where(far, 0.0, masses)
    law = LossDistribution.rounded(np.clip(losses, -LARGEST_LOSS, LARGEST_LOSS), kept, interval)
    return replace(law, infinite=float(masses[far].sum()))


@lru_cache(maxsize=1)
def batch_loss(reference: CeilingReference) -> LossDistribution:
    """Return the loss of one participation; kept, because several bounds ask for it."""
    interval = reference.interval
    laws = [(rounded_loss(pair, interval), number) for pair, number in reference.parts]
    return reduce(
        joined_loss,
        (law if number == 1 else repeated_loss(law, number).narrowed(LARGEST_LOSS) for law, number in laws),
    )


def repeated_loss(law: LossDistribution, count: int) -> LossDistribution:
    """Return the loss of ``count`` of these releases, on a coarser grid where one transform cannot hold it."""
    if law.infinite > 1 - _ROUNDING:
        return replace(law, infinite=1.0)
    try:
        return law.repeated(count, _AT_ONCE)
    except TooManyCellsError:
        return law.compounded(count)


def joined_loss(first: LossDistribution, second: LossDistribution) -> LossDistribution:
    """Return the sum of both losses; grids that were made coarser differ by powers of two."""
    fine, coarse = sorted((first, second), key=lambda law: law.interval)
    while fine.interval < 0.99 * coarse.interval:
        fine = fine.coarser()
    joined = fine.composed_with(coarse).narrowed(LARGEST_LOSS)
    while joined.masses.size > _JOINED_CELLS:
        joined = joined.coarser()
    return joined
