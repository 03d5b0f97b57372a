"""Layers that write down what they get and give, from which the gradients of their parameters follow.

The gradient of a Linear weight is the sum over positions of outer products of output gradient and input; that of a
convolution is the same with the patches that its kernel is applied to. Inputs, patches and outputs stay in autograd's
graph, so that what follows from them can be differentiated with respect to the dummy images.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.reconstruction.factors import Factor, Outer, Written

__all__ = ["RULES", "Entry", "Rule", "taped_forward"]

# Patches overlap: they are copied out for so many bytes at a time, which stay in the cache.
CACHE_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class Entry:
    """What one layer got and gave.

    Attributes:
        name: of the layer in the network.
        layer: itself.
        inputs: (R, ...), for R images.
        output: (R, ...).
    """

    name: str
    layer: Any
    inputs: Tensor
    output: Tensor


Rule = Callable[[Any, Tensor, Tensor, tuple[int, int]], tuple[Factor, Factor]]
"""(layer, input (R, ...), gradients of the output (R, ...), (N, U)) -> the gradients of weight and bias of N rows of U
units; the R images are spread over the units in order."""


def taped_forward(name: str, layer: nn.Module, entries: list[Entry]) -> Callable[[Tensor], Tensor]:
    """Return what a layer does, with a line in ``entries`` for each call."""

    def forward(x: Tensor) -> Tensor:
        output: Tensor = type(layer).forward(layer, x)
        entries.append(Entry(name, layer, x, output))
        return output

    return forward


def _linear(layer: nn.Linear, x: Tensor, error: Tensor, units: tuple[int, int]) -> tuple[Factor, Factor]:
    inputs = x.reshape(*units, -1, layer.in_features)
    errors = error.reshape(*units, -1, layer.out_features)
    return Outer(inputs, errors, layer.weight.shape), Written(errors.sum(dim=2))


def _convolution(layer: Any, x: Tensor, error: Tensor, units: tuple[int, int]) -> tuple[Factor, Factor]:
    x, windows = _padded(layer, x)
    rows = _KernelGradients.apply(x, error.flatten(2), windows)
    shape = (*units, *layer.weight.shape)
    return Written(_total(rows, shape)), Written(_total(error.flatten(2).sum(dim=2), (*units, layer.out_channels)))


def _layer_norm(layer: nn.LayerNorm, x: Tensor, error: Tensor, units: tuple[int, int]) -> tuple[Factor, Factor]:
    normal = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    shape = (*units, -1, *layer.normalized_shape)
    return Written((error * normal).reshape(shape).sum(dim=2)), Written(error.reshape(shape).sum(dim=2))


def _group_norm(layer: nn.GroupNorm, x: Tensor, error: Tensor, units: tuple[int, int]) -> tuple[Factor, Factor]:
    normal = F.group_norm(x, layer.num_groups, eps=layer.eps)
    weight, bias = ((part.flatten(2).sum(dim=2)) for part in (error * normal, error.reshape(*x.shape[:2], -1)))
    shape = (*units, -1, layer.num_channels)
    return Written(weight.reshape(shape).sum(dim=2)), Written(bias.reshape(shape).sum(dim=2))


RULES: dict[type[nn.Module], Rule] = {
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Linear: _linear,
}


def _total(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum over the images of each unit, to (N, U, *shape)."""
    if values.numel() == math.prod(shape):
        return values.reshape(shape)
    return values.reshape(*shape[:2], -1, *shape[2:]).sum(dim=2)


class _Windows(NamedTuple):
    """Where a kernel is applied to a padded image: its size, steps inside and between, the image's size."""

    groups: int
    kernel: tuple[int, int]
    dilation: tuple[int, int]
    stride: tuple[int, int]
    image: tuple[int, int]

    @property
    def positions(self) -> tuple[int, int]:
        sizes = zip(self.image, self.kernel, self.dilation, self.stride, strict=True)
        first, second = ((size - dilation * (kernel - 1) - 1) // step + 1 for size, kernel, dilation, step in sizes)
        return first, second


def _padded(layer: Any, x: Tensor) -> tuple[Tensor, _Windows]:
    """Pad images (R, in, *size), as pictures (R, in, H, W), and say where the kernel is applied to them."""
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        sides = layer._reversed_padding_repeated_twice
    else:
        sides = [side for width in reversed(layer.padding) for side in (width, width)]
    if any(sides):
        x = F.pad(x, sides, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    flat = isinstance(layer, nn.Conv1d)
    x = x.unsqueeze(2) if flat else x
    kernel, dilation, stride = (
        (1, *size) if flat else size for size in (layer.kernel_size, layer.dilation, layer.stride)
    )
    return x, _Windows(layer.groups, kernel, dilation, stride, (x.shape[2], x.shape[3]))


class _KernelGradients(torch.autograd.Function):
    """Gradients (R, out, in / groups * kernel) of a kernel from padded images (R, in, H, W) and errors (R, out, P).

    Patches are never kept, and only for a few images at a time are they there at all.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, errors: Tensor, windows: _Windows) -> Tensor:
        ctx.save_for_backward(x, errors)
        ctx.windows = windows
        step = _step(x, windows)
        pieces = zip(x.split(step), errors.split(step), strict=True)
        return torch.cat([_grouped(e, windows) @ _unfold(some, windows).mT for some, e in pieces]).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, errors = ctx.saved_tensors
        step = _step(x, ctx.windows)
        pieces = zip(x.split(step), errors.split(step), gradient.split(step), strict=True)
        of_images, of_errors = zip(*(_backward(*piece, ctx.windows) for piece in pieces), strict=True)
        return torch.cat(of_images), torch.cat(of_errors), None


def _backward(x: Tensor, errors: Tensor, gradient: Tensor, windows: _Windows) -> tuple[Tensor, Tensor]:
    kernels = _grouped(gradient, windows)
    of_errors = kernels @ _unfold(x, windows)
    patches = (kernels.mT @ _grouped(errors, windows)).flatten(1, 2)
    folded = F.fold(patches, windows.image, windows.kernel, windows.dilation, 0, windows.stride)
    return folded, of_errors.flatten(1, 2)


def _grouped(values: Tensor, windows: _Windows) -> Tensor:
    """(R, out, n) as (R, groups, out / groups, n)."""
    return values.unflatten(1, (windows.groups, -1))


def _step(x: Tensor, windows: _Windows) -> int:
    """How many images' patches are made at once."""
    numbers = x.shape[1] * math.prod(windows.kernel) * math.prod(windows.positions)
    return max(1, CACHE_BYTES // (numbers * x.element_size()))


def _unfold(x: Tensor, windows: _Windows) -> Tensor:
    """The patches (R, groups, in / groups * kernel, positions) of padded images (R, in, H, W): a copy of a view."""
    x = x.contiguous()
    images, channels, height, width = x.shape
    down, across = windows.positions
    shape = (images, channels, *windows.kernel, down, across)
    inside = (windows.dilation[0] * width, windows.dilation[1])
    between = (windows.stride[0] * width, windows.stride[1])
    view = x.as_strided(shape, (channels * height * width, height * width, *inside, *between))
    patches: Tensor = view.reshape(images, windows.groups, -1, down * across)
    return patches
