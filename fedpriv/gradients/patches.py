"""The patches of its input that a convolution applies its kernel to."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Patches:
    """The patches as the rows of a matrix, copied out for the examples that are asked for: they take many times x.

    Args:
        x: its input, (B, in, *size).
    """

    def __init__(self, layer: nn.Conv1d | nn.Conv2d, x: Tensor, positions: int, group: int) -> None:
        self._layer = layer
        self._x = x.chunk(layer.groups, dim=1)[group]
        self.shape = torch.Size((len(x), positions, layer.weight[0].numel()))

    def __getitem__(self, examples: slice) -> Tensor:
        """Return the patches of some examples, (n, T, in / groups * kernel)."""
        x = self._x[examples]
        return patches(self._layer, padded(self._layer, x).contiguous()).reshape(len(x), *self.shape[:0:-1]).mT


def padded(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Return some of a convolution's input, (n, channels, *size), with what the layer puts around it."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return functional.pad(x, padded_sides(layer), mode=mode)


def padded_sides(layer: nn.Conv1d | nn.Conv2d) -> list[int]:
    """Return how much a convolution puts around its input, as torch's ``pad`` takes it."""
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return list(layer._reversed_padding_repeated_twice)
    return [side for width in reversed(layer.padding) for side in (width, width)]


def patches(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Return the patches that the kernel is applied to, (n, channels, *kernel, *positions): a view.

    Args:
        x: some of its input, padded, (n, channels, *size), its numbers in any order but without gaps.
    """
    extents = [dilation * (size - 1) + 1 for dilation, size in zip(layer.dilation, layer.kernel_size, strict=True)]
    lengths = zip(x.shape[2:], extents, layer.stride, strict=True)
    positions = [(length - extent) // stride + 1 for length, extent, stride in lengths]
    steps = x.stride()[2:]
    inside = [dilation * step for dilation, step in zip(layer.dilation, steps, strict=True)]
    between = [stride * step for stride, step in zip(layer.stride, steps, strict=True)]
    shape = (*x.shape[:2], *layer.kernel_size, *positions)
    return x.as_strided(shape, (*x.stride()[:2], *inside, *between))


def most_uses(layer: nn.Conv1d | nn.Conv2d) -> int:
    """Return how often a number of a convolution's input is in its patches, at most.

    Along an axis a number is under ceil(k gcd(s, d) / s) places of a kernel of size k with stride s and dilation d, and
    padding that repeats the input uses it once more for each place that is padded.
    """
    axes = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    uses = math.prod(-(-size * math.gcd(stride, dilation) // stride) for size, stride, dilation in axes)
    if layer.padding_mode == "zeros":
        return uses
    sides = layer._reversed_padding_repeated_twice
    return uses * math.prod(1 + left + right for left, right in zip(sides[::2], sides[1::2], strict=True))
