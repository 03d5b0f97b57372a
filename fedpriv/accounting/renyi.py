"""Renyi differential privacy of one participation, and its conversion to (epsilon, delta).

A mechanism is (order, rdp)-Renyi-private if the Renyi divergence of that order between its outputs on two neighbours
is at most rdp; releases add up (Mironov 2017, arXiv 1702.07476). Arrays over orders are the common currency of this
room.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpriv.accounting.vmf_functions import log_mgf
from fedpriv.core.errors import InputError

Array = NDArray[np.float64]

_TAYLOR_TERMS = 18  # of exp(x) - 1 - x for |x| <= 1: those after these are below 1e-17 of the sum


def _orders() -> Array:
    # The best order is about 1 + sqrt(2 log(1/delta) / divergence): near 1 for much leakage, beyond 1e5 for very
    # little.
    near_one = 1 + np.geomspace(0.0101, 0.98, 40)
    small = np.arange(2.0, 10.0, 0.25)
    integers = np.arange(10.0, 65.0)
    large = np.round(np.geomspace(65, 2.0**20, 85))
    return np.unique(np.concatenate([near_one, small, integers, large]))


ORDERS: Array = _orders()
"""Orders of the ledger: about 200, from 1.0101 to 2^20; to 64 every integer, below 10 also quarters."""


def vmf_rdp(orders: ArrayLike, dimension: int, kappa: float) -> Array:
    """Return the exact Renyi privacy of one VMF draw under replace-one.

    Between the VMF distributions around two unit vectors x and x' the divergence of order a is
    [log M(kappa |a x + (1 - a) x'|) - log M(kappa)] / (a - 1), M = M_K. It grows with the angle, so antipodal x and x'
    are the worst and give [log M((2 a - 1) kappa) - log M(kappa)] / (a - 1). A zero gradient, released as a uniform
    direction, is a mixture of VMF distributions over x and costs no more (joint quasi-convexity). The result never
    exceeds the one implied by the pure bound 2 kappa.

    Args:
        orders: above 1.
        dimension: K, at least 1 (K = 1 is a random sign, kept with probability 1 / (1 + exp(-2 kappa))).
        kappa: concentration, at least 0, finite.

    Returns:
        Array of the shape of orders.

    Raises:
        ValueError: an argument out of range.
    """
    values = _checked_orders(orders)
    exact = (log_mgf(dimension, (2 * values - 1) * kappa) - log_mgf(dimension, kappa)) / (values - 1)
    return np.minimum(exact, pure_rdp(values, 2 * kappa))


def pure_rdp(orders: ArrayLike, epsilon: float) -> Array:
    """Return the smallest Renyi privacy that pure epsilon-DP implies: that of randomised response.

    It is log[cosh((2 a - 1) epsilon / 2) / cosh(epsilon / 2)] / (a - 1) (Mironov 2017, Prop. 5), which is at most
    epsilon and at most a epsilon^2 / 2, and is the VMF's own at K = 1.

    Args:
        orders: above 1.
        epsilon: at least 0; infinity gives infinity.

    Raises:
        ValueError: an argument out of range.
    """
    values = _checked_orders(orders)
    if np.isinf(epsilon):
        return np.full_like(values, np.inf)
    half = epsilon / 2
    return np.minimum((log_mgf(1, (2 * values - 1) * half) - log_mgf(1, half)) / (values - 1), epsilon)


def laplace_rdp(orders: ArrayLike, shift: float) -> Array:
    """Return the exact Renyi privacy of Laplace noise whose centre moves by ``shift`` noise scales in one coordinate.

    With w = a / (2 a - 1) it is log[w exp((a - 1) shift) + (1 - w) exp(-a shift)] / (a - 1) (Mironov 2017, Prop. 6).
    A shift spread over several coordinates, at the same L1 length, costs no more: the logarithm is convex in the shift
    (a log-sum-exp of linear functions) and 0 at 0, so it is superadditive.

    Args:
        orders: above 1.
        shift: L1 sensitivity over the noise scale, at least 0; infinity gives infinity.

    Returns:
        Array of the shape of orders, never above what the pure bound ``shift`` implies.

    Raises:
        ValueError: an argument out of range.
    """
    values = _checked_orders(orders)
    if not shift >= 0:
        raise InputError(key="shift", given=shift, allowed="allowed is 0 and more")
    if np.isinf(shift):
        return np.full_like(values, np.inf)
    up, down = (values - 1) * shift, values * shift
    weight = values / (2 * values - 1)
    # Nearby the linear terms of the two exponentials cancel each other, and would take all digits with them; far away
    # exp(up) would overflow.
    near = np.log1p(weight * _exp_beyond_linear(np.minimum(up, 1.0)) + (1 - weight) * _exp_beyond_linear(-down))
    far = np.logaddexp(np.log(weight) + up, np.log1p(-weight) - down)
    return np.minimum(np.where(up < 1, near, far) / (values - 1), pure_rdp(values, shift))


def _exp_beyond_linear(x: Array) -> Array:
    """Return exp(x) - 1 - x for x <= 1, without cancellation at 0."""
    term = np.clip(x, -1.0, 1.0) ** 2 / 2
    small = np.zeros_like(term)
    for n in range(3, _TAYLOR_TERMS + 3):
        small = small + term
        term = term * np.clip(x, -1.0, 1.0) / n
    return np.where(np.abs(x) <= 1, small, np.expm1(np.minimum(x, 1.0)) - x)


def gaussian_rdp(orders: ArrayLike, noise_multiplier: float) -> Array:
    """Return order / (2 noise_multiplier^2), noise over the L2 sensitivity (Mironov 2017, Prop. 7)."""
    return _checked_orders(orders) / (2 * noise_multiplier**2)


def rdp_to_epsilon(orders: ArrayLike, rdp: ArrayLike, delta: float) -> float:
    """Return epsilon such that the Renyi guarantees imply (epsilon, delta)-DP; infinity if none does.

    The bound is that of Canonne, Kamath and Steinke (2020, arXiv 2004.00010, Prop. 12). A divergence below
    -log(1 - delta^2) proves epsilon 0 by itself: then the total variation is at most delta (Bretagnolle and Huber).

    Args:
        orders: above 1.
        rdp: Renyi privacy at these orders, of the same shape.
        delta: in (0, 1).
    """
    values, divergences = _checked_orders(orders), np.asarray(rdp, np.float64)
    converted = divergences + np.log1p(-1 / values) - np.log(delta * values) / (values - 1)
    is_close = delta**2 + np.expm1(-divergences) > 0
    return float(np.maximum(np.where(is_close, 0.0, converted), 0.0).min())


def read_only(values: Array) -> Array:
    """Return an array that is remembered for later calls, so that none of them may change it."""
    values.setflags(write=False)
    return values


def _checked_orders(orders: ArrayLike) -> Array:
    values = np.asarray(orders, dtype=np.float64)
    if not np.all(values > 1):
        raise ValueError("Renyi orders must be above 1")
    return values
