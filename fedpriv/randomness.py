"""Independent random streams, each a function of the experiment's seed and of what it is for.

No other source of randomness exists in the package: a stream depends on (seed, purpose, indices) alone, never on a
global generator, on the engine or on the order in which things happen. Networks draw from the global generators, which
are seeded from a stream for as long as one runs. The generators are Mersenne Twister (torch) and
PCG64 (numpy): right for experiments that must repeat, not a secure source for noise that protects real people.
"""

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch

__all__ = ["generator_states", "numpy_stream", "seeded_generators", "torch_stream"]


def _sequence(seed: int, purpose: str, indices: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(entropy=seed, spawn_key=(zlib.crc32(purpose.encode()), *indices))


def numpy_stream(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """Return the numpy generator of one purpose, such as ``numpy_stream(7, "batches", partition, epoch)``.

    Args:
        seed: the experiment's seed, at least 0.
        purpose: what the numbers are for; two purposes never share a stream.
        indices: non-negative integers that tell uses of one purpose apart (partition, round, step, ...).
    """
    return np.random.default_rng(_sequence(seed, purpose, indices))


def torch_stream(seed: int, purpose: str, *indices: int, device: str | torch.device = "cpu") -> torch.Generator:
    """Return the torch generator of one purpose on ``device``; the arguments are those of :func:`numpy_stream`.

    The seed handed to torch has 64 bits; torch's CPU generator keeps 32 of them, its CUDA generator all.
    """
    state = _sequence(seed, purpose, indices).generate_state(1, np.uint64)
    return torch.Generator(device=device).manual_seed(int(state[0]))


@contextmanager
def seeded_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python inside the block; afterwards they go on where they were.

    A network's own code draws from them (dropout, noise, mixing). What it draws inside the block depends on the seed
    and on what it does there, and nothing of it lives on.

    Of torch's generators the CPU's and the device's are seeded: ``torch.manual_seed`` would look for every device there
    might be, and that takes longer than a small model's gradient.

    Args:
        seed: from 0 to 2^64 - 1.
        device: where the network computes.
    """
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


def generator_states() -> tuple[object, ...]:
    """Return the states of the CPU's global generators of torch, numpy and Python; equal if they will draw the same."""
    _, words, *rest = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())  # noqa: NPY002
    return torch.default_generator.get_state().numpy().tobytes(), words.tobytes(), *rest, random.getstate()
