"""The layers with parameters of a stack of models: each model's examples with that model's own numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.gradients.operator import Vector
from fedpriv.gradients.patches import padded, patches

Convolution = nn.Conv1d | nn.Conv2d
Layer = Callable[[Any, Tensor, Vector], Tensor]
"""(layer, input (M B, ...), its parameters (M, *shape) by their names in it) -> output (M B, ...)."""


def _linear(layer: nn.Linear, x: Tensor, own: Vector) -> Tensor:
    weight = own["weight"]
    rows = x.reshape(len(weight), -1, layer.in_features)
    bias = own.get("bias")
    value = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
    return value.view(*x.shape[:-1], layer.out_features)


def _convolution(layer: Convolution, x: Tensor, own: Vector) -> Tensor:
    """Many convolutions: as groups of one on a GPU; one after the other on a CPU, where groups take twice as long.

    Of one channel, as grey images have, a CPU takes twice as long for the gradient of the weights as for a product with
    the patches.
    """
    if x.device.type == "cpu" and layer.in_channels == 1 and len(own["weight"]) > 1 and not x.requires_grad:
        return of_patches(layer, x, own)
    x = x if layer.padding_mode == "zeros" else padded(layer, x)
    return one_by_one(layer, x, own) if x.device.type == "cpu" else as_groups(layer, x, own)


def one_by_one(layer: Convolution, x: Tensor, own: Vector) -> Tensor:
    """Apply each model's convolution to its own examples, (M B, ...), padded where the layer does not pad with 0."""
    weight, bias = own["weight"], own.get("bias")
    biases = [None] * len(weight) if bias is None else bias
    parts = zip(x.chunk(len(weight)), weight, biases, strict=True)
    values = [_convolved(layer, layer.groups, *one) for one in parts]
    return values[0] if len(values) == 1 else torch.cat(values)


def of_patches(layer: Convolution, x: Tensor, own: Vector) -> Tensor:
    """As :func:`one_by_one`, of one channel that takes no gradient, by one product of weights and patches."""
    weight, bias = own["weight"].flatten(2), own.get("bias")
    found = patches(layer, padded(layer, x).contiguous())
    positions = found.shape[2 + len(layer.kernel_size) :]
    values = weight[:, None] @ found.reshape(len(weight), -1, weight.shape[2], positions.numel())
    values = values if bias is None else values + bias[:, None, :, None]
    return values.reshape(len(x), layer.out_channels, *positions)


def as_groups(layer: Convolution, x: Tensor, own: Vector) -> Tensor:
    """As :func:`one_by_one`, by one convolution whose groups of channels are the models."""
    weight, bias = own["weight"], own.get("bias")
    models = len(weight)
    together = x.unflatten(0, (models, -1)).transpose(0, 1).flatten(1, 2)
    flat = None if bias is None else bias.flatten()
    values = _convolved(layer, models * layer.groups, together, weight.flatten(0, 1), flat)
    apart: Tensor = values.unflatten(1, (models, -1)).transpose(0, 1)
    return apart.flatten(0, 1)


def _convolved(layer: Convolution, groups: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    run: Callable[..., Tensor] = functional.conv1d if isinstance(layer, nn.Conv1d) else functional.conv2d
    padding = layer.padding if layer.padding_mode == "zeros" else 0
    return run(x, weight, bias, stride=layer.stride, padding=padding, dilation=layer.dilation, groups=groups)


def _group_norm(layer: nn.GroupNorm, x: Tensor, own: Vector) -> Tensor:
    normal = functional.group_norm(x, layer.num_groups, eps=layer.eps)
    return _scaled(normal, own, (layer.num_channels, *(1 for _ in x.shape[2:])))


def _layer_norm(layer: nn.LayerNorm, x: Tensor, own: Vector) -> Tensor:
    return _scaled(functional.layer_norm(x, layer.normalized_shape, eps=layer.eps), own, layer.normalized_shape)


def _scaled(x: Tensor, own: Vector, shape: Sequence[int]) -> Tensor:
    """Multiply each model's examples by its weight and add its bias, laid along the last axes."""
    weight = own["weight"]
    between = (1 for _ in range(x.ndim - len(shape)))
    wide = (len(weight), *between, *shape)
    value: Tensor = x.unflatten(0, (len(weight), -1)) * weight.view(wide)
    return (value + own["bias"].view(wide) if "bias" in own else value).flatten(0, 1)


STACKED_LAYERS: Mapping[type[nn.Module], Layer] = {
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Linear: _linear,
}
