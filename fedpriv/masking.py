"""The arithmetic of secure aggregation: uploads as whole numbers modulo 2^32, and masks that cancel in their sum.

Each coordinate is clipped to [-limit, limit] and rounded to the nearest of 2^22 + 1 levels, so that the same upload
gives the same numbers everywhere. Sums of up to 1,000 clients stay below 2^32 and are exact, whatever the masks.

Masks are AES-256 in counter mode. Flower's own generator (``pseudo_rand_gen``) folds the 256 bits of a key into a seed
of 32 and draws from a Mersenne Twister: whoever hears a masked upload could try all seeds. Keys are agreed by X25519
(RFC 7748) and HKDF with SHA-256 (RFC 5869).
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedpriv.core.randomness import NoiseStream
from fedpriv.shamir import least_survivors

LEVELS = 1 << 22

KEY_BYTES = 32
"""Length of every key here, public ones included."""

Words = NDArray[np.uint32]


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return tensors laid end to end, in float64."""
    return torch.cat([value.detach().cpu().double().reshape(-1) for value in tensors.values()])


def quantised(values: Tensor, limit: float) -> Words:
    """Return levels, from 0 for -limit to 2^22 for limit.

    Args:
        values: float64 (K,); what lies outside [-limit, limit] is clipped.
    """
    if not bool(values.isfinite().all()):
        raise ValueError("an upload with NaN or infinity in it cannot be masked")
    shares = (values.clamp(-limit, limit) / limit + 1) / 2
    levels: Words = np.rint(shares.numpy() * LEVELS).astype(np.uint32)
    return levels


def restored(total: Words, clients: int, limit: float) -> Tensor:
    """Return the sum, float64 (K,), of ``clients`` vectors of which ``total`` is the sum of levels modulo 2^32."""
    return torch.from_numpy((total.astype(np.float64) / LEVELS * 2 - clients) * limit)


def votes_limit(votes: int, sigma: float, clients: int) -> float:
    """Return what a noisy count of one client exceeds once in 10^18 times: the limit for :func:`quantised`."""
    return votes + 9 * sigma / math.sqrt(least_survivors(clients))


def agreed(private: X25519PrivateKey, public: bytes, purpose: str) -> bytes:
    """Return the key of 32 bytes for a purpose, which the holder of the other private key gets, too."""
    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose.encode()).derive(shared)


def mask(key: bytes, count: int) -> Words:
    """Return ``count`` words that look random to whoever does not have the key of 32 bytes; a key is used once."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    words: Words = np.frombuffer(stream.update(bytes(4 * count)), dtype="<u4").astype(np.uint32, copy=False)
    return words


def split(values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the names, shapes and types of ``like`` out of :func:`flat` ones."""
    sizes = [math.prod(value.shape) for value in like.values()]
    parts = values.split(sizes) if sizes else ()
    return {
        name: part.reshape(value.shape).to(value.dtype) for part, (name, value) in zip(parts, like.items(), strict=True)
    }


def noisy_counts(votes: Tensor, classes: int, sigma: float, clients: int, noise: NoiseStream) -> Tensor:
    """Return a client's votes as counts, with its share of the noise.

    The sum of as many clients as secure aggregation guarantees has noise of deviation ``sigma``, or more.

    Args:
        votes: (t, Q).

    Returns:
        (Q, K), float64.
    """
    counts = functional.one_hot(votes.long(), classes).sum(0).double()
    share = sigma / math.sqrt(least_survivors(clients))
    return counts + torch.from_numpy(noise.numpy().normal(0.0, share, tuple(counts.shape)))


def masked_counts(votes: Tensor, classes: int, sigma: float, clients: int, noise: NoiseStream) -> Words:
    """Return :func:`noisy_counts` as whole numbers to be masked, laid end to end."""
    counts = noisy_counts(votes, classes, sigma, clients, noise)
    return quantised(flat({"counts": counts}), votes_limit(len(votes), sigma, clients))
