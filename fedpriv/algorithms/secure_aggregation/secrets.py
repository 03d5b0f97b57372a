"""Secrets of a round: keys that two clients agree on, masks that are drawn from keys, and secrets in shares.

Keys are agreed by X25519 (RFC 7748) and HKDF with SHA-256 (RFC 5869). Masks are AES-256 in counter mode. Flower's own
generator (``pseudo_rand_gen``) folds the 256 bits of a key into a seed of 32 and draws from a Mersenne Twister: whoever
sees a masked upload could try all seeds.

So many shares give a secret, and fewer say nothing about it (Shamir 1979). Each two bytes of it are the value at 0 of a
polynomial over the integers modulo 65,537, whose other coefficients are uniform; the share at place x has its value at
x. All bytes and all shares are one product of matrices of whole numbers, so that a hundred clients share with each
other in milliseconds.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedpriv.mechanisms.machinery.whole_numbers import Words

KEY_BYTES = 32
"""Length of every key here, public ones included."""

PRIME = 65_537
_DIGEST = 8  # bytes, by which shares that do not belong together are found out

Numbers = NDArray[np.int64]


def agreed(private: X25519PrivateKey, public: bytes, purpose: str) -> bytes:
    """Return the key of 32 bytes for a purpose, which the holder of the other private key gets, too."""
    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose.encode()).derive(shared)


def mask(key: bytes, count: int) -> Words:
    """Return ``count`` words that look random to whoever does not have the key of 32 bytes; a key is used once."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(4 * count)), dtype="<u4").astype(np.uint32, copy=False)


def shares(secret: bytes, needed: int, count: int) -> list[bytes]:
    """Return one share for each place from 1 to ``count``; ``needed`` of them give the secret."""
    if len(secret) % 2 or not 1 <= needed <= count < PRIME:
        raise ValueError(f"cannot split {len(secret)} bytes into {count} shares of which {needed} are needed")
    told = np.frombuffer(secret + sha256(secret).digest()[:_DIGEST], dtype="<u2").astype(np.int64)
    coefficients = np.concatenate([told[None], _uniform((needed - 1) * len(told)).reshape(-1, len(told))])
    values = _powers(needed, count) @ coefficients % PRIME
    return [row.astype("<u4").tobytes() for row in values]


def combined(places: Sequence[int], given: Sequence[bytes]) -> bytes:
    """Return the secret of which these are shares."""
    lengths = {len(share) for share in given}
    if len(lengths) != 1 or lengths.pop() % 4 or len(set(places)) != len(given):
        raise ValueError("shares of one secret have one length and a place each")
    values = np.stack([np.frombuffer(share, dtype="<u4").astype(np.int64) for share in given])
    told = (_weights(tuple(places)) @ (values % PRIME) % PRIME).astype("<u2").tobytes()
    secret, digest = told[:-_DIGEST], told[-_DIGEST:]
    if sha256(secret).digest()[:_DIGEST] != digest:
        raise ValueError("the shares are not of one secret")
    return secret


def _uniform(count: int) -> Numbers:
    """Whole numbers from 0 to 65,536 from the operating system."""
    while True:
        words = np.frombuffer(os.urandom(4 * count), dtype="<u4").astype(np.int64)
        # 2^32 - 1 is a multiple of 65,537: without the last word all remainders are as likely.
        if not (words == 2**32 - 1).any():
            return words % PRIME


@lru_cache(maxsize=8)
def _powers(needed: int, count: int) -> Numbers:
    """The powers 0 to ``needed`` - 1 of each place, (count, needed)."""
    places = np.arange(1, count + 1, dtype=np.int64)
    columns = [np.ones_like(places)]
    for _ in range(needed - 1):
        columns.append(columns[-1] * places % PRIME)
    return np.stack(columns, axis=1)


@lru_cache(maxsize=8)
def _weights(places: tuple[int, ...]) -> Numbers:
    """What the value at each place counts for in the value at 0 (Lagrange's interpolation)."""
    weights = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return np.array(weights, dtype=np.int64)
