"""Gradients of convolution kernels for each image.

A kernel's gradient is a product of the output's gradient with the patches that the kernel is applied to. These patches
are many, so they are made for a few images at a time and never kept.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.gradients.rules import padded_sides

# The work of convolutions' kernel gradients, as operators: patches of a few images at a time, or grouped convolutions.
#
# As operators of their own they are left as they are by torch.compile, which would write out all patches at once.


# Patches overlap: they are copied out for so many bytes a thread at a time, which stay in the cache.
CACHE_BYTES = 2**20
GPU_BYTES = 2**28
# From so many images and channels on, up to so many numbers in an image's patches, grouped convolutions are faster than
# patches on a CPU.
FEW_IMAGES = 4
FEW_CHANNELS = 8
FEWEST_CHANNELS = 3  # the same, for convolutions forward
MOST_PATCHES = 2**18
# From so many numbers on torch divides a sum among threads; patches that are only written and added up are made for so
# many times as many images at once, which makes for longer sums.
MANY_SUMS = 2**15
WRITTEN_STRIPS = 4
ONLY_INPUT = (True, False, False)  # of the gradients that a convolution's backward can make


Pair = tuple[int, int]


class Windows(NamedTuple):
    """Where a kernel is applied to a padded image: its size, steps inside and between, the image's size."""

    kernel: tuple[int, int]
    dilation: tuple[int, int]
    stride: tuple[int, int]
    image: tuple[int, int]
    groups: int

    @property
    def positions(self) -> tuple[int, int]:
        """How often it is applied, down and across."""
        sizes = zip(self.image, self.kernel, self.dilation, self.stride, strict=True)
        first, second = ((size - dilation * (kernel - 1) - 1) // step + 1 for size, kernel, dilation, step in sizes)
        return first, second


def _by_phases(of_output: Tensor, windows: Windows) -> bool:
    """Whether a strided convolution's way back is faster by its phases: on a CPU, where these cover the image."""
    plain = windows.groups == 1 and max(windows.dilation) == 1 and windows.stride[0] == windows.stride[1] > 1
    covered = all(
        size == (places + -(-kernel // stride) - 1) * stride
        for size, places, kernel, stride in zip(
            windows.image, windows.positions, windows.kernel, windows.stride, strict=True
        )
    )
    return plain and covered and of_output.device.type == "cpu" and of_output.dtype == torch.float32


def _back_by_phases(of_output: Tensor, weight: Tensor, windows: Windows) -> Tensor:
    """The same numbers as a transposed convolution with stride s: s^2 convolutions without stride, interleaved."""
    step = windows.stride[0]
    down, across = (-(-kernel // step) for kernel in windows.kernel)
    outputs, inputs, height, width = weight.shape
    whole = F.pad(weight, (0, across * step - width, 0, down * step - height))
    phases = whole.reshape(outputs, inputs, down, step, across, step).permute(1, 3, 5, 0, 2, 4).flip(4, 5)
    kernels = phases.reshape(inputs * step * step, outputs, down, across)
    output = F.conv2d(of_output, kernels, padding=(down - 1, across - 1))
    output = output.unflatten(1, (inputs, step, step))
    images = output.new_empty(len(output), inputs, output.shape[4], step, output.shape[5], step)
    for i, j in itertools.product(range(step), repeat=2):  # faster than pixel_shuffle
        images[:, :, :, i, :, j] = output[:, :, i, j]
    return images.flatten(4, 5).flatten(2, 3)


def _back(
    of_output: Tensor, x: Tensor, weight: Tensor, kernel: Pair, dilation: Pair, stride: Pair, groups: int
) -> Tensor:
    """From a convolution's output (R, out, *positions) to its padded images x."""
    windows = Windows(kernel, dilation, stride, (x.shape[2], x.shape[3]), groups)
    if _by_phases(of_output, windows):
        return _back_by_phases(of_output, weight, windows)
    return torch.ops.aten.convolution_backward(
        of_output, x, weight, None, stride, (0, 0), dilation, False, (0, 0), groups, ONLY_INPUT
    )[0]


_LIBRARY = torch.library.Library("fedpriv", "FRAGMENT")
_WHERE = "int[] kernel, int[] dilation, int[] stride"
_LIBRARY.define(f"kernel_gradients(Tensor x, Tensor errors, {_WHERE}) -> Tensor")
_SHARED = "Tensor weight, Tensor? of_output"
_LIBRARY.define(f"kernels_to_images(Tensor kernels, Tensor x, Tensor errors, {_WHERE}, {_SHARED}) -> Tensor")
_LIBRARY.define(f"back(Tensor of_output, Tensor x, Tensor weight, {_WHERE}, int groups) -> Tensor")
_LIBRARY.define("zeros_around(Tensor x, int[] sides) -> Tensor")
_LIBRARY.define(f"images_through_kernels(Tensor kernels, Tensor x, Tensor errors, {_WHERE}) -> Tensor")


def _kernel_gradients(x: Tensor, errors: Tensor, kernel: Pair, dilation: Pair, stride: Pair) -> Tensor:
    windows = Windows(kernel, dilation, stride, (x.shape[2], x.shape[3]), 1)
    rows = errors.new_empty(*errors.shape[:2], x.shape[1] * math.prod(kernel))
    strips = _strips(x, windows)
    buffer = _buffer(x[strips[0]], windows)
    for strip in strips:
        torch.bmm(errors[strip], _patches(x[strip], windows, buffer), out=rows[strip])
    return _channels_first(rows, x.shape[1])


def _kernels_to_images(
    kernels: Tensor,
    x: Tensor,
    errors: Tensor,
    kernel: Pair,
    dilation: Pair,
    stride: Pair,
    weight: Tensor,
    of_output: Tensor | None,
) -> Tensor:
    """Each image's errors (R, out, P) through its own kernel (R, out, in * kernel), back to padded images."""
    windows = Windows(kernel, dilation, stride, (x.shape[2], x.shape[3]), 1)
    groups = len(weight) // kernels.shape[1]
    kernels, errors = kernels.contiguous(), errors.contiguous()
    if _grouped_is_faster(x):
        own = _own_kernels_to_images(kernels, x, errors, windows)
        if of_output is None:
            return own
        whole = own.reshape(len(of_output), -1, *windows.image)
        return _back(of_output, whole, weight, kernel, dilation, stride, groups).add_(whole).reshape(x.shape)
    if of_output is None:
        shared, weights = errors[:, :0], kernels[:, :0]
    else:
        shared = of_output.reshape(len(x), -1, errors.shape[2])
        weights = weight.reshape(1, groups, *kernels.shape[1:]).expand(len(of_output), -1, -1, -1).flatten(0, 1)
    images = x.new_empty(x.shape)
    for strip in _strips(x, windows, WRITTEN_STRIPS):
        through = torch.cat([weights[strip], kernels[strip]], dim=1)
        felt = torch.cat([shared[strip], errors[strip]], dim=1)
        images[strip] = _folded(torch.bmm(through.mT, felt), windows)
    return images


def _folded(patches: Tensor, windows: Windows) -> Tensor:
    """Add up patches (R, in * kernel, positions) in images (R, in, H, W); torch's ``fold`` takes one thread alone."""
    (down, across), (tall, wide) = windows.positions, windows.kernel
    channels = patches.shape[1] // (tall * wide)
    if patches.device.type != "cpu" or len(patches) * channels * down * across < MANY_SUMS:
        return F.fold(patches, windows.image, windows.kernel, windows.dilation, 0, windows.stride)
    each = patches.view(-1, channels, tall, wide, down, across)
    images = patches.new_zeros(len(patches), channels, *windows.image)
    for i, j in itertools.product(range(tall), range(wide)):
        top, left = i * windows.dilation[0], j * windows.dilation[1]
        step, move = windows.stride
        images[:, :, top : top + step * down : step, left : left + move * across : move] += each[:, :, i, j]
    return images


def _own_kernels_to_images(kernels: Tensor, x: Tensor, errors: Tensor, windows: Windows) -> Tensor:
    """By one convolution with a group for each image."""
    groups, weights = _as_groups(kernels, x, windows)
    felt = errors.reshape(1, -1, *windows.positions)
    images: Tensor = torch.ops.aten.convolution_backward(
        felt, groups, weights, None, windows.stride, (0, 0), windows.dilation, False, (0, 0), len(x), ONLY_INPUT
    )[0]
    return images.reshape(x.shape)


def _images_through_kernels(
    kernels: Tensor, x: Tensor, errors: Tensor, kernel: Pair, dilation: Pair, stride: Pair
) -> Tensor:
    """Each padded image (R, in, H, W) through its own kernel (R, out, in * kernel): (R, out, P), as the errors are."""
    windows = Windows(kernel, dilation, stride, (x.shape[2], x.shape[3]), 1)
    kernels = kernels.contiguous()
    if _grouped_is_faster(x, FEWEST_CHANNELS) and kernels.shape[2] * errors.shape[2] <= MOST_PATCHES:
        groups, weights = _as_groups(kernels, x, windows)
        output = F.conv2d(groups, weights, None, windows.stride, 0, windows.dilation, groups=len(x))
        return output.reshape(errors.shape)
    kernels = kernels.unflatten(2, (x.shape[1], -1)).transpose(2, 3).flatten(2)
    through = errors.new_empty(errors.shape)
    strips = _strips(x, windows)
    buffer = _buffer(x[strips[0]], windows)
    for strip in strips:
        torch.bmm(kernels[strip], _patches(x[strip], windows, buffer).mT, out=through[strip])
    return through


def _grouped_is_faster(x: Tensor, channels: int = FEW_CHANNELS) -> bool:
    """Whether a convolution with a group for each image beats patches: measured on a CPU, where it has fast code."""
    usable = x.device.type == "cpu" and x.dtype == torch.float32
    return usable and len(x) >= FEW_IMAGES and x.shape[1] >= channels


def _as_groups(kernels: Tensor, x: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """All images as one (1, R * in, H, W), and their kernels (R * out, in, *kernel)."""
    return x.reshape(1, -1, *windows.image), kernels.reshape(-1, x.shape[1], *windows.kernel)


def _strips(x: Tensor, windows: Windows, times: int = 1) -> list[slice]:
    """How many images' patches are made at once."""
    numbers = x.shape[1] * math.prod(windows.kernel) * math.prod(windows.positions)
    room = times * CACHE_BYTES * torch.get_num_threads() if x.device.type == "cpu" else GPU_BYTES
    step = max(1, room // (numbers * x.element_size()))
    return [slice(start, start + step) for start in range(0, len(x), step)]


def _buffer(x: Tensor, windows: Windows) -> Tensor:
    """Room for the patches of so many images."""
    return x.new_empty(len(x), *windows.positions, *windows.kernel, x.shape[1])


def _patches(x: Tensor, windows: Windows, buffer: Tensor) -> Tensor:
    """Patches (R, positions, kernel * in) of padded images (R, in, H, W), channels last, in a shared buffer."""
    x = x.permute(0, 2, 3, 1).contiguous()
    images, height, width, channels = x.shape
    positions, kernel = windows.positions, windows.kernel
    across, down = channels, channels * width
    between = (windows.stride[0] * down, windows.stride[1] * across)
    inside = (windows.dilation[0] * down, windows.dilation[1] * across)
    view = x.as_strided((images, *positions, *kernel, channels), (height * down, *between, *inside, 1))
    return buffer[:images].copy_(view).reshape(images, math.prod(positions), -1)


def _channels_first(rows: Tensor, channels: int) -> Tensor:
    """(R, out, kernel * in) to (R, out, in * kernel), laid out anew."""
    return rows.unflatten(2, (-1, channels)).transpose(2, 3).contiguous().flatten(2)


def _zeros_around(x: Tensor, sides: list[int]) -> Tensor:
    return F.pad(x, sides)


def _kernel_gradients_shape(x: Tensor, errors: Tensor, kernel: Pair, dilation: Pair, stride: Pair) -> Tensor:
    return errors.new_empty(*errors.shape[:2], x.shape[1] * math.prod(kernel))


def _like_second(first: Tensor, second: Tensor, *others: object) -> Tensor:
    return second.new_empty(second.shape)


def _like_third(first: Tensor, second: Tensor, third: Tensor, *others: object) -> Tensor:
    return third.new_empty(third.shape)


for _name, _run, _shape in (
    ("kernel_gradients", _kernel_gradients, _kernel_gradients_shape),
    ("kernels_to_images", _kernels_to_images, _like_second),
    ("images_through_kernels", _images_through_kernels, _like_third),
    ("back", _back, _like_second),
    ("zeros_around", _zeros_around, _zeros_around),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fedpriv::{_name}", _shape, lib=_LIBRARY)


# Up to so many multiplications a convolution of one image, with its derivatives, is faster as a product with patches.
FEW_PRODUCTS = 2**19


@dataclass(frozen=True, eq=False)
class Kept:
    """What a convolution keeps for its kernel's gradients."""

    tokens: tuple[Tensor, Tensor]  # of the kernels and of the errors, see _Convolution
    images: Tensor  # (R * groups, in / groups, H, W), padded; the groups of channels are so many images by themselves
    windows: Windows  # where the kernel is applied to them
    padded: Tensor  # (R, in, H, W), the images in autograd's graph


def run_convolution(layer: Any, x: Tensor) -> tuple[Kept, Tensor]:
    """Run a Conv1d or Conv2d on images (R, in, *size)."""
    flat = isinstance(layer, nn.Conv1d)
    x, windows = _padded(layer, x)
    weight = layer.weight.unsqueeze(2) if flat else layer.weight
    output, *tokens = _Convolution.apply(x, weight, layer.bias, windows)
    images = x.detach().reshape(-1, x.shape[1] // layer.groups, *windows.image)
    return Kept((tokens[0], tokens[1]), images, windows, x), output.squeeze(2) if flat else output


def by_patches(layer: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    """Return a convolution of one group, as a product with patches where that is little work."""
    sides: Any = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)

    def forward(x: Tensor) -> Tensor:
        positions = [
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, dilation, padding, stride in zip(x.shape[2:], *sides, strict=True)
        ]
        if x.device.type != "cpu" or len(x) * layer.weight.numel() * math.prod(positions) > FEW_PRODUCTS:
            return nn.Conv2d.forward(layer, x)
        weight, patches = layer.weight.flatten(1), F.unfold(x, *sides)
        bias = layer.bias if layer.bias is None else layer.bias[:, None]
        if len(x) == 1:
            output = weight @ patches[0] if bias is None else torch.addmm(bias, weight, patches[0])
        else:
            output = weight @ patches if bias is None else weight @ patches + bias
        return output.view(len(x), -1, *positions)

    return forward


def patches(kept: Kept) -> Tensor:
    """Return what a kernel of one group is applied to, written out: (R, P, in * kernel)."""
    windows = kept.windows
    unfolded: Tensor = F.unfold(kept.padded, windows.kernel, windows.dilation, 0, windows.stride)
    return unfolded.mT


def kernel_gradients(kept: Kept, errors: Tensor) -> Tensor:
    """Return each image's gradient of the kernel (R * groups, out / groups, in / groups * kernel)."""
    images = kept.images.to(errors.dtype)
    felt = errors.reshape(len(images), -1, math.prod(kept.windows.positions))
    return _KernelGradients.apply(*kept.tokens, images, felt, kept.windows)


def _padded(layer: Any, x: Tensor) -> tuple[Tensor, Windows]:
    """Pad images (R, in, *size), as pictures (R, in, H, W), and say where the kernel is applied to them."""
    if any(sides := padded_sides(layer)):
        x = _Padding.apply(x, sides) if layer.padding_mode == "zeros" else F.pad(x, sides, mode=layer.padding_mode)
    flat = isinstance(layer, nn.Conv1d)
    x = x.unsqueeze(2) if flat else x
    kernel, dilation, stride = (
        (1, *size) if flat else size for size in (layer.kernel_size, layer.dilation, layer.stride)
    )
    return x, Windows(kernel, dilation, stride, (x.shape[2], x.shape[3]), layer.groups)


class _Padding(torch.autograd.Function):
    """Zeros around images, given as for torch's ``pad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sides: list[int]) -> Tensor:
        ctx.sides = sides
        return torch.ops.fedpriv.zeros_around(x, sides)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Cropping.apply(gradient, ctx.sides), None


class _Cropping(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sides: list[int]) -> Tensor:
        ctx.sides = sides
        return F.pad(x, [-side for side in sides])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Padding.apply(gradient, ctx.sides), None


class _Convolution(torch.autograd.Function):
    """A convolution of padded images, and two tokens for its kernel's gradients.

    Both the output's derivatives and those of the kernel's gradients go back to the image by a convolution; with
    patches one way back for both costs half. So :class:`_KernelGradients` does not go back to the image itself: what
    it would need, its kernels and errors, it hands back as the derivatives of the tokens, and the way back is made
    here.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.windows = windows
        output = F.conv2d(x, weight, bias, windows.stride, 0, windows.dilation, windows.groups)
        each = (len(x) * windows.groups, len(weight) // windows.groups)
        token = weight.new_empty(1)
        of_kernels = token.expand(*each, weight[0].numel())
        return output, of_kernels, token.expand(*each, math.prod(windows.positions))

    @staticmethod
    def backward(
        ctx: Any, of_output: Tensor | None, kernels: Tensor | None, errors: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        windows = ctx.windows
        if kernels is None or errors is None:
            back = None if of_output is None else _Back.apply(of_output.to(x.dtype), x, weight.to(x.dtype), windows)
            return back, None, None, None
        images = x.to(kernels.dtype).reshape(len(kernels), -1, *windows.image)
        if of_output is not None:
            of_output = of_output.to(kernels.dtype)
        back = torch.ops.fedpriv.kernels_to_images(kernels, images, errors, *windows[:3], weight, of_output)
        return back.reshape(x.shape).to(x.dtype), None, None, None


class _Back(torch.autograd.Function):
    """From a convolution's output back to its padded images; differentiated, it is the convolution."""

    @staticmethod
    def forward(ctx: Any, of_output: Tensor, x: Tensor, weight: Tensor, windows: Windows) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.windows = windows
        return torch.ops.fedpriv.back(
            of_output, x, weight, windows.kernel, windows.dilation, windows.stride, windows.groups
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        windows = ctx.windows
        felt = F.conv2d(gradient, weight, None, windows.stride, 0, windows.dilation, windows.groups)
        return felt, None, None, None


class _KernelGradients(torch.autograd.Function):
    """Each image's gradient of a kernel (R, out, in * kernel), from padded images (R, in, H, W), errors (R, out, P)."""

    @staticmethod
    def forward(ctx: Any, of_kernels: Tensor, of_errors: Tensor, x: Tensor, errors: Tensor, windows: Windows) -> Tensor:
        ctx.save_for_backward(x, errors)
        ctx.windows = windows
        return torch.ops.fedpriv.kernel_gradients(x, errors, *windows[:3])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, Tensor, None]:
        x, errors = ctx.saved_tensors
        felt = torch.ops.fedpriv.images_through_kernels(gradient, x, errors, *ctx.windows[:3])
        return gradient, errors, None, felt, None
