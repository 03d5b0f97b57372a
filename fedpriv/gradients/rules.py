"""Rules: per-example gradients from a layer's input and its output's gradient, one rule for each kind of layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import TypeIs

from fedpriv.gradients.factors import (
    CACHE_BYTES,
    Dyads,
    EmbeddingRows,
    Factor,
    Inputs,
    Memory,
    Outer,
    Rows,
    Stacked,
    Tied,
    rows_are_cheaper,
    slices,
)
from fedpriv.gradients.numerics import lengths, without_extremes


class Patches:
    """The patches of x (B, in, *size) as rows of a matrix, copied out for the examples that are asked for."""

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
    """Return the patches of some padded input (n, channels, *size), (n, channels, *kernel, *positions): a view."""
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
    """Return the gradients of a weight that an embedding and a Linear layer share, from inputs and errors."""
    first = _embedding(table, indices, looked_up, memory)["weight"]
    x, error = (side.reshape(len(side), -1, side.shape[-1]) for side in given)
    if not isinstance(first, EmbeddingRows) or _write_out(x.shape, error, memory):
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
    """The gradients (B, *shape) of a convolution's weight, from error (B, out, T); channels last, twice as fast."""
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
    return {"weight": EmbeddingRows.of(indices, error, layer.weight.shape, memory.scratch)}


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
    """The norms (B,) of all of an example's numbers: products of two bound sums over positions (Cauchy, Schwarz)."""
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


# Torch's multi-head attention: its projections are Linear layers, whose gradients need never be written out.
#
# The module calls no layers of its own, so what lies between its projections is computed once more: from the recorded
# input to the projected queries, keys and values, from these to what the heads attend to, and one backward pass between
# the two.


@dataclass(frozen=True)
class Attended:
    """What an attention module computed."""

    inputs: tuple[Tensor, Tensor, Tensor]  # of these projections, (B, T, width) each; the same where they are one
    projected: tuple[Tensor, Tensor, Tensor]  # queries, keys and values, (B, T, width) each, leaves of autograd's graph
    heads: Tensor  # what the heads attend to, (B, T, width), a function of projected: the output projection's input
    output: Tensor  # (B, T, width)


def is_usual(module: nn.Module) -> TypeIs[nn.MultiheadAttention]:
    """Tell whether an attention has examples first, equal widths, all projections trained, and nothing added."""
    if type(module) is not nn.MultiheadAttention or module.in_proj_weight is None or not module.batch_first:
        return False
    hooks = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    extras = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
    drops = module.training and module.dropout > 0
    return not (extras or drops or any(hooks) or "forward" in vars(module)) and _is_trained(module)


def _is_trained(module: nn.MultiheadAttention) -> bool:
    return all(value.requires_grad for value in module.parameters())


def attend(
    module: nn.MultiheadAttention,
    query: Tensor,  # (B, T, width)
    key: Tensor,  # (B, S, width)
    value: Tensor,  # (B, S, width)
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,  # (T, S) or (B heads, T, S); as key_padding_mask
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Attended:
    """Compute what the module computes (Vaswani et al. 2017), with everything between its projections at hand."""
    dtype = module.in_proj_weight.dtype
    inputs = tuple(given.to(dtype) for given in (query, key, value))
    weights = module.in_proj_weight.detach().chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.detach().chunk(3)
    layers = zip(inputs, weights, biases, strict=True)
    q, k, v = (functional.linear(x, weight, bias).requires_grad_() for x, weight, bias in layers)
    mask = _mask(module, q, k, key_padding_mask, attn_mask)
    with torch.enable_grad():
        split = [part.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for part in (q, k, v)]
        attended = functional.scaled_dot_product_attention(split[0], split[1], split[2], attn_mask=mask)
        heads = attended.transpose(1, 2).flatten(2)
    bias = None if module.out_proj.bias is None else module.out_proj.bias.detach()
    output = functional.linear(heads.detach(), module.out_proj.weight.detach(), bias)
    return Attended((inputs[0], inputs[1], inputs[2]), (q, k, v), heads, output)


def _mask(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """What is added to the scores (B, heads, T, S), in a shape that extends to that; ``None``: nothing."""
    total: Tensor | None = None
    if mask is not None:
        total = _added(mask, q.dtype)
        if mask.ndim == 3:
            total = total.view(len(q), module.num_heads, q.shape[1], k.shape[1])
    if padding is not None:
        added = _added(padding, q.dtype)[:, None, None, :]
        total = added if total is None else total + added
    return total


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)


def attention_factors(
    module: nn.MultiheadAttention, attended: Attended, error: Tensor, memory: Memory
) -> dict[str, Factor]:
    """Return the factors of the parameters by their names in the module, from its output's gradients (B, T, width)."""
    error = error.to(attended.output.dtype)
    factors = {"out_proj.weight": of_products(attended.heads.detach(), error, memory)}
    if module.out_proj.bias is not None:
        factors["out_proj.bias"] = summed_positions(error, 1, memory)
    inner = torch.autograd.grad(attended.heads, attended.projected, error @ module.out_proj.weight.detach())
    factors["in_proj_weight"] = _projections(attended.inputs, inner, memory)
    if module.in_proj_bias is not None:
        # Laid side by side at the longest of the three lengths: what is added sums over positions.
        factors["in_proj_bias"] = summed_positions(_side_by_side(inner), 1, memory)
    return factors


def _projections(inputs: tuple[Tensor, ...], errors: tuple[Tensor, ...], memory: Memory) -> Factor:
    """The gradients of the three projections' weights in one: one matrix where all have the same input."""
    query, key, value = inputs
    if _is_same(query, key) and _is_same(query, value):
        return of_products(query, torch.cat(errors, dim=2), memory)
    parts = [outer(x, error, memory) for x, error in zip(inputs, errors, strict=True)]
    shape = torch.Size((3 * query.shape[2], query.shape[2]))
    return Stacked(parts, len(query), shape, memory.scratch)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _side_by_side(errors: tuple[Tensor, ...]) -> Tensor:
    longest = max(error.shape[1] for error in errors)
    padded = [functional.pad(error, (0, 0, 0, longest - error.shape[1])) for error in errors]
    return torch.cat(padded, dim=2)
