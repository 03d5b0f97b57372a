"""Torch's multi-head attention: its projections are Linear layers, whose gradients need never be written out.

The module calls no layers of its own, so what lies between its projections is computed once more: from the recorded
input to the projected queries, keys and values, from these to what the heads attend to, and one backward pass between
the two.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import TypeIs

from fedpriv.gradients.factors import Factor, Memory, Stacked
from fedpriv.gradients.rules import of_products, outer, summed_positions


@dataclass(frozen=True)
class Attended:
    """What an attention module computed.

    Attributes:
        inputs: of the projections to queries, keys and values, (B, T, width) each; the same tensor where they are one.
        projected: queries, keys and values, (B, T, width) each, leaves of autograd's graph.
        heads: what the heads attend to, (B, T, width), a function of ``projected``: the output projection's input.
        output: (B, T, width).
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    projected: tuple[Tensor, Tensor, Tensor]
    heads: Tensor
    output: Tensor


def is_usual(module: nn.Module) -> TypeIs[nn.MultiheadAttention]:
    """Tell whether a module is an attention whose gradients :func:`attention_factors` knows.

    Examples come first, keys and values are as wide as queries, nothing is added to them, no attention is dropped, and
    all four projections are trained.
    """
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Attended:
    """Compute what the module computes (Vaswani et al. 2017), with everything between its projections at hand.

    Args:
        query: (B, T, width).
        key: (B, S, width).
        value: (B, S, width).
        key_padding_mask: (B, S); bool: true where a key is not attended to; else added to the scores.
        attn_mask: (T, S) or (B heads, T, S); as ``key_padding_mask``.
    """
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
    """Return the factors of the module's parameters by their names in it.

    Args:
        error: the gradients of its output, (B, T, width).
    """
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
