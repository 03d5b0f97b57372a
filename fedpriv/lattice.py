"""Updates as whole numbers with Skellam noise: what a client masks where the noise is whole in the sum alone.

Kairouz, Liu and Steinke 2021 ("The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation", arXiv 2102.06387), with the noise of Agarwal, Kairouz and Liu 2021 (arXiv 2110.04995): an update of norm 1
at most is flattened by random signs and a Hadamard transform, scaled to ``LEVELS``, rounded at random until its norm is
below :func:`~fedpriv.accounting.skellam.rounded_norm`, and gets a share of the noise. Sums of Skellam variables are
Skellam, so that shares add up to exactly the noise that the ledger assumes. Sums are modulo 2^32: that is computed from
the noisy sum, and costs no privacy; with the most noise and 1,000 clients they do not wrap around.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.accounting.skellam import LEVELS, padded, rounded_norm
from fedpriv.masking import Words
from fedpriv.skellam import skellam

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Share:
    """A client's part of the noise on a sum.

    Attributes:
        bound: of an update's norm.
        variance: on each coordinate, in squared levels.
        survivors: how many shares are the whole noise: no sum of fewer clients is unmasked.
    """

    bound: float
    variance: float
    survivors: int


def encoded(update: Tensor, variance: float, signs: np.random.Generator, noise: np.random.Generator) -> Words:
    """Return a client's words, (D,), for :func:`fedpriv.clients.secure.masked`.

    Args:
        update: (K,), over the bound of its norm; what is longer than 1 is clipped once more.
    """
    values = update.detach().cpu().double().numpy()
    values = values / max(1.0, float(np.linalg.norm(values)))
    flattened = LEVELS * _flattened(values, signs)
    rounded = _rounded(flattened, rounded_norm(len(flattened)), noise)
    return (rounded + skellam(variance, rounded.shape, noise)).astype(np.uint32)


def decoded(total: Words, dimension: int, signs: np.random.Generator) -> Tensor:
    """Return the sum, float64 (K,), of updates over the bound of their norms, of which ``total`` is the sum of words.

    Args:
        total: (D,), modulo 2^32.
    """
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
