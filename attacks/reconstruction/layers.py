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
GPU_BYTES = 2**28
# From so many images and channels on, up to so many numbers in an image's patches, grouped convolutions are faster on a
# CPU.
FEW_IMAGES = 4
FEW_CHANNELS = 8
MOST_PATCHES = 2**18
ONLY_INPUT = (True, False, False)  # of the gradients that a convolution's backward can make


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
    # The groups of channels are so many images by themselves.
    images = x.reshape(-1, x.shape[1] // layer.groups, *x.shape[2:])
    errors = error.reshape(len(images), layer.out_channels // layer.groups, -1)
    rows = _KernelGradients.apply(images, errors, windows)
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
    """Sum over the images of each unit, to that shape (N, U, ...)."""
    if values.numel() == math.prod(shape):
        return values.reshape(shape)
    return values.reshape(*shape[:2], -1, *shape[2:]).sum(dim=2)


class _Windows(NamedTuple):
    """Where a kernel is applied to a padded image: its size, steps inside and between, the image's size."""

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
    return x, _Windows(kernel, dilation, stride, (x.shape[2], x.shape[3]))


class _KernelGradients(torch.autograd.Function):
    """Each image's gradient of a kernel (R, out, in * kernel), from padded images (R, in, H, W), errors (R, out, P).

    Patches are never kept, and only for a few images at a time are they there at all.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, errors: Tensor, windows: _Windows) -> Tensor:
        ctx.save_for_backward(x, errors)
        ctx.windows = windows
        rows: Tensor = torch.ops.fedpriv.kernel_gradients(x, errors, *windows[:3])
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, errors = ctx.saved_tensors
        of_images, of_errors = torch.ops.fedpriv.kernel_gradients_backward(gradient, x, errors, *ctx.windows[:3])
        return of_images, of_errors, None


# As operators of their own they are left as they are by torch.compile, which would write out all patches at once.
_LIBRARY = torch.library.Library("fedpriv", "FRAGMENT")
_LIBRARY.define("kernel_gradients(Tensor x, Tensor errors, int[] kernel, int[] dilation, int[] stride) -> Tensor")
_LIBRARY.define(
    "kernel_gradients_backward(Tensor gradient, Tensor x, Tensor errors, int[] kernel, int[] dilation, int[] stride)"
    " -> (Tensor, Tensor)"
)

Pair = tuple[int, int]


def _kernel_gradients(x: Tensor, errors: Tensor, kernel: Pair, dilation: Pair, stride: Pair) -> Tensor:
    windows = _Windows(kernel, dilation, stride, (x.shape[2], x.shape[3]))
    rows = errors.new_empty(*errors.shape[:2], x.shape[1] * math.prod(kernel))
    for some in _strips(x, windows):
        torch.bmm(errors[some], _patches(x[some], windows), out=rows[some])
    return _channels_first(rows, x.shape[1])


def _kernel_gradients_backward(
    gradient: Tensor, x: Tensor, errors: Tensor, kernel: Pair, dilation: Pair, stride: Pair
) -> tuple[Tensor, Tensor]:
    windows = _Windows(kernel, dilation, stride, (x.shape[2], x.shape[3]))
    gradient, errors = gradient.contiguous(), errors.contiguous()
    return _to_images(gradient, x, errors, windows), _to_errors(gradient, x, errors, windows)


def _kernel_gradients_shape(x: Tensor, errors: Tensor, kernel: Pair, dilation: Pair, stride: Pair) -> Tensor:
    return errors.new_empty(*errors.shape[:2], x.shape[1] * math.prod(kernel))


def _kernel_gradients_backward_shape(
    gradient: Tensor, x: Tensor, errors: Tensor, kernel: Pair, dilation: Pair, stride: Pair
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), errors.new_empty(errors.shape)


_LIBRARY.impl("kernel_gradients", _kernel_gradients, "CompositeExplicitAutograd")
_LIBRARY.impl("kernel_gradients_backward", _kernel_gradients_backward, "CompositeExplicitAutograd")
torch.library.register_fake("fedpriv::kernel_gradients", _kernel_gradients_shape, lib=_LIBRARY)
torch.library.register_fake("fedpriv::kernel_gradients_backward", _kernel_gradients_backward_shape, lib=_LIBRARY)


def _to_images(kernels: Tensor, x: Tensor, errors: Tensor, windows: _Windows) -> Tensor:
    """Each image's errors through its own kernel (R, out, in * kernel), back to padded images (R, in, H, W)."""
    if _grouped_is_faster(x):
        groups, weights = _as_groups(kernels, x, windows)
        felt = errors.reshape(1, -1, *windows.positions)
        found: Tensor = torch.ops.aten.convolution_backward(
            felt, groups, weights, None, windows.stride, (0, 0), windows.dilation, False, (0, 0), len(x), ONLY_INPUT
        )[0]
        return found.reshape(x.shape)
    images = x.new_empty(x.shape)
    for some in _strips(x, windows):
        patches = torch.bmm(kernels[some].mT, errors[some])
        images[some] = F.fold(patches, windows.image, windows.kernel, windows.dilation, 0, windows.stride)
    return images


def _to_errors(kernels: Tensor, x: Tensor, errors: Tensor, windows: _Windows) -> Tensor:
    """Each padded image (R, in, H, W) through its own kernel (R, out, in * kernel): (R, out, P)."""
    if _grouped_is_faster(x) and kernels.shape[2] * errors.shape[2] <= MOST_PATCHES:
        groups, weights = _as_groups(kernels, x, windows)
        found = F.conv2d(groups, weights, None, windows.stride, 0, windows.dilation, groups=len(x))
        return found.view_as(errors)
    kernels = kernels.unflatten(2, (x.shape[1], -1)).transpose(2, 3).flatten(2)
    through = torch.empty_like(errors)
    for some in _strips(x, windows):
        torch.bmm(kernels[some], _patches(x[some], windows).mT, out=through[some])
    return through


def _grouped_is_faster(x: Tensor) -> bool:
    """Whether a convolution with a group for each image beats patches: measured on a CPU, where it has fast code."""
    usable = x.device.type == "cpu" and x.dtype == torch.float32
    return usable and len(x) >= FEW_IMAGES and x.shape[1] >= FEW_CHANNELS


def _as_groups(kernels: Tensor, x: Tensor, windows: _Windows) -> tuple[Tensor, Tensor]:
    """All images as one (1, R * in, H, W), and their kernels (R * out, in, *kernel)."""
    return x.reshape(1, -1, *windows.image), kernels.reshape(-1, x.shape[1], *windows.kernel)


def _strips(x: Tensor, windows: _Windows) -> list[slice]:
    """How many images' patches are made at once."""
    numbers = x.shape[1] * math.prod(windows.kernel) * math.prod(windows.positions)
    step = max(1, (CACHE_BYTES if x.device.type == "cpu" else GPU_BYTES) // (numbers * x.element_size()))
    return [slice(start, start + step) for start in range(0, len(x), step)]


def _patches(x: Tensor, windows: _Windows) -> Tensor:
    """The patches (R, positions, kernel * in) of padded images (R, in, H, W): channels last, so that runs are long."""
    x = x.permute(0, 2, 3, 1).contiguous()
    images, height, width, channels = x.shape
    positions, kernel = windows.positions, windows.kernel
    across, down = channels, channels * width
    between = (windows.stride[0] * down, windows.stride[1] * across)
    inside = (windows.dilation[0] * down, windows.dilation[1] * across)
    view = x.as_strided((images, *positions, *kernel, channels), (height * down, *between, *inside, 1))
    patches: Tensor = view.reshape(images, math.prod(positions), -1)
    return patches


def _channels_first(rows: Tensor, channels: int) -> Tensor:
    """(R, out, kernel * in) to (R, out, in * kernel), laid out anew."""
    ordered: Tensor = rows.unflatten(2, (-1, channels)).transpose(2, 3).contiguous().flatten(2)
    return ordered
