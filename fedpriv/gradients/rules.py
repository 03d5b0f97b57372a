"""How per-example gradients follow from a layer's input and the gradient of its output: one rule a kind of layer."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.gradients.factors import (
    CACHE_BYTES,
    Dyads,
    Factor,
    Inputs,
    Lookup,
    Memory,
    Outer,
    Rows,
    Stacked,
    Tied,
    rows_are_cheaper,
    slices,
)
from fedpriv.gradients.norms import lengths
from fedpriv.gradients.patches import Patches, most_uses, padded, patches
from fedpriv.gradients.rounding import without_extremes

Rule = Callable[[Any, Tensor, Tensor, Memory], dict[str, Factor]]
"""(layer, input (B, ...), gradient of the output (B, ...), memory) -> the layer's own name of a parameter -> factor."""


def has_rule(layer: nn.Module) -> bool:
    """Tell whether a layer is of a kind with a rule and nothing is hung on it that its kind does not have."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if rule_of(layer) is None or any(hooks) or list(layer.children()) or "forward" in vars(layer):
        return False
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        return False
    return set(layer._parameters) <= {"weight", "bias"}


def rule_of(layer: nn.Module) -> Rule | None:
    """Return the rule of a layer's kind; ``None``: there is none."""
    kind = type(layer)
    return RULES.get(kind) or NAMED_RULES.get(f"{kind.__module__}.{kind.__qualname__}")


def is_ambiguous(layer: nn.Module, x: Tensor, examples: int) -> bool:
    """Tell whether the first axis of a layer's input cannot be that of the examples."""
    if x.ndim < 1 or len(x) != examples or not x.numel():
        return True
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return x.ndim != layer.weight.ndim
    own = {nn.Embedding: 0, nn.GroupNorm: x.ndim - 1}
    trailing = len(layer.normalized_shape) if isinstance(layer, nn.LayerNorm | nn.RMSNorm) else own.get(type(layer), 1)
    return x.ndim <= trailing


def _linear(layer: nn.Linear, x: Tensor, error: Tensor, memory: Memory) -> dict[str, Factor]:
    x = x.reshape(len(x), -1, layer.in_features)
    error = error.reshape(len(error), -1, layer.out_features)
    if error.shape[1] == 1:
        bias = Rows(error[:, 0], memory.scratch, side=True)
        return {"weight": Dyads(x[:, 0], bias, memory.scratch), "bias": bias}
    return {"weight": of_products(x, error, memory), "bias": summed_positions(error, 1, memory)}


def _turned_linear(layer: Any, x: Tensor, error: Tensor, memory: Memory) -> dict[str, Factor]:
    """A Linear layer whose weight lies the other way round, (in, out)."""
    x, error = (side.reshape(len(side), -1, side.shape[-1]) for side in (x, error))
    return {"weight": of_products(error, x, memory), "bias": summed_positions(error, 1, memory)}


def of_products(x: Tensor, error: Tensor, memory: Memory) -> Factor:
    """The gradients of a weight matrix that is applied at several positions: x (B, T, in), error (B, T, out)."""
    if _write_out(x.shape, error, memory):
        return Rows(torch.bmm(error.mT, x), memory.scratch, _sizes(error) * _sizes(x))
    return outer(x, error, memory)


def outer(x: Tensor, error: Tensor, memory: Memory) -> Outer:
    """The same, not multiplied out."""
    shape = torch.Size((error.shape[2], x.shape[2]))
    return Outer(x, error, shape, memory.scratch, _sizes(error) * _sizes(x))


def tied_weight(
    table: nn.Embedding, indices: Tensor, looked_up: Tensor, given: tuple[Tensor, Tensor], memory: Memory
) -> Factor:
    """The gradients of a weight that an embedding and a Linear layer share.

    Args:
        indices: what it looked up, (B, ...).
        looked_up: the gradients of its outputs, (B, ..., width).
        given: the Linear layer's input (B, ..., width) and the gradients of its outputs (B, ..., words).
    """
    first = _embedding(table, indices, looked_up, memory)["weight"]
    x, error = (side.reshape(len(side), -1, side.shape[-1]) for side in given)
    if not isinstance(first, Lookup) or _write_out(x.shape, error, memory):
        rows = torch.bmm(error.mT, x).add_(first.rows(0, len(x)))
        return Rows(rows, memory.scratch, first.magnitudes() + _sizes(error) * _sizes(x))
    sizes = (*table.weight.shape, x.shape[1], indices[0].numel())
    return Tied(first, outer(x, error, memory), sizes, len(x), memory.scratch)


def _convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor, error: Tensor, memory: Memory) -> dict[str, Factor]:
    """A convolution is its weight matrix applied to each patch; per group with groups."""
    error = error.flatten(2)
    errors = _group_sizes(error, layer.groups)
    magnitudes = math.sqrt(most_uses(layer)) * errors * _group_sizes(x, layer.groups)
    bias = Rows(error.sum(dim=2), memory.scratch, math.sqrt(error.shape[2]) * _together(errors))
    if _write_out((len(x), error.shape[2], layer.weight[0].numel()), error, memory, layer.groups):
        rows = _written_convolution(layer, x, error)
        return {"weight": Rows(rows, memory.scratch, _together(magnitudes)), "bias": bias}
    parts = []
    for group, group_error in enumerate(error.chunk(layer.groups, dim=1)):
        columns: Inputs = Patches(layer, x, error.shape[2], group)
        if error.shape[2] == 1 or memory.reserve(columns.shape.numel(), x):
            columns = columns[:]
        shape = layer.weight[: group_error.shape[1]].shape
        parts.append(Outer(columns, group_error.mT, shape, memory.scratch, magnitudes[:, group]))
    weight = parts[0] if len(parts) == 1 else Stacked(parts, len(x), layer.weight.shape, memory.scratch)
    return {"weight": weight, "bias": bias}


def _written_convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor, error: Tensor) -> Tensor:
    """The gradients of a convolution's weight, (B, *shape), from error (B, out, T); channels last in memory.

    In that order the numbers of a patch lie side by side in long runs, and are copied out twice as fast.
    """
    if layer.groups > 1:
        return _written_groups(layer, x, error)
    kernel, positions = layer.kernel_size, error.shape[2]
    rows = error.new_empty(len(x), layer.out_channels, *kernel, layer.in_channels)
    axes = range(2, 2 + 2 * len(kernel))
    for chunk in slices(0, len(x), max(1, CACHE_BYTES // (rows[0, 0].nbytes * positions))):
        last = padded(layer, x[chunk]).movedim(1, -1).contiguous().movedim(-1, 1)
        columns = patches(layer, last).permute(0, *axes[len(kernel) :], *axes[: len(kernel)], 1)
        torch.bmm(error[chunk], columns.reshape(-1, positions, rows[0, 0].numel()), out=rows[chunk].flatten(2))
    return rows.movedim(-1, 2)


def _written_groups(layer: nn.Conv1d | nn.Conv2d, x: Tensor, error: Tensor) -> Tensor:
    """The same for groups, whose channels are too few for long runs; in the usual order."""
    groups, wide, positions = layer.groups, layer.weight[0].numel(), error.shape[2]
    tall = layer.out_channels // groups
    step = max(1, CACHE_BYTES // (groups * wide * positions * x.element_size()))
    rows = error.new_empty(len(x), *layer.weight.shape)
    for chunk in slices(0, len(x), step):
        columns = patches(layer, padded(layer, x[chunk]).contiguous()).reshape(-1, wide, positions)
        torch.bmm(error[chunk].reshape(-1, tall, positions), columns.mT, out=rows[chunk].view(-1, tall, wide))
    return rows


def _embedding(layer: nn.Embedding, x: Tensor, error: Tensor, memory: Memory) -> dict[str, Factor]:
    indices, error = x.reshape(len(x), -1), error.reshape(len(x), -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        error = error.masked_fill((indices == layer.padding_idx)[:, :, None], 0)
    return {"weight": Lookup.of(indices, error, layer.weight.shape, memory.scratch)}


def _layer_norm(layer: nn.LayerNorm, x: Tensor, error: Tensor, memory: Memory) -> dict[str, Factor]:
    axes = len(layer.normalized_shape)
    normal = partial(functional.layer_norm, normalized_shape=layer.normalized_shape, eps=layer.eps)
    return {"weight": _scale(normal, x, error, axes, memory), "bias": summed_positions(error, axes, memory)}


def _rms_norm(layer: nn.RMSNorm, x: Tensor, error: Tensor, memory: Memory) -> dict[str, Factor]:
    normal = partial(functional.rms_norm, normalized_shape=layer.normalized_shape, eps=layer.eps)
    return {"weight": _scale(normal, x, error, len(layer.normalized_shape), memory)}


def _group_norm(layer: nn.GroupNorm, x: Tensor, error: Tensor, memory: Memory) -> dict[str, Factor]:
    parts, sizes = [], []
    for chunk in slices(0, len(x), _step(x, memory)):
        products = functional.group_norm(x[chunk], layer.num_groups, eps=layer.eps).mul_(error[chunk])
        sizes.append(_sizes(products))
        parts.append(products.reshape(len(products), layer.num_channels, -1).sum(dim=2))
    bias = error.reshape(len(x), layer.num_channels, -1)
    positions = math.sqrt(bias.shape[2])
    return {
        "weight": Rows(torch.cat(parts), memory.scratch, positions * torch.cat(sizes)),
        "bias": Rows(bias.sum(dim=2), memory.scratch, positions * _sizes(error)),
    }


RULES: dict[type[nn.Module], Rule] = {
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Linear: _linear,
    nn.RMSNorm: _rms_norm,
}

# Layers of libraries that are not imported for it.
NAMED_RULES: dict[str, Rule] = {
    "transformers.pytorch_utils.Conv1D": _turned_linear,  # GPT-2's
}


def _write_out(inputs: Sequence[int], error: Tensor, memory: Memory, groups: int = 1) -> bool:
    """Tell whether to keep the gradients of a weight matrix written out: when that is cheaper and fits."""
    examples, positions, wide = inputs
    tall = error.numel() // max(1, examples * positions)
    cheaper = groups > 1 or rows_are_cheaper(examples // memory.models, positions, wide, tall)
    return cheaper and memory.reserve(max(0, examples * wide * tall - error.numel()), error)


def _scale(normal: Callable[[Tensor], Tensor], x: Tensor, error: Tensor, axes: int, memory: Memory) -> Rows:
    """The gradients of a factor of what is normalised."""
    parts, sizes = [], []
    for chunk in slices(0, len(x), _step(x, memory)):
        products = normal(x[chunk]).mul_(error[chunk])
        sizes.append(_sizes(products))
        parts.append(_total(products, axes))
    return Rows(torch.cat(parts), memory.scratch, math.sqrt(_positions(x, axes)) * torch.cat(sizes))


def summed_positions(error: Tensor, axes: int, memory: Memory) -> Rows:
    """The gradients of what is added at all positions: of an error (B, ..., out) with so many last axes of its own."""
    return Rows(_total(error, axes), memory.scratch, math.sqrt(_positions(error, axes)) * _sizes(error))


def _sizes(values: Tensor) -> Tensor:
    """The norms of all of an example's numbers, (B,), as a side of a product.

    The product of two of these is at least the sum over positions of the products of their norms, and so is one times
    the root of the number of positions (Cauchy and Schwarz).
    """
    return _group_sizes(values, 1)[:, 0]


def _group_sizes(values: Tensor, groups: int) -> Tensor:
    """The same for groups of channels, (B, G), of values (B, channels, ...)."""
    rows = values.reshape(len(values) * groups, -1)
    return without_extremes(lengths(rows)).view(-1, groups)


def _together(sizes: Tensor) -> Tensor:
    """The norms, (B,), of all groups from those of each, (B, G)."""
    return sizes[:, 0] if sizes.shape[1] == 1 else lengths(sizes)


def _step(x: Tensor, memory: Memory) -> int:
    """How many examples of an input are handled at once, two tensors as large."""
    return max(1, memory.scratch // (2 * max(1, x[0].nbytes)))


def _total(values: Tensor, axes: int) -> Tensor:
    """Sum over all axes between the first and the last ``axes``."""
    return values.reshape(len(values), _positions(values, axes), *values.shape[values.ndim - axes :]).sum(dim=1)


def _positions(values: Tensor, axes: int) -> int:
    """How many positions an example has: of all axes between the first and the last ``axes``."""
    return math.prod(values.shape[1 : values.ndim - axes])
