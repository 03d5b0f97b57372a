"""Amplification by sampling: the privacy cost of one step if the adversary does not know who took part.

Fixed-size sampling (B of n examples without replacement, q = B / n): any mechanism, neighbours differ in one example
(replace-one). Poisson sampling: the Gaussian mechanism, here under zero-out (under replace-one see
:mod:`fedpriv.accounting.pairs`); other mechanisms as if it were seen who took part. Shuffled passes:
nothing.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from fedpriv.accounting.renyi import pure_rdp

Array = NDArray[np.float64]

LARGEST_SAMPLED_ORDER = 4096  # the bound's sum has as many terms as the order; larger orders keep the other bounds

_BASE_ROUNDING = 1e-9  # relative; the divergences of this room are accurate to 1e-10


@cache
def _log_factorial() -> Array:
    """Return log k! for k = 0, ..., the largest order."""
    return scipy.special.gammaln(np.arange(LARGEST_SAMPLED_ORDER + 1) + 1.0)


def amplified_pure(epsilon: float, rate: float) -> float:
    """Return log(1 + q (exp(epsilon) - 1)): pure epsilon after sampling (Balle, Barthe and Gaboardi 2018, Thm 9)."""
    if rate == 1:
        return epsilon
    if epsilon < 1:
        return float(np.log1p(rate * np.expm1(epsilon)))
    return float(np.logaddexp(np.log1p(-rate), np.log(rate) + epsilon))


def tagged_rdp(orders: ArrayLike, divergences: ArrayLike, rate: float) -> Array:
    """Return log(1 - q + q exp((a - 1) D)) / (a - 1), of a release that is seen to happen with probability q."""
    values, scaled = np.asarray(orders, np.float64), np.asarray(divergences, np.float64)
    if rate == 1:
        return scaled
    scaled = (values - 1) * scaled
    near = np.log1p(rate * np.expm1(np.minimum(scaled, 1.0)))
    far = np.logaddexp(np.log1p(-rate), np.log(rate) + scaled)
    return np.asarray(np.where(scaled < 1, near, far) / (values - 1), np.float64)


def amplified_rdp(orders: ArrayLike, base: Callable[[Array], Array], pure: float, rate: float) -> Array:
    """Return the best proven Renyi privacy of one step of fixed-size sampling.

    At every order it is the smallest of three bounds: the unsampled mechanism's (sampling never hurts: the divergence
    is quasi-convex), the one implied by the amplified pure bound, and up to order 4096 :func:`dominated_rdp`. That for
    any mechanism (Wang, Balle and Kasiviswanathan 2019, arXiv 1808.00087, Theorem 9) is never found to be below these.

    Args:
        orders: above 1.
        base: Renyi privacy of the mechanism on a batch under replace-one, as a function of an array of orders: the
            divergence of a symmetric dominating pair, exact but for rounding.
        pure: its pure epsilon, infinity if it has none.
        rate: q in (0, 1].
    """
    values = np.asarray(orders, dtype=np.float64)
    result = np.minimum(base(values), pure_rdp(values, amplified_pure(pure, rate)))
    within = values <= LARGEST_SAMPLED_ORDER
    if rate < 1 and np.any(within):
        result[within] = np.minimum(result[within], dominated_rdp(values[within], base, rate))
    return result


def dominated_rdp(orders: ArrayLike, base: Callable[[Array], Array], rate: float) -> Array:
    """Return the bound on a sampled mechanism that has a symmetric dominating pair, by its moments.

    Let h(u) be the hockey-stick divergence of the pair at u = exp(epsilon), the largest of any two neighbours. After
    sampling it is at most q h(u) at 1 - q + q u >= 1 (Balle, Barthe and Gaboardi 2018, Theorem 9), in both directions.
    A moment is an integral over hockey-stick divergences, so at an integer order a

        exp((a - 1) rdp(a)) <= 1 + a (a - 1) q^2 * integral over u >= 1 of [v^(a-2) + v^(-a-1)] h(u),   v = 1 - q + q u

    Expand the first power. The pair's own moments M(j) = exp((j - 1) r(j)) bound its terms from the second on, because
    M(j) - 1 is j (j - 1) times the integral S(j) of [u^(j-2) + u^(-j-1)] h(u). The first term, and the second power,
    which is at most 1, need I, the integral of h(u) itself: at most S(2), and at most S(2)/2 + sqrt(S(2) (S(7/2) -
    S(2)) / 6) (write 1 = u^(-3/2) (cosh x + sinh x), x = 3/2 log u; use Cauchy and Schwarz, and 3 sinh^2 x <=
    2 (cosh 2 x - cosh x)). Since h is at most 1, the second power contributes at most (a - 1) q. Together

        <= 1 + a (a - 1) (1 - q)^(a-2) q^2 I + sum_{j=3..a} C(a,j) (1 - q)^(a-j) q^j (M(j) - 1)
             + min{ a (a - 1) q^2 I, (a - 1) q }

    In between (a - 1) rdp(a) is interpolated linearly: it is convex in a, and 0 at 1. Below order 2 the first power is
    also at most (q u)^(a-2), so that q^a (M(a) - 1) may stand in the place of the sum.

    ``rate``: q in (0, 1).
    """
    values = np.asarray(orders, dtype=np.float64)
    divergences = base(_integers(values))
    log_moments = _log_expm1(np.arange(1.0, divergences.size + 1) * divergences)
    log_moments[0] = np.log(2) + _log_integral(base)
    terms = _binomial_terms(log_moments, rate)

    def log_backward(order: Array | float) -> Array:
        with np.errstate(divide="ignore"):
            quadratic = np.log(order) + np.log(order - 1) + 2 * np.log(rate) + log_moments[0] - np.log(2)
            return np.asarray(np.minimum(quadratic, np.log(order - 1) + np.log(rate)), np.float64)

    def scaled(order: int) -> float:
        if order < 2:
            return 0.0
        return float(np.logaddexp(_scaled_bound(terms + order * np.log1p(-rate), order), log_backward(order)))

    result = _interpolated(values, scaled)
    low = values[values < 2]
    log_forward = low * np.log(rate) + _log_expm1((low - 1) * base(low))
    below_two = np.logaddexp(0.0, np.logaddexp(log_forward, log_backward(low))) / (low - 1)
    result[values < 2] = np.minimum(result[values < 2], below_two)
    return result


def _log_integral(base: Callable[[Array], Array]) -> float:
    """Return log of the bound on I, the integral of h: see :func:`dominated_rdp`."""
    log_moments = _log_expm1(np.array([1.0, 2.5]) * base(np.array([2.0, 3.5])))
    log_s2, log_s35 = log_moments - np.log([2.0, 8.75])
    if log_s2 == -np.inf:
        return -np.inf
    # For a small divergence their difference is small compared with them: it is rounded up by more than base is off.
    excess = np.exp(min(log_s2 - log_s35, 0.0))
    log_difference = log_s35 + np.log(1 - excess + _BASE_ROUNDING)
    return float(min(log_s2, np.logaddexp(log_s2 - np.log(2), (log_s2 + log_difference - np.log(6)) / 2)))


def poisson_gaussian_rdp(orders: ArrayLike, sigma: float, rate: float) -> Array:
    """Return the Renyi privacy of one Poisson-sampled Gaussian step under zero-out.

    Mironov, Talwar and Zhang 2019 (arXiv 1908.10530), Section 3.3, at an integer order a

        (a - 1) rdp(a) = log( 1 + sum_{j=2..a} C(a,j) (1 - q)^(a-j) q^j (exp((j^2 - j) / (2 sigma^2)) - 1) )

    (their sum less the binomial one, which is 1, so that much noise does not cancel), interpolated in between as above.

    ``rate``: q in (0, 1).
    """
    values = np.asarray(orders, dtype=np.float64)
    j = _integers(values)
    terms = _binomial_terms(_log_expm1((j * j - j) / (2 * sigma**2)), rate)
    return _interpolated(values, lambda order: _scaled_bound(terms + order * np.log1p(-rate), order))


def _binomial_terms(log_moments: Array, rate: float) -> Array:
    """Return log of (q / (1 - q))^j / j! exp(log_moments) for j = 2, 3, ..."""
    j = np.arange(2.0, log_moments.size + 2)
    return np.asarray(log_moments - _log_factorial()[2 : j.size + 2] + j * (np.log(rate) - np.log1p(-rate)), np.float64)


def _log_expm1(exponent: Array) -> Array:
    with np.errstate(divide="ignore"):  # log 0 where nothing is lost
        return np.asarray(exponent + np.log(-np.expm1(-exponent)), np.float64)


def _integers(orders: Array) -> Array:
    """Return 2, 3, ... up to the largest order, rounded up."""
    largest = max(int(np.ceil(orders.max(initial=2.0))), 2)
    if largest > LARGEST_SAMPLED_ORDER or not np.all(orders > 1):
        raise ValueError(f"orders after sampling must be above 1 and at most {LARGEST_SAMPLED_ORDER}")
    return np.arange(2.0, largest + 1)


def _interpolated(orders: Array, scaled: Callable[[int], float]) -> Array:
    """Return rdp from (order - 1) rdp at integers, linear in between: it is a convex function of the order."""
    below, above = np.floor(orders), np.ceil(orders)
    known = {order: scaled(int(order)) for order in np.unique(np.concatenate([below, above]))}
    low = np.array([known[order] for order in below])
    high = np.array([known[order] for order in above])
    share = orders - below
    return np.asarray(((1 - share) * low + share * high) / (orders - 1), np.float64)


def _scaled_bound(terms: Array, order: int) -> float:
    """Return log(1 + sum of terms, each times order! / (order - j)!)."""
    if order < 2:
        return 0.0
    factorials = _log_factorial()
    exponents = terms[: order - 1] + factorials[order] - factorials[order - 2 :: -1]
    largest = exponents.max()
    if largest == -np.inf:
        return 0.0
    return float(np.logaddexp(0.0, largest + np.log(np.sum(np.exp(exponents - largest)))))
