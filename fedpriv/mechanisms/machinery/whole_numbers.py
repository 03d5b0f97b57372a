"""Uploads and counts of votes as whole numbers modulo 2^32, so that sums of up to 1,000 clients are exact.

Each coordinate is clipped to [-limit, limit] and rounded to the nearest of 2^22 + 1 levels, so that the same upload
gives the same numbers everywhere, and their sum stays below 2^32, whatever masks are on them.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedpriv.core.randomness import NoiseStream

LEVELS = 1 << 22

Words = NDArray[np.uint32]


def least_survivors(clients: int) -> int:
    """How many of ``clients`` must stay to the end: more than two thirds (Bonawitz et al. 2017, active server)."""
    return 2 * clients // 3 + 1


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return tensors laid end to end, in float64."""
    return torch.cat([value.detach().cpu().double().reshape(-1) for value in tensors.values()])


def quantised(values: Tensor, limit: float) -> Words:
    """Return levels of values (K,), from 0 for -limit to 2^22 for limit; what lies outside is clipped."""
    if not bool(values.isfinite().all()):
        raise ValueError("an upload with NaN or infinity in it cannot be masked")
    shares = (values.clamp(-limit, limit) / limit + 1) / 2
    return np.rint(shares.numpy() * LEVELS).astype(np.uint32)


def restored(total: Words, clients: int, limit: float) -> Tensor:
    """Return the sum, float64 (K,), of ``clients`` vectors of which ``total`` is the sum of levels modulo 2^32."""
    return torch.from_numpy((total.astype(np.float64) / LEVELS * 2 - clients) * limit)


def votes_limit(votes: int, sigma: float, clients: int) -> float:
    """Return what a noisy count of one client exceeds once in 10^18 times: the limit for :func:`quantised`."""
    return votes + 9 * sigma / math.sqrt(least_survivors(clients))


def split(values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the names, shapes and types of ``like`` out of :func:`flat` ones."""
    sizes = [math.prod(value.shape) for value in like.values()]
    parts = values.split(sizes) if sizes else ()
    return {
        name: part.reshape(value.shape).to(value.dtype) for part, (name, value) in zip(parts, like.items(), strict=True)
    }


def noisy_counts(votes: Tensor, classes: int, sigma: float, clients: int, noise: NoiseStream) -> Tensor:
    """Return votes (t, Q) as counts (Q, K), with a share of noise that is ``sigma`` in the least sum."""
    counts = functional.one_hot(votes.long(), classes).sum(0).double()
    share = sigma / math.sqrt(least_survivors(clients))
    return counts + torch.from_numpy(noise.numpy().normal(0.0, share, tuple(counts.shape)))


def masked_counts(votes: Tensor, classes: int, sigma: float, clients: int, noise: NoiseStream) -> Words:
    """Return :func:`noisy_counts` as whole numbers to be masked, laid end to end."""
    counts = noisy_counts(votes, classes, sigma, clients, noise)
    return quantised(flat({"counts": counts}), votes_limit(len(votes), sigma, clients))
