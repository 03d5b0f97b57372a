"""Secrets in shares: so many shares give the secret, and fewer say nothing about it (Shamir 1979).

Each two bytes of a secret are the value at 0 of a polynomial over the integers modulo 65,537, whose other coefficients
are uniform; the share at place x has its value at x. All bytes and all shares are one product of matrices of whole
numbers, so that a hundred clients share with each other in milliseconds.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

PRIME = 65_537
_DIGEST = 8  # bytes, by which shares that do not belong together are found out

Numbers = NDArray[np.int64]


def least_survivors(clients: int) -> int:
    """How many of ``clients`` must stay to the end: more than two thirds (Bonawitz et al. 2017, active server)."""
    return 2 * clients // 3 + 1


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
