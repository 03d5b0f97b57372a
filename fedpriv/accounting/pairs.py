"""Dominating pairs: the two neighbouring outputs of a mechanism that are hardest to tell apart.

A pair (P, Q) dominates a mechanism if for every epsilon, of either sign, delta(epsilon) = sup over events of P -
exp(epsilon) Q is at least that of any two neighbours. It may then be composed in place of the mechanism, adaptively
(Zhu, Dong and Wang 2022, Theorem 10). Most pairs here are symmetric: exchanging P and Q changes no delta. Then

    delta(-epsilon) = 1 - exp(-epsilon) + exp(-epsilon) delta(epsilon),

and epsilon >= 0 says all. The proofs of dominance are in docs/account.md.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.accounting.amplification import amplified_pure
from fedpriv.accounting.vmf_functions import mean_resultant_length

Array = NDArray[np.float64]

_DEVIATIONS = 12.0  # beyond so many standard deviations a normal law has a probability of 1e-33
_FINEST = 1e-6  # grid; on finer ones differences of deltas drown in rounding
_FINE_CELLS, _COARSE_CELLS = 50, 200  # a standard deviation around the mean of the loss, and all below
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)


class Pair(ABC):
    """A dominating pair, by its delta; symmetric unless it says otherwise."""

    @property
    def pieces(self) -> int:
        """How many pairs were composed numerically to get this one; at least 1."""
        return 1

    @property
    def exchanged(self) -> "Pair":
        """The pair of Q and P."""
        return self

    @property
    def finest(self) -> float:
        """The finest grid on which the rounding of deltas does not matter."""
        return _FINEST

    @property
    @abstractmethod
    def largest(self) -> float:
        """An epsilon from which on delta is 0, or no more than about 1e-30 (of several pairs, 1e-14)."""

    @property
    @abstractmethod
    def spread(self) -> float:
        """About the standard deviation of the privacy loss where most of its probability lies."""

    @abstractmethod
    def deltas(self, epsilons: Array) -> Array:
        """Return delta, or slightly more, at each epsilon (N,), from 0 on and ascending."""


def interpolated(edges: Array, deltas: Array, epsilons: Array) -> Array:
    """Return deltas between those known at ``edges``: linear in exp(epsilon), of which delta is a convex function.

    So they are never too small. No epsilon may lie below the first edge; beyond the last its delta is returned.
    """
    cell = np.clip(np.searchsorted(edges, epsilons, side="right") - 1, 0, edges.size - 2)
    width = np.diff(edges)[cell]
    x = np.minimum(epsilons - edges[cell], width)
    share = np.exp(x - width) * np.expm1(-x) / np.expm1(-width)
    return np.asarray((1 - share) * deltas[cell] + share * deltas[cell + 1], np.float64)


@dataclass(frozen=True)
class GaussianPair(Pair):
    """Normal distributions at a distance of ``mu`` standard deviations.

    Attributes:
        mu: above 0.
    """

    mu: float

    @property
    @override
    def largest(self) -> float:
        return self.mu**2 / 2 + self.mu * _DEVIATIONS

    @property
    @override
    def spread(self) -> float:
        return self.mu

    @override
    def deltas(self, epsilons: Array) -> Array:
        first = scipy.special.log_ndtr(self.mu / 2 - epsilons / self.mu)
        second = scipy.special.log_ndtr(-self.mu / 2 - epsilons / self.mu) + epsilons
        return np.asarray(np.exp(first) * -np.expm1(np.minimum(second - first, 0.0)), np.float64)


@dataclass(frozen=True)
class LaplacePair(Pair):
    """Laplace distributions on the line at a distance of ``shift`` scales: delta = 1 - exp((epsilon - shift) / 2).

    Attributes:
        shift: above 0.
    """

    shift: float

    @property
    @override
    def largest(self) -> float:
        return self.shift

    @property
    @override
    def spread(self) -> float:
        return min(self.shift, 1.0)

    @override
    def deltas(self, epsilons: Array) -> Array:
        return np.asarray(-np.expm1(np.minimum((epsilons - self.shift) / 2, 0.0)), np.float64)


@dataclass(frozen=True)
class DirectionalPair(Pair):
    """VMF distributions around opposite directions: the loss is 2 kappa t, t the cosine with the first direction.

    Attributes:
        kappa: above 0.
        dimension: K, at least 1.
    """

    kappa: float
    dimension: int

    @property
    @override
    def largest(self) -> float:
        if self.dimension == 1:
            return 2 * self.kappa
        return min(2 * self.kappa * self._mean + _DEVIATIONS * self._deviation, 2 * self.kappa)

    @property
    @override
    def spread(self) -> float:
        return min(2 * self.kappa, 1.0) if self.dimension == 1 else self._deviation

    @override
    def deltas(self, epsilons: Array) -> Array:
        if self.dimension == 1:  # randomised response
            keep = scipy.special.expit(2 * self.kappa)
            return np.asarray(keep * -np.expm1(np.minimum(epsilons - 2 * self.kappa, 0.0)), np.float64)
        return np.where(epsilons >= 2 * self.kappa, 0.0, interpolated(*self._tabulated, epsilons))

    @cached_property
    def _tabulated(self) -> tuple[Array, Array]:
        """Epsilons from 0 to the largest, close to each other where the loss lies, and their deltas."""
        low = max(0.0, 2 * self.kappa * self._mean - _DEVIATIONS * self._deviation)
        fine = math.ceil((self.largest - low) / self._deviation * _FINE_CELLS) + 1
        edges = np.unique(np.concatenate([np.linspace(0, low, _COARSE_CELLS), np.linspace(low, self.largest, fine)]))
        # With t = sin(angle) the density is cos(angle)^(K - 2) exp(kappa t), smooth to the ends in any dimension. Every
        # cell of the loss is integrated by Gauss and Legendre.
        angles = np.arcsin(np.minimum(edges / (2 * self.kappa), 1.0))
        halves = np.diff(angles)[:, None] / 2
        t = np.sin(angles[:-1, None] + halves * (1 + _NODES))
        log_density = (self.dimension - 2) / 2 * np.log1p(-t * t) + self.kappa * t
        mass = np.exp(log_density - log_density.max()) * halves * _WEIGHTS
        # The other half of the sphere has the same masses, times exp(-2 kappa t).
        mass = mass / np.sum(mass * (1 + np.exp(-2 * self.kappa * t)))
        starts = edges[:-1, None]
        # delta at the start of a cell: what the masses inside exceed it by, what those beyond exceed it by at least,
        # and exp(-width) times delta at its end. All terms are positive: nothing cancels.
        inside = np.sum(mass * -np.expm1(np.minimum(starts - 2 * self.kappa * t, 0.0)), axis=1)
        beyond = np.concatenate([np.cumsum(mass.sum(axis=1)[::-1])[::-1][1:], [0.0]])
        gains = inside - np.expm1(-np.diff(edges)) * beyond
        with np.errstate(divide="ignore"):
            sums = np.logaddexp.accumulate((np.log(gains) - edges[:-1])[::-1])[::-1]
        return edges, np.append(np.minimum(np.exp(sums + edges[:-1]), 1.0), 0.0)

    @property
    def _mean(self) -> float:
        return float(mean_resultant_length(self.dimension, self.kappa))

    @cached_property
    def _deviation(self) -> float:
        """The standard deviation of 2 kappa t; the variance of t is the derivative of its mean by kappa."""
        step = 1e-3 * self.kappa
        low, high = mean_resultant_length(self.dimension, [self.kappa - step, self.kappa + step])
        return 2 * self.kappa * math.sqrt((high - low) / (2 * step))


@dataclass(frozen=True)
class _ThinnedPair(Pair):
    """What sampling makes of another pair.

    Attributes:
        pair: of a batch, or of a release, under replace-one.
        rate: q in (0, 1).
    """

    pair: Pair
    rate: float

    @property
    @override
    def pieces(self) -> int:
        return self.pair.pieces


class SampledPair(_ThinnedPair):
    """A pair after fixed-size sampling: delta at log(1 + q (exp(epsilon) - 1)) is q times delta of the pair at epsilon.

    Balle, Barthe and Gaboardi 2018, Theorem 9; the deltas at negative epsilons are those of the exchanged neighbours.
    """

    @property
    @override
    def finest(self) -> float:
        return self.rate * self.pair.finest  # losses and deltas shrink alike

    @property
    @override
    def largest(self) -> float:
        return amplified_pure(self.pair.largest, self.rate)

    @property
    @override
    def spread(self) -> float:
        return self.rate * min(math.sqrt(math.expm1(min(self.pair.spread, 1.0) ** 2)), 1.0)

    @override
    def deltas(self, epsilons: Array) -> Array:
        return self.rate * self.pair.deltas(before_sampling(epsilons, self.rate))


class TaggedPair(_ThinnedPair):
    """A pair of a release that happens with probability q, and is seen to or not: delta is q times as large."""

    @property
    @override
    def largest(self) -> float:
        return self.pair.largest

    @property
    @override
    def spread(self) -> float:
        return self.pair.spread

    @override
    def deltas(self, epsilons: Array) -> Array:
        return self.rate * self.pair.deltas(epsilons)


def before_sampling(epsilons: Array, rate: float) -> Array:
    """Return log(1 + (exp(epsilon) - 1) / q), the inverse of :func:`amplified_pure`, at epsilons from 0 on."""
    near = np.log1p(np.expm1(np.minimum(epsilons, 1.0)) / rate)
    far = epsilons - math.log(rate) + np.log1p((rate - 1) * np.exp(-epsilons))
    return np.where(epsilons < 1, near, far)
