"""Skellam noise: the difference of two Poisson numbers with the same mean, for means up to 2^52.

numpy draws Poisson numbers by comparing -m + k log m - log k! with a uniform number. These terms are of the size
m log m and nearly cancel: the logarithm of a probability is off by about 10^-16 m log m, so that from means of about
10^14 on the variance is 16 % too small and more. Here a number is drawn as its distance from the mean, and its
probability is computed in Loader's form (2000, "Fast and Accurate Computation of Binomial Probabilities"), in which
nothing cancels.
"""

import math

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError

Array = NDArray[np.float64]

# Below it numpy's logarithms of probabilities are off by 2e-9 at most.
_LARGE = 2.0**20
# phi(t) = (1 + t) log(1 + t) - t = t^2 (1/2 - t/6 + t^2/12 - ...): so many terms are exact to rounding below _SMALL.
_SMALL = 0.02
_SERIES = [1 / (j * (j - 1)) for j in range(2, 12)]


def skellam(variance: float, shape: tuple[int, ...], noise: np.random.Generator) -> NDArray[np.int64]:
    """Return independent Skellam numbers with mean 0."""
    if not 0 <= variance <= 2.0**53:
        raise InputError(key="variance", given=variance, allowed="allowed is from 0 to 2^53")
    mean = variance / 2
    if mean < _LARGE:
        return noise.poisson(mean, shape) - noise.poisson(mean, shape)
    count = math.prod(shape)
    return (_offsets(mean, count, noise) - _offsets(mean, count, noise)).reshape(shape)


def _offsets(mean: float, count: int, noise: np.random.Generator) -> NDArray[np.int64]:
    """Poisson numbers (count,), less the whole part of their mean.

    Transformed rejection (Hoermann 1993, "The transformed rejection method for generating Poisson random variables",
    algorithm PTRS with its constants for means from 10 on), without the shortcuts that save logarithms.
    """
    part = mean - math.floor(mean)
    b = 0.931 + 2.53 * math.sqrt(mean)
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    drawn = np.zeros(count, dtype=np.int64)
    open_ = np.arange(count)
    while open_.size:
        u = noise.random(open_.size) - 0.5
        v = 1 - noise.random(open_.size)
        near = np.maximum(0.5 - np.abs(u), 2.0**-54)
        offset = np.floor((2 * a / near + b) * u + part + 0.43)
        accepted = np.log(v * inverse_alpha / (a / near**2 + b)) <= log_probability(offset - part, mean)
        drawn[open_[accepted]] = offset[accepted].astype(np.int64)
        open_ = open_[~accepted]
    return drawn


def log_probability(distance: Array, mean: float) -> Array:
    """Return the logarithm of a Poisson number's probability, whose distance from a large mean is given.

    log P(k) = -m phi((k - m) / m) - log(2 pi k) / 2 - 1 / (12 k), up to 1 / (360 k^3).
    """
    ratio = distance / mean
    inside = ratio > -0.5  # what is left out has a probability below exp(-0.15 mean)
    t = np.where(inside, ratio, 0.0)
    exact = (1 + t) * np.log1p(t) - t
    phi = np.where(np.abs(t) < _SMALL, t**2 * np.polynomial.polynomial.polyval(-t, _SERIES), exact)
    k = mean * (1 + t)
    logs: Array = np.where(inside, -mean * phi - np.log(2 * math.pi * k) / 2 - 1 / (12 * k), -np.inf)
    return logs
