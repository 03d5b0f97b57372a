"""Convolutions whose kernels' gradients are wanted for each image.

A kernel's gradient is a product of the output's gradient with the patches that the kernel is applied to. These patches
are many, so they are made for a few images at a time and never kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.convolution_operators import Windows
from fedpriv.gradients.patches import padded_sides

__all__ = ["Kept", "by_patches", "kernel_gradients", "run_convolution"]

# Up to so many multiplications a convolution of one image, with its derivatives, is faster as a product with patches.
FEW_PRODUCTS = 2**19


@dataclass(frozen=True, eq=False)
class Kept:
    """What a convolution keeps for its kernel's gradients.

    Attributes:
        tokens: of the kernels and of the errors, see :class:`_Convolution`.
        images: (R * groups, in / groups, H, W), padded; the groups of channels are so many images by themselves.
        windows: where the kernel is applied to them.
    """

    tokens: tuple[Tensor, Tensor]
    images: Tensor
    windows: Windows


def run_convolution(layer: Any, x: Tensor) -> tuple[Kept, Tensor]:
    """Run a Conv1d or Conv2d on images (R, in, *size)."""
    flat = isinstance(layer, nn.Conv1d)
    x, windows = _padded(layer, x)
    weight = layer.weight.unsqueeze(2) if flat else layer.weight
    output, *tokens = _Convolution.apply(x, weight, layer.bias, windows)
    images = x.detach().reshape(-1, x.shape[1] // layer.groups, *windows.image)
    return Kept((tokens[0], tokens[1]), images, windows), output.squeeze(2) if flat else output


def by_patches(layer: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    """Return what a convolution of one group, padded with zeros, does with images (B, in, H, W).

    Where that is little work on a CPU it is a product with patches: its derivatives, the second ones too, take less
    time than those of a convolution.
    """
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


def kernel_gradients(kept: Kept, errors: Tensor) -> Tensor:
    """Return each image's gradient of the kernel (R * groups, out / groups, in / groups * kernel).

    Args:
        kept: of the convolution.
        errors: gradients of its output, (R, out, *positions).
    """
    images = kept.images.to(errors.dtype)
    felt = errors.reshape(len(images), -1, math.prod(kept.windows.positions))
    gradients: Tensor = _KernelGradients.apply(*kept.tokens, images, felt, kept.windows)
    return gradients


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
        padded: Tensor = torch.ops.fedpriv.zeros_around(x, sides)
        return padded

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
        back: Tensor = torch.ops.fedpriv.back(
            of_output, x, weight, windows.kernel, windows.dilation, windows.stride, windows.groups
        )
        return back

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
        rows: Tensor = torch.ops.fedpriv.kernel_gradients(x, errors, *windows[:3])
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, Tensor, None]:
        x, errors = ctx.saved_tensors
        felt = torch.ops.fedpriv.images_through_kernels(gradient, x, errors, *ctx.windows[:3])
        return gradient, errors, None, felt, None
