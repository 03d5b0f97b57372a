"""The two special functions of the von Mises-Fisher (VMF) distribution on the unit sphere of R^K.

With nu = K/2 - 1 and y uniform on the sphere, the moment generating function of one coordinate is

    M_K(k) = E exp(k y_1) = 0F1(; K/2; k^2/4) = Gamma(nu + 1) (2/k)^nu I_nu(k),        M_1(k) = cosh(k),

so the VMF density against the uniform one is exp(kappa mu.y) / M_K(kappa). Its mean resultant length, the mean of
mu.y, is A_K(k) = M_K'(k) / M_K(k) = I_{nu+1}(k) / I_nu(k).

For a large K the two parts log Gamma(nu + 1) and log I_nu(k) are of the size of K log K and cancel down to about
k^2 / (2 K). No branch below forms that difference:

* power series, all terms positive, while its largest term has an index below about 30;
* nu >= 24: Debye's uniform expansion (DLMF 10.41.3, 10.41.5) minus its own value at k = 0, in which the large parts
  cancel symbolically;
* nu < 24: scipy's scaled Bessel function, and from k = 1e4 on Hankel's expansion (DLMF 10.40.1), since scipy's
  function gives up near 1e9.
"""

from fractions import Fraction

import numpy as np
import scipy
from numpy.polynomial.polynomial import polyval
from numpy.typing import ArrayLike, NDArray

from fedpriv.core.errors import InputError

Array = NDArray[np.float64]

_SERIES_INDEX = 30.0  # the series serves while its largest term comes before this index
_SERIES_TERMS = 160  # the terms after these are below 1e-40 of the sum
_NEGLIGIBLE = 1e-20  # of the sum; terms that have come down to it fall faster than a geometric series
_DEBYE_NU = 24.0
_DEBYE_TERMS = 10
_HANKEL_K = 1e4
_HANKEL_TERMS = 12


def log_mgf(dimension: int, k: ArrayLike) -> Array:
    """Return log M_K(k), the log moment generating function of one coordinate of a uniform direction.

    Accurate to a relative 1e-10 for dimensions to 1e8 and k to 1e13 (checked against mpmath).

    Args:
        dimension: K, the dimension of the space, at least 1.
        k: any shape, finite, at least 0.

    Returns:
        Array of the shape of k, at least 0, and never above log cosh(k) or k.

    Raises:
        ValueError: dimension or k out of range.
    """
    values = _checked(dimension, k)
    flat = values.ravel()
    if dimension == 1:
        return _log_cosh(flat).reshape(values.shape)
    nu = dimension / 2 - 1
    near = _series_serves(nu, flat)
    beyond = flat[~near]
    result = np.empty_like(flat)
    result[near] = np.log1p(_series(nu + 1, flat[near]))
    result[~near] = _debye(nu, beyond) if nu >= _DEBYE_NU else _log_scaled(nu, beyond) + _unscaled(nu, beyond)
    return result.reshape(values.shape)


def mean_resultant_length(dimension: int, k: ArrayLike) -> Array:
    """Return A_K(k) = I_{K/2}(k) / I_{K/2-1}(k), the mean cosine between a VMF draw and its centre.

    Args:
        dimension: K, the dimension of the space, at least 1 (A_1 = tanh).
        k: the concentration, any shape, finite, at least 0.

    Returns:
        Array of the shape of k, in [0, 1].

    Raises:
        ValueError: dimension or k out of range.
    """
    values = _checked(dimension, k)
    flat = values.ravel()
    if dimension == 1:
        return np.asarray(np.tanh(flat)).reshape(values.shape)
    nu = dimension / 2 - 1
    near = _series_serves(nu, flat)
    beyond = flat[~near]
    result = np.empty_like(flat)
    result[near] = flat[near] / dimension * (1 + _series(nu + 2, flat[near])) / (1 + _series(nu + 1, flat[near]))
    result[~near] = _debye_ratio(nu, beyond) if nu >= _DEBYE_NU else _scaled(nu + 1, beyond) / _scaled(nu, beyond)
    return np.minimum(result, 1.0).reshape(values.shape)


def _checked(dimension: int, k: ArrayLike) -> Array:
    values = np.asarray(k, dtype=np.float64)
    if dimension < 1:
        raise InputError(key="dimension", given=dimension, allowed="allowed is 1 and more")
    if not np.all(np.isfinite(values) & (values >= 0)):
        raise ValueError("k must be finite and at least 0")
    return values


def _series_serves(nu: float, k: Array) -> NDArray[np.bool_]:
    # The terms x^n / (n! (b)_n), x = k^2/4, b = nu + 1, grow until n (n + nu) = x.
    return np.asarray((k / 2) ** 2 <= _SERIES_INDEX * (_SERIES_INDEX + nu))


def _log_cosh(k: Array) -> Array:
    small = np.minimum(k, 1.0)
    large = k + np.log1p(np.exp(-2 * k)) - np.log(2.0)
    return np.asarray(np.where(k < 1.0, np.log1p(2 * np.sinh(small / 2) ** 2), large), np.float64)


def _series(b: float, k: Array) -> Array:
    """Return 0F1(; b; k^2/4) - 1 by its power series."""
    x = (k / 2) ** 2
    term = np.ones_like(x)
    total = np.zeros_like(x)
    for n in range(_SERIES_TERMS):
        term = term * (x / ((n + 1) * (b + n)))
        total = total + term
        if not np.any(term > _NEGLIGIBLE * total):
            break
    return total


def _scaled(nu: float, k: Array) -> Array:
    """Return exp(-k) I_nu(k), times sqrt(2 pi k) where k >= 1e4 (the same factor for every nu)."""
    middle = np.minimum(k, _HANKEL_K)
    return np.asarray(
        np.where(k < _HANKEL_K, scipy.special.ive(nu, middle), _hankel(nu, np.maximum(k, _HANKEL_K))), np.float64
    )


def _log_scaled(nu: float, k: Array) -> Array:
    """Return log(exp(-k) I_nu(k))."""
    factor = np.where(k < _HANKEL_K, 0.0, 0.5 * np.log(2 * np.pi * k))
    return np.asarray(np.log(_scaled(nu, k)) - factor, np.float64)


def _unscaled(nu: float, k: Array) -> Array:
    """Return what log(exp(-k) I_nu(k)) lacks of log M."""
    return np.asarray(k - nu * np.log(k / 2) + scipy.special.gammaln(nu + 1), np.float64)


def _debye(nu: float, k: Array) -> Array:
    # nu eta + log Gamma(nu + 1) - nu log(k/2) - log(2 pi nu)/2, with Stirling's series written as the same sum at p =
    # 1.
    s, p, z = _debye_variables(nu, k)
    at_k = _debye_sum(_DEBYE_U, p, nu)
    at_zero = _debye_sum(_DEBYE_U, np.float64(1.0), nu)
    return nu * (s - np.log1p(s / 2)) - np.log1p(z * z) / 4 + np.log(at_k) - np.log(at_zero)


def _debye_ratio(nu: float, k: Array) -> Array:
    # I_{nu+1} / I_nu = I_nu' / I_nu - nu / k, and I_nu'(nu z) has the expansion with V_k (DLMF 10.41.5).
    s, p, z = _debye_variables(nu, k)
    excess = _debye_sum(_DEBYE_V, p, nu) / _debye_sum(_DEBYE_U, p, nu) - 1
    return (s + (1 + s) * excess) / z


def _debye_variables(nu: float, k: Array) -> tuple[Array, Array, Array]:
    """Return s = sqrt(1 + z^2) - 1 without cancellation, p = 1 / sqrt(1 + z^2) and z = k / nu."""
    z = k / nu
    root = np.sqrt(1 + z * z)
    return z * z / (1 + root), 1 / root, z


def _debye_sum(polynomials: tuple[NDArray[np.float64], ...], p: Array | np.float64, nu: float) -> Array:
    total = np.zeros_like(p)
    for index, coefficients in reversed(list(enumerate(polynomials))):
        total = total + polyval(p, coefficients) / nu**index
    return np.asarray(total)


def _debye_polynomials(terms: int) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the coefficients of U_0..U_terms and V_0..V_terms (DLMF 10.41.9 to 10.41.11), exact before rounding."""
    u: list[list[Fraction]] = [[Fraction(1)]]
    v: list[list[Fraction]] = [[Fraction(1)]]
    for _ in range(terms):
        following = [Fraction(0)] * (len(u[-1]) + 3)
        companion = [Fraction(0)] * (len(u[-1]) + 3)
        for n, c in enumerate(u[-1]):
            # U_k+1 = p^2 (1 - p^2) U_k' / 2 + integral of (1 - 5 t^2) U_k / 8;  V_k+1 = U_k+1 - p (1 - p^2) (U_k / 2 +
            # p U_k')
            following[n + 1] += c * (Fraction(n, 2) + Fraction(1, 8 * (n + 1)))
            following[n + 3] -= c * (Fraction(n, 2) + Fraction(5, 8 * (n + 3)))
            companion[n + 1] -= c * (Fraction(1, 2) + n)
            companion[n + 3] += c * (Fraction(1, 2) + n)
        v.append([mine + its for mine, its in zip(companion, following, strict=True)])
        u.append(following)
    return _rounded(u), _rounded(v)


def _rounded(polynomials: list[list[Fraction]]) -> tuple[Array, ...]:
    return tuple(np.array([float(value) for value in polynomial]) for polynomial in polynomials)


def _hankel(nu: float, k: Array) -> Array:
    """Return sqrt(2 pi k) exp(-k) I_nu(k) by Hankel's expansion, for k much larger than nu^2."""
    term = np.ones_like(k)
    total = np.ones_like(k)
    for n in range(1, _HANKEL_TERMS):
        term = -term * (4 * nu * nu - (2 * n - 1) ** 2) / (8 * n * k)
        total = total + term
    return total


_DEBYE_U, _DEBYE_V = _debye_polynomials(_DEBYE_TERMS)
