"""Updates as whole numbers with Skellam noise: what a client masks where the noise is whole in the sum alone.

Kairouz, Liu and Steinke 2021 (arXiv 2102.06387), with the noise of Agarwal, Kairouz and Liu 2021 (arXiv 2110.04995): an
update of norm 1 at most is flattened by random signs and a Hadamard transform, scaled to ``LEVELS``, rounded at random
until its norm is below :func:`~fedpriv.accounting.skellam.rounded_norm`, and gets a share of the noise; shares add up
to exactly the ledger's. Sums are modulo 2^32, and do not wrap around with the most noise and 1,000 clients.

A Skellam number is the difference of two Poisson numbers with the same mean, here up to 2^52. In numpy's formula,
-m + k log m - log k!, terms nearly cancel: from means of about 10^14 on its variance is 16 % too small and more. Here a
number is drawn as its distance from the mean, with its probability in Loader's form (2000), where nothing cancels.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.accounting.skellam import LEVELS, padded, rounded_norm
from fedpriv.core.errors import InputError
from fedpriv.mechanisms.machinery.whole_numbers import Words

Array = NDArray[np.float64]

# Below it numpy's logarithms of probabilities are off by 2e-9 at most.
_LARGE = 2.0**20
# phi(t) = (1 + t) log(1 + t) - t = t^2 (1/2 - t/6 + t^2/12 - ...): so many terms are exact to rounding below _SMALL.
_SMALL = 0.02
_SERIES = [1 / (j * (j - 1)) for j in range(2, 12)]


@dataclass(frozen=True)
class NoiseShare:
    """A client's part of the noise on a sum."""

    bound: float  # of an update's norm
    variance: float  # on each coordinate, in squared levels
    survivors: int  # how many shares are the whole noise: no sum of fewer clients is unmasked


def encoded(update: Tensor, variance: float, signs: np.random.Generator, noise: np.random.Generator) -> Words:
    """Return the words (D,) of an update (K,) over its bound, clipped once more, for masking."""
    values = update.detach().cpu().double().numpy()
    values = values / max(1.0, float(np.linalg.norm(values)))
    return noisy_levels(_flattened(values, signs), variance, noise).astype(np.uint32)


def noisy_levels(values: Array, variance: float, noise: np.random.Generator) -> NDArray[np.int64]:
    """Return values (K,), of norm 1 at most, as whole levels: rounded at random, with Skellam noise."""
    return _rounded(LEVELS * values, rounded_norm(len(values)), noise) + skellam(variance, values.shape, noise)


def decoded(total: Words, dimension: int, signs: np.random.Generator) -> Tensor:
    """Return the sum (K,) of updates over their bound, from the sum of their words modulo 2^32."""
    whole = total.astype(np.uint32).view(np.int32).astype(np.float64) / LEVELS
    return torch.from_numpy((_hadamard(whole) * _signs(len(whole), signs))[:dimension])


def _flattened(values: Array, signs: np.random.Generator) -> Array:
    """The update with random signs in the Hadamard basis: no coordinate is far larger than the others."""
    size = padded(len(values))
    padding = np.zeros(size - len(values))
    return _hadamard(np.concatenate([values, padding]) * _signs(size, signs))


def _signs(size: int, generator: np.random.Generator) -> Array:
    return np.where(generator.integers(0, 2, size) == 1, 1.0, -1.0)


def _hadamard(values: Array) -> Array:
    """The orthonormal Walsh-Hadamard transform of 2^m numbers, its own inverse."""
    size, width = len(values), 1
    while width < size:
        pairs = values.reshape(-1, 2, width)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        width *= 2
    return values / math.sqrt(size)


def _rounded(values: Array, bound: float, noise: np.random.Generator) -> NDArray[np.int64]:
    """Round up with the probability of the remainder, and anew until the norm is within the bound."""
    below = np.floor(values)
    while True:
        rounded: NDArray[np.int64] = (below + (noise.random(values.shape) < values - below)).astype(np.int64)
        if float(np.square(rounded.astype(np.float64)).sum()) <= bound**2:
            return rounded


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
    """Return log P(k) of a Poisson number by its distance from the mean, up to 1 / (360 k^3)."""
    ratio = distance / mean
    inside = ratio > -0.5  # what is left out has a probability below exp(-0.15 mean)
    t = np.where(inside, ratio, 0.0)
    exact = (1 + t) * np.log1p(t) - t
    phi = np.where(np.abs(t) < _SMALL, t**2 * np.polynomial.polynomial.polyval(-t, _SERIES), exact)
    k = mean * (1 + t)
    return np.where(inside, -mean * phi - np.log(2 * math.pi * k) / 2 - 1 / (12 * k), -np.inf)
