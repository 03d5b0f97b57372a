"""The oracle of the directional mechanism's special function: 40 digits, by whichever formula is fast."""

from functools import cache

import mpmath


@cache
def exact_log_mgf(dimension, k):
    """log M_K(k) with 40 digits: the hypergeometric series, the Bessel function, or an integral where both are slow."""
    with mpmath.workdps(40):
        size, k = mpmath.mpf(dimension), mpmath.mpf(k)
        if dimension == 1:
            return mpmath.log(mpmath.cosh(k)) if k < 1e6 else k - mpmath.log(2)
        if k * k / (2 * size) < 1000:
            return mpmath.log(mpmath.hyp0f1(size / 2, k * k / 4))
        nu = size / 2 - 1
        if nu < 1000:
            return mpmath.log(mpmath.besseli(nu, k)) - nu * mpmath.log(k / 2) + mpmath.loggamma(nu + 1)
        return integrated_log_mgf(size, k)


def integrated_log_mgf(size, k):
    """Log of the mean of exp(k t), t one coordinate of a uniform direction: density ~ (1 - t^2)^((K-3)/2)."""
    power = (size - 3) / 2
    mode = k / (power + mpmath.sqrt(power**2 + k**2))
    width = (1 - mode**2) / mpmath.sqrt(2 * power * (1 + mode**2))
    exponent = lambda t: k * t + power * mpmath.log1p(-t * t)  # noqa: E731
    points = [max(mpmath.mpf(-1), min(mpmath.mpf(1), mode + step * width)) for step in range(-40, 44, 4)]
    mass = mpmath.quad(
        lambda t: mpmath.exp(exponent(t) - exponent(mode)) if abs(t) < 1 else mpmath.mpf(0), sorted(set(points))
    )
    log_beta = mpmath.log(mpmath.pi) / 2 + mpmath.loggamma((size - 1) / 2) - mpmath.loggamma(size / 2)
    return exponent(mode) + mpmath.log(mass) - log_beta
