"""Independent random streams: public ones from the experiment's seed, secret ones from a secret.

No other source of randomness exists in the package: a stream depends on (seed or secret, purpose, indices) alone, never
on a global generator, on the engine or on the order in which things happen.

- Streams of the seed (:func:`numpy_stream`, :func:`torch_stream`) make experiments repeat: data shares, weights,
  attacks. Their generators are PCG64 (numpy) and Mersenne Twister (torch); whoever guesses the seed has them.
- Streams of a :class:`Secret` are what protects people: a mechanism's noise. Their bits come from AES in counter mode,
  keyed by 128 bits of the stream's own hash.
"""

import random
import secrets
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import cast

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from randomgen import AESCounter
from torch import Tensor

from fedpriv.core.errors import InputError

SECRET_BYTES = 32
KEY_BYTES = BLOCK_BYTES = 16


def _sequence(seed: int, purpose: str, indices: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(entropy=seed, spawn_key=(zlib.crc32(purpose.encode()), *indices))


def numpy_stream(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """Return the numpy generator of one purpose, such as ``numpy_stream(7, "batches", partition, epoch)``."""
    return np.random.default_rng(_sequence(seed, purpose, indices))


def torch_stream(seed: int, purpose: str, *indices: int, device: str | torch.device = "cpu") -> torch.Generator:
    """Return the torch generator of one purpose on ``device``; 32 bits of seed on the CPU, so it protects nobody."""
    state = _sequence(seed, purpose, indices).generate_state(1, np.uint64)
    return torch.Generator(device=device).manual_seed(int(state[0]))


def fixed_normal(seed: int, *size: int) -> Tensor:
    """Return standard normal numbers in float32 that a seed decides, such as images on which a network is tried."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Secret:
    """256 secret bits: a run's, or a client's own."""

    key: bytes = field(repr=False)  # the bits, 32 bytes; not shown

    def __post_init__(self) -> None:
        if len(self.key) != SECRET_BYTES:
            raise ValueError(f"a secret of {len(self.key)} bytes; allowed: {SECRET_BYTES}")

    @staticmethod
    def drawn() -> "Secret":
        """Return a new one from the operating system."""
        return Secret(secrets.token_bytes(SECRET_BYTES))

    @staticmethod
    def of_seed(seed: int) -> "Secret":
        """Return the secret of a seed, for experiments that must repeat: it is known to all who guess the seed."""
        return Secret(_hashed(b"", "reproducible", (seed,), SECRET_BYTES))

    @staticmethod
    def read(path: Path, lost: str) -> "Secret":
        """Return the secret that a file keeps in hexadecimal digits; ``lost``: what cannot be done without it."""
        try:
            return Secret(bytes.fromhex(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            raise InputError(f"{path} is not there, or damaged: {lost} without it") from None

    def stream(self, purpose: str, *parts: int | bytes) -> "NoiseStream":
        """Return the stream of one purpose; other purposes or parts (integers, digests) give independent streams."""
        return NoiseStream(self.derived(purpose, *parts).key)

    def derived(self, purpose: str, *parts: int | bytes) -> "Secret":
        """Return a secret of its own for one purpose; from it this one cannot be found."""
        return Secret(_hashed(self.key, purpose, parts, SECRET_BYTES))

    def seed(self, purpose: str) -> int:
        """Return a seed of 128 bits for streams that are numpy's own, such as those that draw batches."""
        return int.from_bytes(_hashed(self.key, purpose, (), KEY_BYTES))


class NoiseStream:
    """Random numbers from AES in counter mode (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3).

    Each call takes a key of its own, so that what one call returns does not depend on how much an earlier one took.
    The state moves on with each call; two streams of the same bytes return the same numbers.

    Args:
        key: 32 bytes, from :meth:`Secret.stream`.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._calls = 0

    def key(self) -> bytes:
        """Return the next key of the cipher: 128 bits of the stream's hash."""
        self._calls += 1
        return _hashed(self._key, "key", (self._calls,), KEY_BYTES)

    def numpy(self) -> np.random.Generator:
        """Return a numpy generator whose bits come from the cipher, for distributions that only numpy draws from."""
        return np.random.Generator(AESCounter(key=int.from_bytes(self.key())))

    def uniform(self, count: int) -> Tensor:
        """Return independent numbers from [0, 1), (count,), multiples of 2^-53 in float64, on the CPU."""
        # The cipher wants room for a block more than it fills.
        words = torch.empty(8 * count + BLOCK_BYTES, dtype=torch.uint8)
        keystream(self.key(), 0).update_into(bytes(8 * count), words.numpy().data)
        return (words[: 8 * count].view(torch.int64) >> 11).double().mul_(2.0**-53).add_(0.5)


class NoiseStreams(NoiseStream):
    """Several streams, each of which fills its own share of a draw with the numbers that it would draw alone."""

    def __init__(self, each: Sequence[NoiseStream]) -> None:
        self.each = tuple(each)

    def key(self) -> bytes:
        """Refuse: there is no key of several streams."""
        raise TypeError("several streams have a key each")

    def uniform(self, count: int) -> Tensor:
        """Return (count,) numbers, the same number from each stream, stream after stream."""
        return torch.cat([stream.uniform(count // len(self.each)) for stream in self.each])


def keystream(key: bytes, number: int) -> CipherContext:
    """Return one of the 2^64 independent streams of bits of a key (16 bytes): what the cipher makes of zeros."""
    counter = number.to_bytes(BLOCK_BYTES // 2, "big") + bytes(BLOCK_BYTES // 2)
    return Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()


def _hashed(key: bytes, purpose: str, parts: tuple[int | bytes, ...], size: int) -> bytes:
    """BLAKE2b (RFC 7693) of a purpose and its parts, none of which can run into the next."""
    digest = blake2b(key=key, digest_size=size, person=b"fedpriv")
    for part in (purpose.encode(), *parts):
        kind, content = (b"i", str(part).encode()) if isinstance(part, int) else (b"b", part)
        digest.update(kind + len(content).to_bytes(8) + content)
    return digest.digest()


@contextmanager
def seeded_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of torch (CPU, device), numpy and Python inside the block, and restore them."""
    kept = np.random.get_state(), random.getstate()  # noqa: NPY002 - here and below the global generator is meant
    forked = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    try:
        with torch.random.fork_rng(**forked):
            torch.default_generator.manual_seed(seed)
            if device.type != "cpu":
                torch.get_device_module(device).manual_seed(seed)
            np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002
            random.seed(seed)
            yield
    finally:
        np.random.set_state(kept[0])  # noqa: NPY002
        random.setstate(kept[1])


def generator_states(device: torch.device | None = None) -> tuple[object, ...]:
    """Return the states of the global generators of torch (the CPU's and a device's), numpy and Python."""
    _, words, *rest = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())  # noqa: NPY002
    torchs = [torch.default_generator.get_state()]
    if device is not None and device.type != "cpu":
        torchs.append(torch.get_device_module(device).get_rng_state(device))
    return *(state.cpu().numpy().tobytes() for state in torchs), words.tobytes(), *rest, random.getstate()
