"""The Gaussian mechanism on a Poisson batch, one example replaced by another: its dominating pair.

In units of clip_norm, q being the rate, a step is no worse than

    P = (1 - q) N(0, sigma^2) + q N(+1, sigma^2)   against   Q = (1 - q) N(0, sigma^2) + q N(-1, sigma^2).

Given which other examples are in the batch, and c their sum, neighbours release (1 - q) N(c) + q N(c + g) and (1 - q)
N(c) + q N(c + g') with |g|, |g'| <= 1, in any dimension. For an event S and any b = exp(epsilon) > 0

    P(S) - b Q(S) = (1 - q) (1 - b) N(c)(S) + q N(c + g)(S) - q b N(c + g')(S).

Let s = N(c)(S). By the lemma of Neyman and Pearson N(c + g)(S) <= Phi(Phi^-1(s) + 1 / sigma) and N(c + g')(S) >=
Phi(Phi^-1(s) - 1 / sigma) (the trade-off function of normal distributions: Dong, Roth and Su 2022, Section 2.2).
For g = -g' of length 1 both are equalities for one and the same half-space of this s. So that pair has the largest
delta at every epsilon, of either sign and in both directions. Averaging over the other examples cannot exceed it,
because delta is jointly convex, and the pair may be composed adaptively (Zhu, Dong and Wang 2022, Theorem 10).
dp-accounting composes the same pair. For batches of a fixed size it would be wrong (Lebeda, Regehr, Kamath and Steinke
2024, arXiv 2405.20769).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from fedpriv.accounting.pairs import Pair

Array = NDArray[np.float64]

_DEVIATIONS = 12.0  # beyond so many standard deviations a normal law has a probability of 1e-33
_FINEST = 1e-6  # grid without sampling
_NEVER = 1e4

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
    """The pair of this module.

    Attributes:
        sigma: noise standard deviation over clip_norm, above 0.
        rate: q in (0, 1).
    """

    sigma: float
    rate: float

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
class PoissonZeroOutPair(Pair):
    """(1 - q) N(0) + q N(1) against N(0) in units of clip_norm: zero-out, with the example or without it.

    It dominates (Zhu, Dong and Wang 2022, Theorem 11), and so does the exchanged pair where the example comes.

    Attributes:
        sigma: noise standard deviation over clip_norm, above 0.
        rate: q in (0, 1).
        comes: whether the pair is exchanged.
    """

    sigma: float
    rate: float
    comes: bool = False

    @property
    @override
    def exchanged(self) -> "PoissonZeroOutPair":
        return replace(self, comes=not self.comes)

    @property
    @override
    def finest(self) -> float:
        return _FINEST * self.rate

    @property
    @override
    def largest(self) -> float:
        if self.comes:
            return -math.log1p(-self.rate)
        used = math.log(self.rate) + (_DEVIATIONS + 0.5 / self.sigma) / self.sigma
        return float(np.logaddexp(math.log1p(-self.rate), used))

    @property
    @override
    def spread(self) -> float:
        return self.rate * math.sqrt(math.expm1(min(self.sigma**-2, 1.0)))

    @override
    def deltas(self, epsilons: Array) -> Array:
        sign = -1 if self.comes else 1
        odds = self._log_odds(epsilons)
        cut = self.sigma * odds + 0.5 / self.sigma
        with_it = scipy.special.log_ndtr(sign * (1 / self.sigma - cut))
        without = odds + scipy.special.log_ndtr(-sign * cut)
        more, less = (without + epsilons, with_it + epsilons) if self.comes else (with_it, without)
        return np.asarray(self.rate * np.exp(more) * -np.expm1(np.minimum(less - more, 0.0)), np.float64)

    def _log_odds(self, epsilons: Array) -> Array:
        """Return log of N(1) against N(0) where the loss is this; far below any where it is never so large."""
        if self.comes:
            with np.errstate(divide="ignore"):  # log 0
                return np.log1p(np.maximum(np.expm1(-epsilons) / self.rate, -1.0)).clip(-_NEVER)
        near = np.log1p(np.expm1(np.minimum(epsilons, 1.0)) / self.rate)
        far = epsilons - math.log(self.rate) + np.log1p((self.rate - 1) * np.exp(-np.maximum(epsilons, 1.0)))
        return np.where(epsilons < 1, near, far)


def _arsinh_exp(x: Array) -> Array:
    """Return arsinh(exp(x)) without overflow."""
    return np.where(x < 20, np.arcsinh(np.exp(np.minimum(x, 20.0))), x + math.log(2))


def poisson_replaced_rdp(orders: ArrayLike, sigma: float, rate: float) -> Array:
    """Return the Renyi divergence of the pair of this module, the Renyi privacy of a step under replace-one.

    exp((a - 1) rdp(a)) - 1 is the integral of Q [(P/Q)^a - 1 - a (P/Q - 1)], in which nothing is negative and nothing
    cancels. The trapezoidal rule converges geometrically on such a line (Trefethen and Weideman 2014, Theorem 5.1).

    Args:
        rate: q in (0, 1).

    Returns:
        Array of the shape of orders, rounded up; infinity at orders so large that a smaller one tells more, and for a
        sigma below 0.1.
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
