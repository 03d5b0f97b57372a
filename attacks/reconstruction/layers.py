"""Layers that write down what they get and give, from which the gradients of their parameters follow.

The gradient of a Linear weight is the sum over positions of outer products of output gradient and input; that of a
convolution is the same with the patches that its kernel is applied to. Inputs, patches and outputs stay in autograd's
graph, so that what follows from them can be differentiated with respect to the dummy images.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.reconstruction.factors import Factor, Outer, Written

__all__ = ["RULES", "Entry", "Rule", "taped_forward"]

# A convolution runs as one product with its patches where these are at most so many numbers an image: then they fit in
# the cache, and one step back from patches to image serves both the network and the gradients.
SMALL = 2**15


@dataclass(frozen=True, eq=False)
class Entry:
    """What one layer got and gave.

    Attributes:
        name: of the layer in the network.
        layer: itself.
        inputs: (R, ...), one of R images each; of a convolution the patches (R, groups, in * kernel, positions).
        output: (R, ...).
    """

    name: str
    layer: Any
    inputs: Tensor
    output: Tensor


class Rule(NamedTuple):
    """How a kind of layer runs, and what its parameters' gradients are.

    Attributes:
        run: (layer, its input) -> what is kept of the input, output.
        factors: (layer, what was kept, gradients of the output, (N, U)) -> the gradients of weight and bias of N rows
            of U units; the R images are spread over them in order.
    """

    run: Callable[[Any, Tensor], tuple[Tensor, Tensor]]
    factors: Callable[[Any, Tensor, Tensor, tuple[int, int]], tuple[Factor, Factor]]


def taped_forward(name: str, layer: nn.Module, entries: list[Entry]) -> Callable[[Tensor], Tensor]:
    """Return what a layer does, with a line in ``entries`` for each call."""
    run = RULES[type(layer)].run

    def forward(x: Tensor) -> Tensor:
        kept, output = run(layer, x)
        entries.append(Entry(name, layer, kept, output))
        return output

    return forward


def _run_plain(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, type(layer).forward(layer, x)


def _run_convolution(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    patches, positions = _patches(layer, x)
    if patches[0].numel() > SMALL:
        return patches, type(layer).forward(layer, x)
    weight = layer.weight.flatten(1).unflatten(0, (layer.groups, -1))
    if layer.groups == 1:
        output = torch.bmm(weight.expand(len(x), -1, -1), patches[:, 0])
    else:
        output = (weight @ patches).flatten(1, 2)
    if layer.bias is not None:
        output = output + layer.bias[:, None]
    return patches, output.unflatten(2, positions)


def _linear(layer: nn.Linear, x: Tensor, error: Tensor, units: tuple[int, int]) -> tuple[Factor, Factor]:
    inputs = x.reshape(*units, -1, layer.in_features)
    errors = error.reshape(*units, -1, layer.out_features)
    return Outer(inputs, errors, layer.weight.shape), Written(errors.sum(dim=2))


def _convolution(layer: Any, patches: Tensor, error: Tensor, units: tuple[int, int]) -> tuple[Factor, Factor]:
    groups, positions = patches.shape[1], patches.shape[3]
    errors = error.flatten(2)
    images = len(error) // (units[0] * units[1])
    tall = layer.out_channels // groups
    rows = torch.bmm(errors.reshape(-1, tall, positions), patches.flatten(0, 1).mT)
    rows = rows.reshape(*units, images, *layer.weight.shape)
    biases = errors.sum(dim=2).reshape(*units, images, -1)
    return Written(_total(rows)), Written(_total(biases))


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
    nn.Conv1d: Rule(_run_convolution, _convolution),
    nn.Conv2d: Rule(_run_convolution, _convolution),
    nn.GroupNorm: Rule(_run_plain, _group_norm),
    nn.LayerNorm: Rule(_run_plain, _layer_norm),
    nn.Linear: Rule(_run_plain, _linear),
}


def _total(values: Tensor) -> Tensor:
    """Sum over the images of a unit."""
    return values[:, :, 0] if values.shape[2] == 1 else values.sum(dim=2)


class _Windows(NamedTuple):
    """Where a kernel is applied to a padded image: sizes of kernel, its steps inside, steps between, positions."""

    kernel: tuple[int, int]
    dilation: tuple[int, int]
    stride: tuple[int, int]
    image: tuple[int, int]

    @property
    def positions(self) -> tuple[int, int]:
        sizes = zip(self.image, self.kernel, self.dilation, self.stride, strict=True)
        first, second = ((size - dilation * (kernel - 1) - 1) // step + 1 for size, kernel, dilation, step in sizes)
        return first, second


def _patches(layer: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The patches (R, groups, in / groups * kernel, positions) of images (R, in, *size), and the positions' shape."""
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
    windows = _Windows(kernel, dilation, stride, (x.shape[2], x.shape[3]))
    patches: Tensor = _Unfold.apply(x, windows)
    positions = windows.positions[1:] if flat else windows.positions
    return patches.unflatten(1, (layer.groups, -1)), positions


class _Unfold(torch.autograd.Function):
    """Images (R, C, H, W) to patches (R, C * kernel, positions): a copy of a view, faster than ``F.unfold``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: _Windows) -> Tensor:
        ctx.windows = windows
        return _unfold(x, windows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        folded: Tensor = _Fold.apply(gradient, ctx.windows)
        return folded, None


class _Fold(torch.autograd.Function):
    """The adjoint of ``_Unfold``: sums of overlapping patches."""

    @staticmethod
    def forward(ctx: Any, patches: Tensor, windows: _Windows) -> Tensor:
        ctx.windows = windows
        return F.fold(patches, windows.image, windows.kernel, windows.dilation, 0, windows.stride)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        unfolded: Tensor = _Unfold.apply(gradient, ctx.windows)
        return unfolded, None


def _unfold(x: Tensor, windows: _Windows) -> Tensor:
    x = x.contiguous()
    images, channels, height, width = x.shape
    down, across = windows.positions
    shape = (images, channels, *windows.kernel, down, across)
    inside = (windows.dilation[0] * width, windows.dilation[1])
    between = (windows.stride[0] * width, windows.stride[1])
    view = x.as_strided(shape, (channels * height * width, height * width, *inside, *between))
    return view.reshape(images, -1, down * across)
