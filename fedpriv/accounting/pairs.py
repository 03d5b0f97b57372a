"""Dominating pairs: the two neighbouring outputs of a mechanism that are hardest to tell apart.

A pair (P, Q) dominates a mechanism if for every epsilon, of either sign, delta(epsilon) = sup over events of P -
exp(epsilon) Q is at least that of any two neighbours. It may then be composed in place of the mechanism, adaptively
(Zhu, Dong and Wang 2022, Theorem 10). Most pairs here are symmetric: exchanging P and Q changes no delta. Then

    delta(-epsilon) = 1 - exp(-epsilon) + exp(-epsilon) delta(epsilon),

and epsilon >= 0 says all. The proofs of dominance are in docs/account-proofs.md.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray
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
    """Return deltas between those known at ``edges``: linear in exp(epsilon), so never too small."""
    cell = np.clip(np.searchsorted(edges, epsilons, side="right") - 1, 0, edges.size - 2)
    width = np.diff(edges)[cell]
    x = np.minimum(epsilons - edges[cell], width)
    share = np.exp(x - width) * np.expm1(-x) / np.expm1(-width)
    return np.asarray((1 - share) * deltas[cell] + share * deltas[cell + 1], np.float64)


@dataclass(frozen=True)
class GaussianPair(Pair):
    """Normal distributions at a distance of ``mu`` standard deviations."""

    mu: float  # above 0

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
    """Laplace distributions on the line at a distance of ``shift`` scales: delta = 1 - exp((epsilon - shift) / 2)."""

    shift: float  # above 0

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
    """VMF distributions around opposite directions: the loss is 2 kappa t, t the cosine with the first direction."""

    kappa: float  # above 0
    dimension: int  # K, at least 1

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
        # cell of the loss is integrated by Gauss-Legendre quadrature.
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
    """What sampling makes of another pair."""

    pair: Pair  # of a batch, or of a release, under replace-one
    rate: float  # q in (0, 1)

    @property
    @override
    def pieces(self) -> int:
        return self.pair.pieces


class SampledPair(_ThinnedPair):
    """A pair after fixed-size sampling: delta at log(1 + q (e^epsilon - 1)) is q delta (Balle et al. 2018, Thm 9)."""

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


@dataclass(frozen=True)
class MixedPair(Pair):
    """One of several symmetric pairs, drawn by itself and seen: delta is the mean of theirs."""

    parts: tuple[tuple[float, Pair], ...]  # probabilities, which add up to 1, and pairs

    @property
    @override
    def pieces(self) -> int:
        return max(pair.pieces for _, pair in self.parts)

    @property
    @override
    def largest(self) -> float:
        return max(pair.largest for _, pair in self.parts)

    @property
    @override
    def spread(self) -> float:
        return math.sqrt(sum(chance * pair.spread**2 for chance, pair in self.parts))

    @override
    def deltas(self, epsilons: Array) -> Array:
        return np.asarray(sum(chance * pair.deltas(epsilons) for chance, pair in self.parts), np.float64)


def before_sampling(epsilons: Array, rate: float) -> Array:
    """Return log(1 + (exp(epsilon) - 1) / q), the inverse of :func:`amplified_pure`, at epsilons from 0 on."""
    near = np.log1p(np.expm1(np.minimum(epsilons, 1.0)) / rate)
    far = epsilons - math.log(rate) + np.log1p((rate - 1) * np.exp(-epsilons))
    return np.where(epsilons < 1, near, far)


# The Gaussian mechanism on a Poisson batch, one example replaced by another: its dominating pair.
#
# In units of clip_norm, q being the rate, a step is no worse than
#
#     P = (1 - q) N(0, sigma^2) + q N(+1, sigma^2)   against   Q = (1 - q) N(0, sigma^2) + q N(-1, sigma^2).
#
# Given which other examples are in the batch, and c their sum, neighbours release (1 - q) N(c) + q N(c + g) and (1 - q)
# N(c) + q N(c + g') with |g|, |g'| <= 1, in any dimension. For an event S and any b = exp(epsilon) > 0
#
#     P(S) - b Q(S) = (1 - q) (1 - b) N(c)(S) + q N(c + g)(S) - q b N(c + g')(S).
#
# Let s = N(c)(S). By the lemma of Neyman and Pearson N(c + g)(S) <= Phi(Phi^-1(s) + 1 / sigma) and N(c + g')(S) >=
# Phi(Phi^-1(s) - 1 / sigma) (the trade-off function of normal distributions: Dong, Roth and Su 2022, Section 2.2). For
# g = -g' of length 1 both are equalities for one and the same half-space of this s. So that pair has the largest delta
# at every epsilon, of either sign and in both directions. Averaging over the other examples cannot exceed it, because
# delta is jointly convex, and the pair may be composed adaptively (Zhu, Dong and Wang 2022, Theorem 10). dp-accounting
# composes the same pair. For batches of a fixed size it would be wrong (Lebeda, Regehr, Kamath and Steinke 2024, arXiv
# 2405.20769).


_GROUP_CELLS = 10_001

# The Renyi divergence is an integral over the line by the trapezoidal rule.
_SMALLEST_SIGMA = 0.1  # below, the integrand changes too fast
# Standard deviations: the integrand of order a reaches to a / sigma. From about 2 sigma^2 log(1 / q) on the divergence
# rises as without sampling, and there delta = 1e-300 needs an a / sigma of 40.
_FAR, _FARTHEST = 40.0, 250.0
_MARGIN = 12.0  # standard deviations; the probability beyond is 1e-33
_WIDEST_STEP, _STEPS_PER_SIGMA = 0.25, 4.0  # it is analytic as far as pi sigma from the line
_ROUNDING = 1e-9  # relative; the tests find less than 1e-12
_SMALL = 0.05  # here a series stands in for differences
_TERMS = 12


def _losses(deviations: Array, sigma: float, rate: float) -> Array:
    """Return log P / Q at so many standard deviations from 0, with a small relative error where it is small, too.

    P / Q = 1 + 2 q k sinh(y) / (1 - q + q k exp(-y)), y = x / sigma^2, k = exp(-1 / (2 sigma^2)); it is odd in x.
    """
    y = np.abs(deviations) / sigma
    log_qk = math.log(rate) - 0.5 / sigma**2
    with np.errstate(divide="ignore"):  # log 0 at 0
        log_excess = log_qk + y + np.log(-np.expm1(-2 * y)) - np.logaddexp(math.log1p(-rate), log_qk - y)
    return np.asarray(np.copysign(np.logaddexp(0.0, log_excess), deviations), np.float64)


@dataclass(frozen=True)
class PoissonGaussianPair(Pair):
    """The pair of this module."""

    sigma: float  # noise standard deviation over clip_norm, above 0
    rate: float  # q in (0, 1)

    @property
    @override
    def finest(self) -> float:
        return _FINEST * self.rate

    @property
    @override
    def largest(self) -> float:
        return float(_losses(np.array(_DEVIATIONS + 1 / self.sigma), self.sigma, self.rate))

    @property
    @override
    def spread(self) -> float:
        # The variance is about 4 q^2 sinh(1 / sigma^2); with little noise rare large losses are most of it.
        return 2 * self.rate * math.sqrt(math.sinh(min(self.sigma**-2, 0.88)))

    @override
    def deltas(self, epsilons: Array) -> Array:
        # With u = exp(y) the loss is epsilon where u - exp(epsilon) / u = (exp(epsilon) - 1) (1 - q) / (q k).
        with np.errstate(divide="ignore"):  # log 0 at epsilon = 0
            log_less_one = epsilons + np.log(-np.expm1(-epsilons))  # of exp(epsilon) - 1
        log_sinh = log_less_one - epsilons / 2 - math.log(2)
        log_ratio = math.log1p(-self.rate) - math.log(self.rate) + 0.5 / self.sigma**2
        cut = self.sigma * (epsilons / 2 + _arsinh_exp(log_sinh + log_ratio))
        # What each law of the mixtures adds, so that the rounding of delta is q times that of 1.
        up = scipy.special.log_ndtr(1 / self.sigma - cut)
        down = epsilons + scipy.special.log_ndtr(-1 / self.sigma - cut)
        used = self.rate * np.exp(up) * -np.expm1(np.minimum(down - up, 0.0))
        unused = (1 - self.rate) * np.exp(log_less_one + scipy.special.log_ndtr(-cut))
        return np.asarray(np.maximum(used - unused, 0.0), np.float64)


@dataclass(frozen=True)
class PoissonGroupPair(Pair):
    """The mean over M of N(up M) against that of N(-down M), M of a group's units in a batch, in units of clip_norm.

    It dominates by the argument above, for each M: all of the group are replaced (up = down = 1), or go (down = 0), as
    in (1 - q) N(0) + q N(1) against N(0) (Zhu, Dong and Wang 2022, Theorem 11), or come (up = 0).
    """

    sigma: float  # noise standard deviation over clip_norm, above 0
    law: tuple[tuple[int, float], ...]  # M from 0 on, ascending, rounded up, and their probabilities
    up: int = 1
    down: int = 1

    @property
    @override
    def exchanged(self) -> "PoissonGroupPair":
        return replace(self, up=self.down, down=self.up)

    @property
    @override
    def finest(self) -> float:
        return _FINEST * sum(chance for members, chance in self.law if members)

    @property
    @override
    def largest(self) -> float:
        return float(self._tabulated[0][-1])

    @property
    @override
    def spread(self) -> float:
        # As of one unit where batches rarely hold any; as of the mean of M where they nearly always do.
        members, chances = np.array(self.law).T
        rare = math.sqrt(chances @ np.expm1(np.minimum(np.outer(members, members) / self.sigma**2, 0.7)) @ chances)
        often = float(members @ chances) * float(chances[members > 0].sum())
        return (self.up + self.down) * max(rare, often / self.sigma)

    @override
    def deltas(self, epsilons: Array) -> Array:
        return interpolated(*self._tabulated, epsilons)

    @cached_property
    def _tabulated(self) -> tuple[Array, Array]:
        """Epsilons, the first of them below 0, and the deltas of what lies beyond the places with these losses."""
        members, chances = np.array(self.law).T[:, :, None]
        logs, far = np.log(chances), _DEVIATIONS * self.sigma
        # Most units are in a batch with next to no probability, and then few places are enough.
        ends = [(-far - self.down * most, far + self.up * most) for most in members[-2:, 0].tolist()]
        places = np.unique(np.concatenate([np.linspace(*each, _GROUP_CELLS) for each in ends]))

        def ratio(shifts: Array) -> Array:
            # Of N(shift M) and N(0); small ones keep their digits.
            each = (shifts * places - shifts**2 / 2) / self.sigma**2
            near = np.log1p((chances * np.expm1(np.minimum(each, 1.0))).sum(axis=0))
            return np.where(each.max(axis=0) < 1, near, scipy.special.logsumexp(logs + each, axis=0))

        losses = ratio(self.up * members) - ratio(-self.down * members)
        grows = np.diff(np.maximum.accumulate(losses), prepend=-math.inf) > 0  # some are bounded
        losses, places = losses[grows], places[grows]
        first = max(int(np.searchsorted(losses, 0.0)) - 1, 0)
        losses, places = losses[first:], places[first:]
        more = scipy.special.log_ndtr((self.up * members - places) / self.sigma)
        gaps = scipy.special.log_ndtr((-self.down * members - places) / self.sigma) - more + losses
        sizes = np.exp(logs + more + np.maximum(gaps, 0.0)) * -np.expm1(-np.abs(gaps))
        return losses, np.maximum((-np.sign(gaps) * sizes).sum(axis=0), 0.0)


def zero_out_pair(sigma: float, rate: float) -> PoissonGroupPair:
    """Return the pair of one unit of a Poisson batch that goes, exchanged of one that comes; ``rate``: in (0, 1)."""
    return PoissonGroupPair(sigma, ((0, 1 - rate), (1, rate)), down=0)


def _arsinh_exp(x: Array) -> Array:
    """Return arsinh(exp(x)) without overflow."""
    return np.where(x < 20, np.arcsinh(np.exp(np.minimum(x, 20.0))), x + math.log(2))


def poisson_replaced_rdp(orders: ArrayLike, sigma: float, rate: float) -> Array:
    """Return the Renyi divergence of the pair of this module, the Renyi privacy of a step under replace-one.

    exp((a - 1) rdp(a)) - 1 is the integral of Q [(P/Q)^a - 1 - a (P/Q - 1)], in which nothing is negative and nothing
    cancels. The trapezoidal rule converges geometrically on such a line (Trefethen and Weideman 2014, Theorem 5.1).

    Rounded up; infinity at orders so large that a smaller one tells more, and for a sigma below 0.1.
    """
    values = np.asarray(orders, dtype=np.float64)
    if not np.all(values > 1):
        raise ValueError("Renyi orders must be above 1")
    result = np.full_like(values, np.inf)
    within = values <= sigma * min(_FAR - 2 * sigma * math.log(rate), _FARTHEST)
    if sigma >= _SMALLEST_SIGMA and np.any(within):
        used = values[within]
        result[within] = np.logaddexp(0.0, _log_integrals(used, sigma, rate)) / (used - 1)
    return result


def _log_integrals(orders: Array, sigma: float, rate: float) -> Array:
    """Return (M,) log of the integral that :func:`poisson_replaced_rdp` names, for orders (M,)."""
    step = min(_WIDEST_STEP, sigma / _STEPS_PER_SIGMA)
    lowest, highest = -_MARGIN - 2 / sigma, _MARGIN + max(2.0, float(orders.max())) / sigma
    x = np.arange(math.floor(lowest / step), math.ceil(highest / step) + 1, dtype=np.float64) * step
    log_q = np.logaddexp(math.log1p(-rate) - x**2 / 2, math.log(rate) - (x + 1 / sigma) ** 2 / 2)
    logs = log_q + _log_excess(_losses(x, sigma, rate), orders[:, None])
    largest = logs.max(axis=1)
    sums = np.log(np.sum(np.exp(logs - largest[:, None]), axis=1))
    return np.asarray(largest + sums + math.log(step * (1 + _ROUNDING) / math.sqrt(2 * math.pi)), np.float64)


def _log_excess(losses: Array, orders: Array) -> Array:
    """Return (M, N) log of exp(a x) - 1 - a (exp(x) - 1), at least 0, for losses x (N,) and orders a > 1 (M, 1)."""
    scaled = orders * losses
    n = np.arange(2, _TERMS + 2)
    series = np.zeros_like(scaled)
    for coefficient in ((1 - orders ** (1.0 - n)) / scipy.special.factorial(n)).T[::-1, :, None]:
        series = series * scaled + coefficient
    plain = np.expm1(np.minimum(scaled, 1.0)) - orders * np.expm1(np.minimum(losses, 1.0))
    far = np.maximum(scaled, 1.0)
    beyond = far + np.log1p((orders - 1) * np.exp(-far) - orders * np.exp(losses.clip(0.0) - far))
    with np.errstate(divide="ignore"):  # log 0 at 0
        near = np.log(np.where(np.abs(scaled) < _SMALL, scaled**2 * series, plain).clip(0.0))
    return np.asarray(np.where(scaled < 1, near, beyond), np.float64)
