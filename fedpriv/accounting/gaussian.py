"""The Gaussian mechanism: exact conversion, calibration of a single release, and Poisson sampling.

Throughout mu = sensitivity / standard deviation. T adaptive releases with the same mu are exactly as private as one
with mu sqrt(T) (Dong, Roth and Su 2022, Corollary 3.3), and one is (epsilon, delta)-DP if and only if

    delta >= Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu)         (Balle and Wang 2018, Theorem 8).
"""

import math
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from fedpriv.accounting.amplification import LARGEST_SAMPLED_ORDER, poisson_gaussian_rdp
from fedpriv.accounting.renyi import ORDERS, rdp_to_epsilon, read_only
from fedpriv.core.errors import InputError

# ---- one release ----------------------------------------------------------------------------------------------------


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the smallest delta of the Gaussian mechanism at epsilon >= 0, for mu > 0, rounded up by 1e-14 / mu."""
    return math.exp(_log_delta(epsilon / mu - mu / 2, mu))


def gaussian_epsilon(delta: float, mu: float) -> float:
    """Return the smallest epsilon >= 0 of the Gaussian mechanism at delta in (0, 1), for mu >= 0."""
    if mu == 0 or math.log(delta) >= _log_delta(-mu / 2, mu):
        return 0.0
    # In x = epsilon/mu - mu/2 delta is at most Phi(-x), and Phi(38) is 1 in double precision.
    low, high = max(-mu / 2, -38.0), max(float(-scipy.special.ndtri(delta)), 0.0) + 1e-9
    x = scipy.optimize.brentq(lambda point: _log_delta(point, mu) - math.log(delta), low, high, xtol=1e-13, rtol=1e-14)
    return float(mu * (x + 1e-12 * max(1.0, abs(x)) + mu / 2))  # rounded up


def _log_delta(x: float, mu: float) -> float:
    # delta = Phi(-x) - exp(epsilon) Phi(-(x + mu)); the ratio of its two terms is one of scaled error functions,
    # because the Gaussian densities at x and x + mu differ by the factor exp(epsilon).
    # For a small mu they nearly cancel: the allowance, above scipy's rounding, keeps the result an upper bound.
    low, high = _log_mills(x + mu), _log_mills(x)
    log_ratio = low - high - 2e-15 * (1 + abs(high))
    return float(scipy.special.log_ndtr(-x)) + _log1mexp(log_ratio)


def _log1mexp(x: float) -> float:
    """Return log(1 - exp(x)) for x < 0."""
    return math.log(-math.expm1(x)) if x < 0 else -math.inf


def _log_mills(x: float) -> float:
    """Return log of erfcx(x / sqrt 2), in the range where erfcx does not overflow, and by log_ndtr below it."""
    if x > -30:
        return math.log(scipy.special.erfcx(x / math.sqrt(2)))
    return float(scipy.special.log_ndtr(-x)) + math.log(2) + x * x / 2


def classic_sigma(epsilon: float, delta: float) -> float:
    """Return sqrt(2 ln(1.25 / delta)) / epsilon, for epsilon up to 1 (Dwork and Roth 2014, Theorem A.1)."""
    check_epsilon(epsilon)
    _check_delta(delta)
    if epsilon > 1:
        raise InputError(
            key="epsilon",
            given=epsilon,
            allowed="the classic calibration is proven for epsilon <= 1 only; analytic and extended hold for any",
        )
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def extended_sigma(epsilon: float, delta: float) -> float:
    """Return sqrt(2) / (2 epsilon) (sqrt(s) + sqrt(s + epsilon)), s = ln(sqrt(2/pi) / delta): noise over sensitivity.

    For any epsilon: it solves epsilon sigma - 1/(2 sigma) = sqrt(2 s), so the mechanism's own delta is at most
    Phi(-sqrt(2 s)) <= exp(-s) / 2 = 0.63 delta.

    Raises:
        InputError: epsilon not above 0, or delta not in (0, sqrt(2/pi)].
    """
    check_epsilon(epsilon)
    _check_delta(delta)
    s = math.log(math.sqrt(2 / math.pi) / delta)
    if s < 0:
        raise InputError(key="delta", given=delta, allowed="the extended calibration needs delta <= sqrt(2/pi) = 0.798")
    return math.sqrt(2) / (2 * epsilon) * (math.sqrt(s) + math.sqrt(s + epsilon))


def analytic_sigma(epsilon: float, delta: float) -> float:
    """Return the smallest noise over sensitivity that is (epsilon, delta)-DP (Balle and Wang 2018)."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise InputError(key="epsilon", given=epsilon, allowed="allowed is from 0, finite")
    _check_delta(delta)

    def gap(log_mu: float) -> float:
        mu = math.exp(log_mu)
        return _log_delta(epsilon / mu - mu / 2, mu) - math.log(delta)

    # delta rises with mu from 0 to 1: widen until it lies below the target at one end and above at the other.
    low, high = -1.0, 1.0
    while gap(low) > 0:
        low -= 2.0
    while gap(high) < 0:
        high += 2.0
    root = scipy.optimize.brentq(gap, low, high, xtol=1e-14, rtol=1e-14)
    return math.exp(-root) * (1 + 1e-12)  # rounded up


CALIBRATIONS = {"analytic": analytic_sigma, "extended": extended_sigma, "classic": classic_sigma}


def check_epsilon(epsilon: float) -> None:
    """Refuse an epsilon out of range."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise InputError(key="epsilon", given=epsilon, allowed="allowed is above 0, finite")


def check_statement(epsilon: float, delta: float) -> None:
    """Refuse numbers out of range; an infinite epsilon states nothing."""
    if not epsilon >= 0:
        raise InputError(key="epsilon", given=epsilon, allowed="allowed is from 0")
    if not 0 <= delta <= 1:
        raise InputError(key="delta", given=delta, allowed="allowed is from 0 to 1")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InputError(key="delta", given=delta, allowed="allowed is between 0 and 1, both excluded")


# ---- Poisson sampling, zero-out ------------------------------------------------------------------------------------


def poisson_rdp_epsilon(sigma: float, rate: float, steps: int, delta: float) -> float:
    """Return epsilon of Poisson-sampled Gaussian steps under zero-out, at orders to 4096 (Mironov et al. 2019)."""
    return rdp_to_epsilon(_SAMPLED_ORDERS, steps * _poisson_step_rdp(sigma, rate), delta)


_SAMPLED_ORDERS = ORDERS[ORDERS <= LARGEST_SAMPLED_ORDER]


@lru_cache(maxsize=256)
def _poisson_step_rdp(sigma: float, rate: float) -> NDArray[np.float64]:
    """Renyi privacy of one step; kept, because a run asks again after each round."""
    return read_only(poisson_gaussian_rdp(_SAMPLED_ORDERS, sigma, rate))
