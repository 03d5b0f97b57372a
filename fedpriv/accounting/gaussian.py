"""The Gaussian mechanism: exact conversion, calibration of a single release, and Poisson sampling.

Throughout mu = sensitivity / standard deviation. T adaptive releases with the same mu are exactly as private as one
with mu sqrt(T) (Dong, Roth and Su 2022, Corollary 3.3), and one is (epsilon, delta)-DP if and only if

    delta >= Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu)         (Balle and Wang 2018, Theorem 8).
"""

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import scipy
from numpy.typing import NDArray

from fedpriv.accounting.amplification import LARGEST_SAMPLED_ORDER, poisson_gaussian_rdp
from fedpriv.accounting.renyi import ORDERS, rdp_to_epsilon, read_only
from fedpriv.errors import InputError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

__all__ = [
    "analytic_sigma",
    "classic_sigma",
    "extended_sigma",
    "gaussian_delta",
    "gaussian_epsilon",
    "poisson_pld_epsilon",
    "poisson_rdp_epsilon",
]

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
    """Return sqrt(2 ln(1.25 / delta)) / epsilon (Dwork and Roth 2014, Theorem A.1): noise over sensitivity.

    Args:
        epsilon: in (0, 1]; the theorem says nothing beyond.
        delta: in (0, 1).

    Raises:
        InputError: epsilon or delta out of range.
    """
    _check(epsilon, delta)
    if epsilon > 1:
        raise InputError(
            f"epsilon = {epsilon:g}: the classic calibration is proven for epsilon <= 1 only; analytic and extended "
            "hold for any"
        )
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def extended_sigma(epsilon: float, delta: float) -> float:
    """Return sqrt(2) / (2 epsilon) (sqrt(s) + sqrt(s + epsilon)), s = ln(sqrt(2/pi) / delta): noise over sensitivity.

    For any epsilon: it solves epsilon sigma - 1/(2 sigma) = sqrt(2 s), so the mechanism's own delta is at most
    Phi(-sqrt(2 s)) <= exp(-s) / 2 = 0.63 delta.

    Raises:
        InputError: epsilon not above 0, or delta not in (0, sqrt(2/pi)].
    """
    _check(epsilon, delta)
    s = math.log(math.sqrt(2 / math.pi) / delta)
    if s < 0:
        raise InputError(f"delta = {delta:g}: the extended calibration needs delta <= sqrt(2/pi) = 0.798")
    return math.sqrt(2) / (2 * epsilon) * (math.sqrt(s) + math.sqrt(s + epsilon))


def analytic_sigma(epsilon: float, delta: float) -> float:
    """Return the smallest noise over sensitivity that is (epsilon, delta)-DP (Balle and Wang 2018), for epsilon >= 0.

    Raises:
        InputError: epsilon negative or not finite, or delta not in (0, 1).
    """
    if not (math.isfinite(epsilon) and epsilon >= 0 and 0 < delta < 1):
        raise InputError(f"epsilon = {epsilon:g}, delta = {delta:g}: allowed are epsilon >= 0 and 0 < delta < 1")

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


def _check(epsilon: float, delta: float) -> None:
    if not (math.isfinite(epsilon) and epsilon > 0 and 0 < delta < 1):
        raise InputError(f"epsilon = {epsilon:g}, delta = {delta:g}: allowed are epsilon > 0 and 0 < delta < 1")


# ---- Poisson sampling, zero-out ------------------------------------------------------------------------------------

# The FFT that composes privacy-loss distributions rounds absolutely, by about 1e-17 a step: from a delta of about
# 1e-11 down its epsilon comes out too SMALL (the tests compare). It serves only above these deltas, 0.1 % held back.
_PLD_SMALLEST_DELTA = 1e-9
_PLD_DELTA_PER_STEP = 1e-12
_PLD_HELD_BACK = 1e-3
_PLD_LARGEST_EPSILON = 1e6
_PLD_AT_ONCE = 1000


def poisson_rdp_epsilon(sigma: float, rate: float, steps: int, delta: float) -> float:
    """Return epsilon of Poisson-sampled Gaussian steps under zero-out, by Renyi accounting.

    The divergence is that of Mironov, Talwar and Zhang 2019 (arXiv 1908.10530), at orders to 4096.

    Args:
        sigma: noise standard deviation over the clipping norm.
        rate: probability in (0, 1) with which a step uses an example.
        steps: number of steps.
        delta: in (0, 1).
    """
    return rdp_to_epsilon(_SAMPLED_ORDERS, steps * _poisson_step_rdp(sigma, rate), delta)


_SAMPLED_ORDERS = ORDERS[ORDERS <= LARGEST_SAMPLED_ORDER]


@lru_cache(maxsize=256)
def _poisson_step_rdp(sigma: float, rate: float) -> NDArray[np.float64]:
    """Renyi privacy of one step; kept, because a run asks again after each round."""
    return read_only(poisson_gaussian_rdp(_SAMPLED_ORDERS, sigma, rate))


def poisson_pld_epsilon(sigma: float, rate: float, steps: int, delta: float, upper: float) -> float | None:
    """Return epsilon of Poisson-sampled Gaussian steps under zero-out, by privacy-loss distributions (PLD).

    dp-accounting's pessimistic "connect the dots" discretisation: an upper bound for every grid. The grid is fine
    compared with one step's spread and coarse enough that a run of any size fits in memory.

    Args:
        sigma: noise standard deviation over the clipping norm.
        rate: probability in (0, 1) with which a step uses an example.
        steps: number of steps, at least 1.
        delta: in (0, 1).
        upper: an epsilon already known to hold, which sets the scale of the grid.

    Returns:
        Epsilon; None where delta is so small that the rounding of the FFT could make the figure too small, or where
        ``upper`` is above 1e6.
    """
    from dp_accounting.pld import privacy_loss_distribution

    if delta < max(_PLD_SMALLEST_DELTA, _PLD_DELTA_PER_STEP * steps) or upper > _PLD_LARGEST_EPSILON:
        return None
    single = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=_pld_interval(sigma, rate, upper)
    )
    epsilon = float(_repeated(single, steps).get_epsilon_for_delta(delta * (1 - _PLD_HELD_BACK)))
    return epsilon if math.isfinite(epsilon) else None


def _repeated(distribution: "PrivacyLossDistribution", steps: int) -> "PrivacyLossDistribution":
    """Return the loss of so many steps.

    dp-accounting first raises the number of cells to the power of the steps, in whole numbers, which takes minutes for
    millions of steps: at most a thousand at once.
    """
    if steps <= _PLD_AT_ONCE:
        return distribution.self_compose(steps)
    most = _repeated(distribution.self_compose(_PLD_AT_ONCE), steps // _PLD_AT_ONCE)
    rest = steps % _PLD_AT_ONCE
    return most.compose(distribution.self_compose(rest)) if rest else most


def _pld_interval(sigma: float, rate: float, upper: float) -> float:
    # A tenth of one step's spread, about q sqrt(exp(1/sigma^2) - 1), adds about 0.1 % to epsilon in the runs tried.
    # One step's loss reaches about log(1 + q exp(1/(2 sigma^2) + 10/sigma)); memory goes with the cells up to it.
    spread = rate * math.sqrt(math.expm1(min(1 / sigma**2, 50.0)))
    largest = float(np.logaddexp(0.0, math.log(rate) + 0.5 / sigma**2 + 10 / sigma))
    return max(min(0.1 * spread, 1e-3), upper / 1e5, largest / 1e6, 1e-7)
