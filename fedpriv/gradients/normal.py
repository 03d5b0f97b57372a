"""Normal random numbers in bulk: on all cores, accurate in the tails.

Random bits come from a noise stream's cipher. The transformation of Box and Muller (1958) makes two numbers of a random
point of the plane, whose distance from the origin reaches out to 8.5 standard deviations. torch's own float32 numbers
end at 5.8, are made by one thread, and follow from 32 bits.
"""

import math
from functools import cache, cached_property

import torch
from cryptography.hazmat.primitives.ciphers import CipherContext
from torch import Tensor

from fedpriv.core.randomness import BLOCK_BYTES, NoiseStream, keystream

# Points of the plane that a core handles at once: they stay in its cache, and torch gives no core fewer.
POINTS = 1 << 15

# Points that another device handles at once: few calls, while their bits stay in a cache of the processor's.
POINTS_ELSEWHERE = 1 << 18

# Uniform numbers below this are drawn again, in steps that are as much finer.
COARSE = 2.0**-20


def standard_normal(count: int, noise: NoiseStream, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Draw independent standard normal numbers, (count,), a function of the stream's state alone, not of the threads.

    Each is off by a few roundings of its type from one whose law is exactly normal. The bits are the same on every
    device; its own logarithm and cosine make the only difference.
    """
    return fill_normal(torch.empty(count, dtype=dtype, device=device), noise)


def fill_normal(numbers: Tensor, noise: NoiseStream) -> Tensor:
    """Overwrite numbers (count,), which lie side by side, with what :func:`standard_normal` draws, and return them."""
    points = (len(numbers) + 1) // 2
    most = POINTS * torch.get_num_threads() if numbers.device.type == "cpu" else POINTS_ELSEWHERE
    at_once = max(1, min(most, points))
    draw = _Points(noise.key(), at_once, numbers.dtype, numbers.device)
    # First coordinates fill the first half, second ones the other, in which there may be no room for the last of them.
    for start in range(0, points, at_once):
        stop = min(start + at_once, points)
        draw.fill(numbers[start:stop], numbers[points + start : points + stop])
    return numbers


@cache
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on a device, which is not to be changed."""
    return torch.tensor(value, dtype=dtype, device=device)


class _Points:
    """Normally distributed points of the plane, one after the other."""

    def __init__(self, key: bytes, most: int, dtype: torch.dtype, device: torch.device) -> None:
        # Three streams, so that what is drawn of one does not depend on how much was drawn of another.
        self._distances, self._angles = keystream(key, 0), keystream(key, 2)
        self._key = key
        self._integers = torch.int32 if dtype == torch.float32 else torch.int64
        # The integers j are uniform from -end to end - 1.
        self._end = 2.0 ** (8 * dtype.itemsize - 1)
        self._half_step = _number(0.5 / self._end, dtype, device)
        self._room = torch.empty(3, most, dtype=dtype, device=device)
        self._zeros = memoryview(bytes(most * dtype.itemsize))
        self._device = device
        # The cipher wants room for a block more than it fills. From pinned memory a GPU reads by itself.
        size, pinned = most + BLOCK_BYTES // dtype.itemsize, device.type == "cuda"
        self._drawn = torch.empty(size, dtype=self._integers, pin_memory=pinned)
        self._bits_view = self._drawn.numpy().data.cast("B")

    @cached_property
    def _finer(self) -> CipherContext:
        """The third stream, which is hardly ever drawn from."""
        return keystream(self._key, 1)

    def fill(self, first: Tensor, second: Tensor) -> None:
        """Fill two vectors with the coordinates of the next points; the second vector may be one shorter."""
        radius, angle, cosine = self._room[:, : len(first)].unbind()
        self._draw_uniform(radius, self._distances)
        if float(radius.amin()) < COARSE:
            coarse = torch.nonzero(radius < COARSE)[:, 0]
            radius[coarse] = COARSE * self._draw_uniform(radius.new_empty(len(coarse)), self._finer)
        radius.log_().mul_(-2).sqrt_()
        angle.copy_(self._take(len(angle), self._angles)).mul_(math.pi / self._end)
        torch.mul(torch.cos(angle, out=cosine), radius, out=first)
        torch.mul(angle[: len(second)].sin_(), radius[: len(second)], out=second)

    def _draw_uniform(self, numbers: Tensor, stream: CipherContext) -> Tensor:
        """Fill a vector with uniform numbers (|j| + 1/2) / end, which are above 0 and at most 1."""
        magnitudes = numbers.copy_(self._take(len(numbers), stream)).abs_()
        return torch.add(self._half_step, magnitudes, alpha=1 / self._end, out=numbers)

    def _take(self, count: int, stream: CipherContext) -> Tensor:
        """Return the next integers of a stream, in a tensor that the next call may overwrite."""
        stream.update_into(self._zeros[: count * self._integers.itemsize], self._bits_view)
        return self._drawn[:count].to(self._device)
