"""Rules: per-example gradients of a layer's parameters from its input and its output's gradient.

A layer is a function of torch, whatever module calls it. What one call adds to a parameter's gradients is a
contribution; those of all calls together make the parameter's factor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from fedpriv.gradients.factors import (
    CACHE_BYTES,
    FEW,
    LARGE,
    SHORT,
    SMALL,
    Dyads,
    EmbeddingRows,
    Factor,
    Inputs,
    Memory,
    Outer,
    Rows,
    Sizes,
    Stacked,
    Tied,
    Written,
    rows_are_cheaper,
    slices,
)
from fedpriv.gradients.operator import total

Contributions = Mapping[str, Callable[[], "Contribution"]]
"""The role of a parameter -> what a call adds to its gradients."""

Rule = Callable[[Tensor, Tensor, int, Memory], Contributions]
"""(input, gradient of the output, B, memory) -> contributions."""


class Operation(NamedTuple):
    """A call of a layer, and how the gradients of its parameters follow from its output's."""

    input: Tensor
    parameters: Mapping[str, Tensor | None]  # by their roles
    rule: "Rule"
    own_axes: int | None  # how many last axes of the input are not positions; None: all but the first

    def allows(self, axis: int) -> bool:
        """Tell whether an axis of the input may count the examples."""
        return axis == 0 if self.own_axes is None else axis < self.input.ndim - self.own_axes

    def detached(self) -> "Operation":
        """Return the same without autograd's graph, and without the parameters."""
        return Operation(self.input.detach(), {}, self.rule, self.own_axes)

    def contributions(
        self, error: Tensor, examples: int, place: int, memory: Memory, dtype: torch.dtype
    ) -> Contributions:
        """Return what follows for the parameters from the gradient of the output; ``place`` counts the examples."""
        x = self.input
        if error.dtype != dtype or (x.dtype != dtype and x.is_floating_point()):
            x, error = x.to(dtype) if x.is_floating_point() else x, error.to(dtype)
        if self.own_axes is not None:
            first = x.ndim - self.own_axes
            if place:
                x, error = x.movedim(place, 0), error.movedim(place, 0)
            if first != 2 or x.shape[0] != examples:
                x = x.reshape(examples, -1, *x.shape[first:])
                error = error.reshape(examples, -1, *error.shape[first:])
        return self.rule(x, error, examples, memory)


# ---- what calls add to a parameter's gradients ----------------------------------------------------------------------


class Products(NamedTuple):
    """Of a weight matrix: sums over positions of outer products of errors (B, T, out) and inputs (B, T, in)."""

    x: Tensor
    error: Tensor
    side: Rows | None = None  # the errors of an only position, which are the bias's gradients, too


class Lookups(NamedTuple):
    """Of a table: errors (B, T, width) of what was looked up at indices (B, T)."""

    indices: Tensor
    error: Tensor


Contribution = Products | Lookups | Written | Factor


def factor_of(shape: torch.Size, parts: Sequence[Contribution], memory: Memory) -> Factor | Written:
    """Return the factor of a parameter from what all calls add to its gradients, at least one."""
    if len(parts) == 1:
        (part,) = parts
        if isinstance(part, Products):
            return _multiplied(part, memory)
        return _table(part, shape, memory) if isinstance(part, Lookups) else part
    products = [part for part in parts if isinstance(part, Products)]
    lookups = [part for part in parts if isinstance(part, Lookups)]
    others = [part for part in parts if isinstance(part, Written | Factor)]
    if lookups and products and not others:
        return _tied(lookups, _together(products), memory)
    if products:
        others.append(_multiplied(_together(products), memory))
    if lookups:
        others.append(_looked_up(lookups, shape, memory))
    if len(others) == 1:
        return others[0]
    made = [part.factor(memory.scratch) if isinstance(part, Written) else part for part in others]
    rows = total(part.rows(0, part.examples) for part in made)
    return memory.rows(rows, lambda: Sizes.known(total(part.magnitudes() for part in made)))


def _together(parts: Sequence[Products]) -> Products:
    if len(parts) == 1:
        return parts[0]
    return Products(torch.cat([part.x for part in parts], dim=1), torch.cat([part.error for part in parts], dim=1))


def _multiplied(given: Products, memory: Memory) -> Factor | Written:
    x, error = given.x, given.error
    if x.shape[1] == 1 and not _is_small(len(x), error.shape[2] * x.shape[2]):
        side = Rows(error[:, 0], memory.scratch, side=True) if given.side is None else given.side
        return Dyads(x[:, 0], side, memory.scratch)
    if x.shape[1] == 1 or _write_out(x.shape, error, memory):
        return memory.rows(torch.bmm(error.mT, x), lambda: Sizes(1.0, error, x))
    return Outer(x, error, torch.Size((error.shape[2], x.shape[2])), memory.scratch, Sizes(1.0, error, x))


def _looked_up(parts: Sequence[Lookups], shape: torch.Size, memory: Memory) -> EmbeddingRows:
    given = parts[0] if len(parts) == 1 else _all_lookups(parts)
    return EmbeddingRows.of(given.indices, given.error, shape, memory.scratch)


def _all_lookups(parts: Sequence[Lookups]) -> Lookups:
    return Lookups(*(torch.cat(values, dim=1) for values in zip(*parts, strict=True)))


def _table(given: Lookups, shape: torch.Size, memory: Memory) -> Factor | Written:
    """The gradients of a table that is looked up once, written out if it is small."""
    if not _is_small(len(given.error), shape.numel()):
        return _looked_up([given], shape, memory)
    table = _undivided(given, shape, memory)
    return memory.rows(table.rows(0, table.examples), lambda: table.bounds()[0])


def _undivided(given: Lookups, shape: torch.Size, memory: Memory) -> EmbeddingRows:
    """What is looked up, with positions of an example that look up the same row; only to be written out."""
    indices, error = given
    sizes = Sizes(math.sqrt(error.shape[1]), error)
    return EmbeddingRows(indices.to(error.device, torch.int64), error, shape, memory.scratch, sizes)


def _tied(lookups: Sequence[Lookups], given: Products, memory: Memory) -> Factor | Written:
    """A table that is looked up and multiplied with."""
    x, error = given.x, given.error
    shape, sizes = torch.Size((error.shape[2], x.shape[2])), Sizes(1.0, error, x)
    if _write_out(x.shape, error, memory):
        table = _undivided(_all_lookups(lookups), shape, memory)
        rows = table.add_to_rows(torch.bmm(error.mT, x))
        return memory.rows(rows, lambda: Sizes.known(table.magnitudes() + sizes()))
    table = _looked_up(lookups, shape, memory)
    multiplied = Outer(x, error, shape, memory.scratch, sizes)
    return Tied(table, multiplied, (*shape, x.shape[1], table.positions), len(x), memory.scratch)


def _is_small(examples: int, numbers: int) -> bool:
    """Tell whether gradients of so many numbers are written out whatever they are, to be handled with others."""
    return numbers <= FEW and examples * examples * numbers <= SMALL


def _write_out(inputs: Sequence[int], error: Tensor, memory: Memory, groups: int = 1) -> bool:
    """Tell whether to keep the gradients of a weight matrix written out: when that is cheaper and fits.

    Products of a few positions take no longer than reading what they make.
    """
    examples, positions, wide = inputs
    tall = error.numel() // max(1, examples * positions)
    if groups == 1 and positions <= SHORT and wide * tall >= LARGE:
        return False
    cheaper = groups > 1 or rows_are_cheaper(examples // memory.models, positions, wide, tall)
    return cheaper and memory.reserve(max(0, examples * wide * tall - error.numel()), error)


# ---- products -------------------------------------------------------------------------------------------------------


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operation | None:
    return Operation(input, {"weight": weight, "bias": bias}, _product, 1) if weight.ndim == 2 else None


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Operation | None:
    if input.ndim != 1 or (beta, alpha) != (1, 1):
        return None
    return Operation(mat1, {"weight": mat2, "bias": input}, _turned_product, 1)


def _matmul(input: Tensor, other: Tensor) -> Operation | None:
    if other.ndim == 1 and input.ndim > 1:
        return Operation(input, {"weight": other}, _vector_product, 1)
    return Operation(input, {"weight": other}, _turned_product, 1) if other.ndim == 2 and input.ndim > 1 else None


def _product(x: Tensor, error: Tensor, examples: int, memory: Memory) -> Contributions:
    if error.shape[1] == 1 and not _is_small(examples, error.shape[2] * x.shape[2]):
        side = Rows(error[:, 0], memory.scratch, side=True)
        return {"weight": lambda: Products(x, error, side), "bias": lambda: side}
    return {"weight": lambda: Products(x, error), "bias": lambda: _added(error, memory)}


def _turned_product(x: Tensor, error: Tensor, examples: int, memory: Memory) -> Contributions:
    """Of a weight that lies the other way round, (in, out)."""
    return {"weight": lambda: Products(error, x), "bias": lambda: _added(error, memory)}


def _vector_product(x: Tensor, error: Tensor, examples: int, memory: Memory) -> Contributions:
    """Of a vector (n,) that is multiplied with inputs (B, T, n), whose errors are (B, T)."""
    rows = partial(torch.bmm, error[:, None], x)
    return {"weight": lambda: memory.rows(rows()[:, 0], partial(Sizes, 1.0, error, x))}


def _added(error: Tensor, memory: Memory) -> Written:
    """Of what is added at all positions, from the error (B, T, ...)."""
    return memory.rows(error.sum(dim=1), lambda: Sizes(math.sqrt(error.shape[1]), error))


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Operation | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    padding = None if padding_idx is None else padding_idx % len(weight)
    return Operation(input, {"weight": weight}, partial(_lookup, padding=padding), 0)


def _lookup(x: Tensor, error: Tensor, examples: int, memory: Memory, padding: int | None) -> Contributions:
    if padding is not None:
        error = error.masked_fill((x == padding)[:, :, None], 0)
    return {"weight": lambda: Lookups(x, error)}


# ---- norms ----------------------------------------------------------------------------------------------------------


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Operation:
    normal = partial(torch.layer_norm, normalized_shape=list(normalized_shape), eps=eps)
    return Operation(input, {"weight": weight, "bias": bias}, partial(_norm, normal=normal), len(normalized_shape))


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Operation:
    normal = partial(functional.rms_norm, normalized_shape=list(normalized_shape), eps=eps)
    return Operation(input, {"weight": weight}, partial(_norm, normal=normal), len(normalized_shape))


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Operation:
    normal = partial(functional.group_norm, num_groups=num_groups, eps=eps)
    return Operation(input, {"weight": weight, "bias": bias}, partial(_channels_norm, normal=normal), None)


Normal = Callable[[Tensor], Tensor]


def _norm(x: Tensor, error: Tensor, examples: int, memory: Memory, normal: Normal) -> Contributions:
    return {"weight": lambda: _scaled(x, error, normal, (1,), memory), "bias": lambda: _added(error, memory)}


def _channels_norm(x: Tensor, error: Tensor, examples: int, memory: Memory, normal: Normal) -> Contributions:
    x, error = (side.reshape(examples, -1, side.shape[1], side[0, 0].numel()) for side in (x, error))
    positions = math.sqrt(error.shape[1] * error.shape[3])
    return {
        "weight": lambda: _scaled(x, error, lambda some: normal(some.flatten(0, 1)).view_as(some), (1, 3), memory),
        "bias": lambda: memory.rows(error.sum(dim=(1, 3)), partial(Sizes, positions, error)),
    }


def _scaled(x: Tensor, error: Tensor, normal: Normal, positions: tuple[int, ...], memory: Memory) -> Written:
    """Of a factor of what is normalised, from x and error (B, ...), with the axes of positions."""

    def bound(products: Tensor) -> Sizes:
        return Sizes(math.sqrt(math.prod([x.shape[axis] for axis in positions])), products)

    if 2 * x.nbytes <= memory.scratch:
        products = normal(x).mul_(error)
        return memory.rows(products.sum(dim=positions), lambda: bound(products))
    parts, sizes = [], []
    for chunk in slices(0, len(x), max(1, memory.scratch * len(x) // (2 * x.nbytes))):
        products = normal(x[chunk]).mul_(error[chunk])
        parts.append(products.sum(dim=positions))
        if memory.bounds:
            sizes.append(bound(products)())  # lets go of the products
    return memory.rows(torch.cat(parts), lambda: Sizes.known(torch.cat(sizes)))


# ---- convolutions ---------------------------------------------------------------------------------------------------


# With kernels up to this size oneDNN's backward pass is the faster way of two.
SMALL_KERNEL = 3


@dataclass(frozen=True)
class Kernel:
    """How the kernel of a convolution moves over its input."""

    shape: torch.Size  # of the weight, (out, in / groups, *size)
    stride: Sequence[int]
    dilation: Sequence[int]
    sides: Sequence[int]  # zeros around the input, as torch's ``pad`` takes them
    groups: int

    @property
    def kernel_size(self) -> Sequence[int]:
        """Its size along each axis."""
        return self.shape[2:]

    @property
    def uses(self) -> int:
        """How often a number of the input is in its patches, at most.

        Along an axis a number is under ceil(k gcd(s, d) / s) places of a kernel of size k with stride s and dilation d.
        """
        axes = zip(self.kernel_size, self.stride, self.dilation, strict=True)
        return math.prod(-(-size * math.gcd(stride, dilation) // stride) for size, stride, dilation in axes)


Moved = Kernel | nn.Conv1d | nn.Conv2d
"""What moves over an input: a kernel, or a layer that has one."""


class Patches:
    """The patches of x (B T, in, *size) as rows of a matrix, copied out for the examples that are asked for."""

    def __init__(self, kernel: Kernel, x: Tensor, shape: torch.Size, group: int) -> None:
        self._kernel = kernel
        self._x = x.chunk(kernel.groups, dim=1)[group]
        self.shape = shape  # (B, positions, in / groups * kernel)

    def __getitem__(self, examples: slice) -> Tensor:
        """Return the patches of some examples, (n, T, in / groups * kernel)."""
        share = len(self._x) // self.shape[0]
        x = functional.pad(self._x[share * examples.start : share * examples.stop], self._kernel.sides)
        columns = patches(self._kernel, x.contiguous()).reshape(len(x), self.shape[2], -1).mT
        return columns if share == 1 else columns.reshape(-1, *self.shape[1:])


def patches(kernel: Moved, x: Tensor) -> Tensor:
    """Return the patches of some padded input (n, channels, *size), (n, channels, *kernel, *positions): a view."""
    steps = x.stride()[2:]
    inside = [dilation * step for dilation, step in zip(kernel.dilation, steps, strict=True)]
    between = [stride * step for stride, step in zip(kernel.stride, steps, strict=True)]
    shape = (*x.shape[:2], *kernel.kernel_size, *_positions(kernel, x))
    return x.as_strided(shape, (*x.stride()[:2], *inside, *between))


def _positions(kernel: Moved, x: Tensor) -> list[int]:
    """How many places a kernel has along each axis of some padded input."""
    extents = [dilation * (size - 1) + 1 for dilation, size in zip(kernel.dilation, kernel.kernel_size, strict=True)]
    sizes = zip(x.shape[2:], extents, kernel.stride, strict=True)
    return [(size - extent) // stride + 1 for size, extent, stride in sizes]


def padded(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Return some of a convolution's input, (n, channels, *size), with what the layer puts around it."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return functional.pad(x, padded_sides(layer), mode=mode)


def padded_sides(layer: nn.Conv1d | nn.Conv2d) -> list[int]:
    """Return how much a convolution puts around its input, as torch's ``pad`` takes it."""
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return list(layer._reversed_padding_repeated_twice)
    return [side for width in reversed(layer.padding) for side in (width, width)]


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Operation | None:
    if input.ndim != weight.ndim:
        return None
    size = weight.shape[2:]
    strides, dilations = (_each(value, len(size)) for value in (stride, dilation))
    if isinstance(padding, str):
        widths = [d * (k - 1) if padding == "same" else 0 for k, d in zip(size, dilations, strict=True)]
        pairs = [(width // 2, width - width // 2) for width in widths]
    else:
        pairs = [(width, width) for width in _each(padding, len(size))]
    sides = [side for pair in reversed(pairs) for side in pair]
    kernel = Kernel(weight.shape, strides, dilations, sides, groups)
    return Operation(input, {"weight": weight, "bias": bias}, partial(_patched, kernel=kernel), None)


def _each(value: int | Sequence[int], axes: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


def _patched(x: Tensor, error: Tensor, examples: int, memory: Memory, kernel: Kernel) -> Contributions:
    """A convolution is its weight matrix applied to each patch; per group with groups."""
    error = error.flatten(2)
    if len(error) != examples:  # positions of an example come one after the other
        error = error.reshape(examples, -1, *error.shape[1:]).transpose(1, 2).flatten(2)
    return {
        "weight": lambda: _kernels(x, error, memory, kernel),
        "bias": lambda: memory.rows(error.sum(dim=2), partial(Sizes, math.sqrt(error.shape[2]), error)),
    }


def _kernels(x: Tensor, error: Tensor, memory: Memory, kernel: Kernel) -> Factor | Written:
    """The gradients of a convolution's weight, from x (B T, in, *size) and error (B, out, positions)."""
    examples, positions, wide = len(error), error.shape[2], kernel.shape[1:].numel()
    if _write_out((examples, positions, wide), error, memory, kernel.groups):
        given = x.reshape(examples, -1)
        return memory.rows(_written(kernel, x, error), partial(Sizes, math.sqrt(kernel.uses), error, given))
    parts = []
    for group, group_error in enumerate(error.chunk(kernel.groups, dim=1)):
        columns: Inputs = Patches(kernel, x, torch.Size((examples, positions, wide)), group)
        if positions == 1 or memory.reserve(columns.shape.numel(), x):
            columns = columns[0:examples]
        shape = torch.Size((group_error.shape[1], *kernel.shape[1:]))
        channels = x.chunk(kernel.groups, dim=1)[group].reshape(examples, -1)
        sizes = Sizes(math.sqrt(kernel.uses), group_error, channels)
        parts.append(Outer(columns, group_error.mT, shape, memory.scratch, sizes))
    return parts[0] if len(parts) == 1 else Stacked(parts, examples, kernel.shape, memory.scratch)


def _written(kernel: Kernel, x: Tensor, error: Tensor) -> Tensor:
    """The gradients (B, *shape) of a convolution's weight, from x (B T, in, *size) and error (B, out, positions)."""
    if kernel.groups > 1 or len(x) != len(error):
        return _written_groups(kernel, x, error)
    if _is_small(len(x), kernel.shape.numel()):  # in the usual order, in few calls
        given = functional.pad(x, kernel.sides) if any(kernel.sides) else x
        columns = patches(kernel, given.contiguous()).reshape(len(x), kernel.shape[1:].numel(), error.shape[2])
        return torch.bmm(error, columns.mT).view(len(x), *kernel.shape)
    # With channels last it takes half the time.
    size, positions = kernel.kernel_size, error.shape[2]
    rows = error.new_empty(len(x), kernel.shape[0], *size, kernel.shape[1])
    axes = range(2, 2 + 2 * len(size))
    for chunk in slices(0, len(x), max(1, CACHE_BYTES // max(1, rows[0, 0].nbytes * positions))):
        last = functional.pad(x[chunk], kernel.sides).movedim(1, -1).contiguous().movedim(-1, 1)
        columns = patches(kernel, last).permute(0, *axes[len(size) :], *axes[: len(size)], 1)
        torch.bmm(error[chunk], columns.reshape(-1, positions, rows[0, 0].numel()), out=rows[chunk].flatten(2))
    return rows.movedim(-1, 2)


def _written_groups(kernel: Kernel, x: Tensor, error: Tensor) -> Tensor:
    """The same for groups, whose channels are too few for long runs; in the usual order."""
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if plain and len(x) == len(error) and error.shape[2] > 1:
        return _convolved(kernel, x, error)
    groups, wide, (examples, out, positions) = kernel.groups, kernel.shape[1:].numel(), error.shape
    tall, share = out // groups, len(x) // examples
    step = max(1, CACHE_BYTES // max(1, groups * wide * positions * x.element_size()))
    rows = error.new_empty(examples, *kernel.shape)
    for chunk in slices(0, examples, step):
        some = functional.pad(x[share * chunk.start : share * chunk.stop], kernel.sides).contiguous()
        columns = patches(kernel, some).reshape(len(some), groups * wide, -1)
        if share > 1:
            columns = columns.unflatten(0, (-1, share)).transpose(1, 2)
        columns = columns.reshape(-1, wide, positions)
        torch.bmm(error[chunk].reshape(-1, tall, positions), columns.mT, out=rows[chunk].view(-1, tall, wide))
    return rows


def _convolved(kernel: Kernel, x: Tensor, error: Tensor) -> Tensor:
    """The same from one call of a convolution, for which each example's channels are channels of their own.

    oneDNN has a fast backward pass for small kernels, and for groups of several channels. With one channel a group, the
    gradient is a convolution, too: of the input with the errors as its kernel, steps and gaps exchanged.
    """
    axes, (examples, out) = len(kernel.kernel_size), error.shape[:2]
    given = functional.pad(x, kernel.sides)
    given = given.reshape(1, -1, *given.shape[2:])
    errors = error.reshape(1, examples * out, *_positions(kernel, given))
    small = max(kernel.kernel_size) <= SMALL_KERNEL and out == kernel.groups
    if kernel.shape[1] > 1 or small:
        of_weight: Any = (conv1d_weight, conv2d_weight, conv3d_weight)[axes - 1]
        size, groups = (examples * out, *kernel.shape[1:]), examples * kernel.groups
        rows: Tensor = of_weight(given, size, errors, kernel.stride, 0, kernel.dilation, groups)
        return rows.view(examples, *kernel.shape)
    given = given.repeat_interleave(out // kernel.groups, dim=1)
    convolve: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[axes - 1]
    made: Tensor = convolve(given, errors.movedim(0, 1), None, kernel.dilation, 0, kernel.stride, examples * out)
    for axis, length in enumerate(kernel.kernel_size, 2):  # beyond it lies what no step reached
        made = made.narrow(axis, 0, length)
    return made.reshape(examples, *kernel.shape)


OPERATIONS: dict[Any, Callable[..., Operation | None]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.mm: _matmul,
    functional.conv1d: _convolution,
    functional.conv2d: _convolution,
    functional.conv3d: _convolution,
    functional.embedding: _embedding,
    functional.layer_norm: _layer_norm,
    functional.rms_norm: _rms_norm,
    functional.group_norm: _group_norm,
}


# Layers, as operations of what they are given.
LAYERS: dict[type[nn.Module], Callable[[Any, Tensor], Operation | None]] = {
    nn.Linear: lambda layer, x: _linear(x, layer.weight, layer.bias),
    nn.Conv1d: lambda layer, x: _of_layer(layer, x),
    nn.Conv2d: lambda layer, x: _of_layer(layer, x),
    nn.GroupNorm: lambda layer, x: _group_norm(x, layer.num_groups, layer.weight, layer.bias, layer.eps),
    nn.LayerNorm: lambda layer, x: _layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps),
}


def _of_layer(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Operation | None:
    """The operation of a convolution, which puts something else than zeros around its input itself."""
    padding: Any = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = padded(layer, x), 0
    return _convolution(x, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)
