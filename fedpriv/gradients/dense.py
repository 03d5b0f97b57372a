"""The dense operator: holds every per-example gradient, B x K numbers, for any kind of layer."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.gradients.calls import plain_gradient, reached
from fedpriv.gradients.factors import FEW, Factor, Outer, Rows, Sizes, Written, Zero, slices
from fedpriv.gradients.numerics import lengths
from fedpriv.gradients.operator import (
    DEFAULT_CHUNK_BYTES,
    Block,
    GradientOperator,
    Vector,
    first_line,
    flattened,
    full_precision,
    in_double,
)

Groups = Mapping[Block, Factor]
"""Names of parameters -> a factor of all of them, laid end to end."""


class FactoredGradients(GradientOperator):
    """Gradients held as factors of one parameter or several; products keep their precision where autocast is on."""

    def __init__(
        self,
        groups: Groups,
        examples: int,
        shapes: dict[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        routes: Mapping[str, str],
        chunk_bytes: int,
    ) -> None:
        super().__init__(examples, shapes, dtype, device, routes, chunk_bytes)
        self._held: dict[Block, Groups] = {self.names(): groups}
        self._magnitudes: dict[Block, Tensor] = {}

    def factor(self, name: str) -> Factor:
        """Return what is held of a parameter."""
        (factor,) = self._groups((name,)).values()
        return factor

    @override
    def grams(self, groups: int, block: Block | None = None, *, precise: bool = True) -> Tensor:
        return in_double(self._sum(lambda names, factor: factor.grams(groups, precise), block))

    @override
    def norms(self, block: Block | None = None) -> Tensor:
        groups = self._groups(block)
        if len(groups) == 1 and isinstance(rows := next(iter(groups.values())), Rows):
            return rows.norms()
        return self._sum(lambda names, factor: factor.squared_norms(), block).clamp_(min=0).sqrt_()

    @override
    def absolute_sums(self, block: Block | None = None) -> Tensor:
        return self._sum(lambda names, factor: factor.absolute_sums(), block)

    @override
    def weighted_norms(self, weights: Vector, block: Block | None = None) -> Tensor:
        squares = self._sum(lambda names, factor: factor.weighted_squares(_end_to_end(weights, names, 0)), block)
        return squares.clamp_(min=0).sqrt_()

    @override
    def rows(self, start: int, stop: int, block: Block | None = None) -> Vector:
        with full_precision(self.device):
            return self._apart({names: own.rows(start, stop) for names, own in self._groups(block).items()}, block)

    @override
    def dots(self, vectors: Vector, block: Block | None = None) -> Tensor:
        return self._sum(lambda names, factor: factor.dots(_end_to_end(vectors, names, 1)), block)

    @override
    def dots_laid(self, numbers: Tensor, block: Block | None = None) -> Tensor:
        laid = self._laid(numbers, block)
        return self._sum(lambda names, factor: factor.dots(laid[names]), block)

    @override
    def combine(self, weights: Tensor, block: Block | None = None) -> Vector:
        with full_precision(self.device):
            return self._apart({names: own.combine(weights) for names, own in self._groups(block).items()}, block)

    @override
    def add_combination(self, vector: Vector, scale: float, weights: Tensor, block: Block | None = None) -> None:
        with full_precision(self.device):
            for names, factor in self._groups(block).items():
                if len(names) == 1:
                    factor.add_to(vector[names[0]], scale, weights)
                else:
                    self._add(vector, scale, names, factor.combine(weights))

    @override
    def products(self, numbers: Tensor, block: Block | None = None) -> tuple[Tensor, Tensor]:
        laid = self._laid(numbers, block)
        made = self._sum(lambda names, factor: factor.products(laid[names]), block)
        return in_double(made[..., :-1]), made[..., -1]

    @override
    def add_laid(self, numbers: Tensor, scale: float, weights: Tensor, block: Block | None = None) -> None:
        places = self._places(block)
        with full_precision(self.device):
            for names, factor in self._groups(block).items():
                if len(places[names]) == 1:
                    ((own, _),) = places[names]
                    shape = self.shapes[names[0]] if len(names) == 1 else (-1,)
                    factor.add_to(numbers[own].view(shape), scale, weights)
                    continue
                added = factor.combine(weights)
                for own, share in places[names]:
                    numbers[own].mul_(scale).add_(added[share])

    @override
    def part(self, start: int, stop: int) -> "FactoredGradients":
        return self._of({names: factor.part(start, stop) for names, factor in self._groups().items()}, stop - start)

    def combine_each(self, weights: Tensor, block: Block | None = None) -> Vector:
        """Return the sums of the gradients of G groups with weights (G, B / G), in new tensors (G, *shape)."""
        with full_precision(self.device):
            return self._apart({names: own.combine_each(weights) for names, own in self._groups(block).items()}, block)

    def add_to_each(self, vectors: Vector, scale: float, weights: Tensor, block: Block | None = None) -> None:
        """Replace vectors (G, *shape) by ``scale`` times themselves plus those sums; they may have more names."""
        with full_precision(self.device):
            for names, factor in self._groups(block).items():
                if len(names) == 1:
                    factor.add_to_each(vectors[names[0]], scale, weights)
                else:
                    self._add(vectors, scale, names, factor.combine_each(weights))

    @override
    def magnitudes(self, block: Block | None = None) -> Tensor:
        names = self.names(block)
        if names not in self._magnitudes:
            factors = self._groups(block).values()
            Sizes.compute([bound for factor in factors for bound in factor.bounds()])
            each = [factor.magnitudes() for factor in factors]
            self._magnitudes[names] = each[0] if len(each) == 1 else lengths(torch.stack(each, dim=1))
        return self._magnitudes[names]

    @override
    def roundings(self, block: Block | None = None) -> Tensor:
        sums = [factor for factor in self._groups(block).values() if factor.rounding]
        if not sums:
            return torch.zeros(self.examples, dtype=self.dtype, device=self.device)
        return lengths(torch.stack([factor.rounding * factor.magnitudes() for factor in sums], dim=1))

    @override
    def masked(self, keep: Tensor) -> "FactoredGradients":
        return self._of({names: factor.masked(keep) for names, factor in self._groups().items()}, self.examples)

    @override
    def pair_products(self, block: Block | None = None, *, precise: bool = True) -> int:
        return sum([factor.pair_products(precise) for factor in self._groups(block).values()])

    def _of(self, groups: Groups, examples: int) -> "FactoredGradients":
        """The same parameters' gradients of so many examples."""
        return FactoredGradients(groups, examples, self.shapes, self.dtype, self.device, self.routes, self.chunk_bytes)

    def _groups(self, block: Block | None = None) -> Groups:
        names = self.names(block)
        if names not in self._held:
            parts = {name: self._apart_held[name] for name in names}
            self._held[names] = grouped(parts, self.examples, self.chunk_bytes)
        return self._held[names]

    @cached_property
    def _apart_held(self) -> Mapping[str, Factor | Written]:
        """What is held of each parameter."""
        found: dict[str, Factor | Written] = {}
        for names, factor in self._groups().items():
            if len(names) > 1 and isinstance(factor, Rows | Outer):
                found |= zip(names, factor.apart([self.shapes[name] for name in names]), strict=True)
            else:
                found[names[0]] = factor
        return found

    def _places(self, block: Block | None) -> dict[Block, list[tuple[slice, slice]]]:
        """Of each group: where its numbers are among the block's, laid end to end, and where among its own."""
        group = {name: names for names in self._groups(block) for name in names}
        places: dict[Block, list[tuple[slice, slice]]] = {}
        start = 0
        for names, run in groupby(self.names(block), group.__getitem__):
            stop = start + sum([self._numbers[name] for name in run])
            found = places.setdefault(names, [])
            first = found[-1][1].stop if found else 0
            found.append((slice(start, stop), slice(first, first + stop - start)))
            start = stop
        return places

    def _laid(self, numbers: Tensor, block: Block | None) -> dict[Block, Tensor]:
        """Each group's share of vectors (G, K) laid end to end: (G, n), or of a single parameter (G, *shape)."""
        laid, numbers = {}, numbers.to(self.device)
        for names, places in self._places(block).items():
            parts = [numbers[:, own] for own, _ in places]
            share = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            laid[names] = share if len(names) > 1 else share.view(len(share), *self.shapes[names[0]])
        return laid

    def _apart(self, sums: Mapping[Block, Tensor], block: Block | None) -> Vector:
        """Take apart what lies end to end."""
        found: Vector = {}
        for names, value in sums.items():
            found |= {names[0]: value} if len(names) == 1 else self.vector(value, names)
        return {name: found[name] for name in self.names(block)}

    def _add(self, vector: Vector, scale: float, names: Block, added: Tensor) -> None:
        totals = [vector[name] for name in names]
        torch._foreach_mul_(totals, scale)
        torch._foreach_add_(totals, list(self.vector(added, names).values()))

    def _sum(self, product: Callable[[Block, Factor], Tensor], block: Block | None) -> Tensor:
        """Add up a product over the block's parameters."""
        first, *others = self._groups(block).items()
        with full_precision(self.device):
            total = product(*first)
            for names, factor in others:
                total = total + product(names, factor)
        return total


def grouped(parts: Mapping[str, Factor | Written], examples: int, chunk_bytes: int) -> Groups:
    """Return factors of parameters, of several that are laid end to end where that saves calls or work.

    So are all of few numbers that are written out, and matrices that were applied to the same inputs.
    """
    most = FEW * examples
    few = {name: part for name, part in parts.items() if isinstance(part, Written) and part.rows.numel() <= most}
    groups: dict[Block, Factor] = {}
    if len(few) > 1 and sum([part.rows.nbytes for part in few.values()]) <= chunk_bytes // 8:
        rows = torch.cat([flattened(part.rows) for part in few.values()], dim=1)
        sizes = [part.sizes for part in few.values() if part.sizes is not None]
        groups[tuple(few)] = Rows(rows, chunk_bytes // 2, sizes)
    else:
        few = {}
    stacks: dict[object, dict[str, Outer]] = {}
    for name, part in parts.items():
        if name in few:
            continue
        if isinstance(part, Outer):
            stacks.setdefault(part.place, {})[name] = part
        else:
            groups[name,] = part.factor(chunk_bytes // 2) if isinstance(part, Written) else part
    for stack in stacks.values():
        groups[tuple(stack)] = Outer.stacked(list(stack.values())) if len(stack) > 1 else next(iter(stack.values()))
    return groups


def _end_to_end(vectors: Vector, names: Block, axes: int) -> Tensor:
    """Lay tensors end to end behind their first axes; one is returned as it is."""
    if len(names) == 1:
        return vectors[names[0]]
    return torch.cat([flattened(vectors[name], axes) for name in names], dim=axes)


# Addressed to torch's developers, and about a kernel of attention that is as fast with it as without.
warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented the batching rule")

Loss = Callable[[Any, Tensor], Tensor]
"""(model output (B, ...), targets (B, ...)) -> one loss an example, (B,)."""


class DenseGradients(FactoredGradients):
    """Gradients given one by one.

    Args:
        gradients: parameter's name -> its gradients, of shape (B, *shape); one floating type and one device for all.
        reason: why they are dense, for people.
        chunk_bytes: what a call may take beyond what it returns.

    Raises:
        ValueError: nothing is given, or numbers of examples, types or devices differ.
    """

    def __init__(
        self,
        gradients: Mapping[str, Tensor],
        reason: str = "given one by one",
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        kinds = {f"{len(rows)} examples of {rows.dtype} on {rows.device}" for rows in gradients.values()}
        if len(kinds) > 1:
            raise ValueError(f"gradients of several kinds: {', '.join(sorted(kinds))}; allowed: one kind")
        first = next(iter(gradients.values()), torch.empty(0))
        groups = grouped({name: Written(rows) for name, rows in gradients.items()}, len(first), chunk_bytes)
        shapes = {name: rows.shape[1:] for name, rows in gradients.items()}
        routes = {"": f"dense: {reason}"}
        super().__init__(groups, first.shape[0], shapes, first.dtype, first.device, routes, chunk_bytes)


def zeros_like(gradients: GradientOperator, examples: int) -> FactoredGradients:
    """Return the gradients of so many examples that tell nothing, of the same parameters."""
    zero = torch.zeros(1, dtype=gradients.dtype, device=gradients.device)
    parameters = {name: zero.expand(shape) for name, shape in gradients.shapes.items()}
    return _zeros(parameters, examples, gradients.chunk_bytes)


def zero_gradients(model: nn.Module, examples: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> FactoredGradients:
    """Return the gradients of examples that tell nothing: all zero, and nothing is written out.

    Args:
        model: whose parameters they are for.
        examples: B, at least 1.
        chunk_bytes: what a call may take beyond what it returns.
    """
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    return _zeros(trained, examples, chunk_bytes)


def _zeros(parameters: Vector, examples: int, chunk_bytes: int) -> FactoredGradients:
    first = next(iter(parameters.values()))
    factors: Groups = {(name,): Zero(value, examples) for name, value in parameters.items()}
    shapes = {name: value.shape for name, value in parameters.items()}
    routes = {"": "zero: nothing was computed"}
    return FactoredGradients(factors, examples, shapes, first.dtype, first.device, routes, chunk_bytes)


def dense_gradients(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, reason: str, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> DenseGradients:
    """Compute the gradients of a batch one example at a time, vectorised and in chunks of bounded memory.

    A parameter used in several places gets the sum over its uses. Layers that draw random numbers (dropout) draw anew
    for each example, from torch's global generator. The model maps (B, ...) to (B, ...), the loss outputs and targets
    to (B,).
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not len(x):
        none = {name: value.new_empty(0, *value.shape) for name, value in trained.items()}
        return DenseGradients(none, reason, chunk_bytes)

    def one_loss(forward: Forward, one_x: Tensor, one_y: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        losses = loss(forward(one_x), one_y)
        check_losses(losses, 1)
        return losses[0], ()

    if _needs_its_own_parameters(model, loss, x, y):
        rows = _one_by_one(model, trained, one_loss, (x, y))
    else:
        rows = dense_rows(model, trained, one_loss, (x, y), chunk_bytes)
    return DenseGradients(rows.gradients, reason + rows.way, chunk_bytes)


def _needs_its_own_parameters(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> bool:
    """Tell whether gradients change when stand-ins take the parameters' place: a hook, loss or list holds them."""
    hooks = [value._backward_hooks for value in model.parameters()]
    hooks += [held for layer in model.modules() for held in (layer._backward_hooks, layer._backward_pre_hooks)]
    if any(hooks):
        return True
    originals = {name: value for name, value in model.named_parameters() if value.requires_grad}
    stand_ins = {name: value.requires_grad_(first in originals) for name, (first, value) in _held(model).items()}
    try:
        with torch.enable_grad():
            total = loss(functional_call(model, stand_ins, (x[:1],), tie_weights=False), y[:1]).sum()
    except RuntimeError:
        return True  # it takes no stand-ins; what is wrong with the model itself is raised again without them
    return not {id(value) for value in originals.values()}.isdisjoint(reached(total, {}).leaves)


def check_losses(losses: Tensor, examples: int) -> None:
    """Raise InputError unless there is one loss an example."""
    if losses.shape != (examples,):
        raise InputError(
            f"the loss of {examples} examples has shape {tuple(losses.shape)}; allowed: ({examples},), one number each"
        )


Forward = Callable[..., Any]
"""What a module computes, as a function of its inputs."""

Value = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
"""(the module as a function, one entry of each column with a first axis of 1) -> a number, and outputs to be kept."""


class DenseRows(NamedTuple):
    """Gradients written out."""

    gradients: Vector  # (B, *shape) each
    outputs: tuple[Tensor, ...]  # what was kept of each example, (B, ...)
    way: str  # what is to be said about the way, for people; empty for the usual one


def dense_rows(
    module: nn.Module, trained: Mapping[str, Tensor], value: Value, columns: Sequence[Tensor], chunk_bytes: int
) -> DenseRows:
    """Write out the gradients of a number of each entry of columns (B, ...), B at least 1.

    As many at once as fit, by what the first one allocates, where torch can map the module over them; where it cannot
    (a module that decides by its numbers, kernels that have no rule for it), one after the other.
    """
    try:
        return _mapped(module, trained, value, columns, chunk_bytes)
    except RuntimeError:
        # What is wrong with the module itself rather than with mapping it is raised again, and now to the caller.
        return _one_by_one(module, trained, value, columns)


def _mapped(
    module: nn.Module, trained: Mapping[str, Tensor], value: Value, columns: Sequence[Tensor], chunk_bytes: int
) -> DenseRows:
    held = _held(module)

    def of_one(parameters: Vector, *one: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        def forward(*positional: Any, **named: Any) -> Any:
            state = {name: parameters.get(first, value) for name, (first, value) in held.items()}
            return functional_call(module, state, positional, named, tie_weights=False)

        return value(forward, *(entry.unsqueeze(0) for entry in one))

    parameters = {name: tensor.detach() for name, tensor in trained.items()}
    axes = (None, *(0 for _ in columns))
    compute = partial(vmap(grad(of_one, has_aux=True), in_dims=axes, randomness="different"), parameters)
    with _Allocations() as allocations:
        first = compute(*(column[:1] for column in columns))
    rows = _Collected(len(columns[0]), *first)
    for chunk in slices(1, len(columns[0]), max(1, chunk_bytes // max(1, allocations.bytes))):
        rows.put(chunk, *compute(*(column[chunk] for column in columns)))
    return DenseRows(rows.gradients, rows.outputs, "")


def _held(module: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """All that a module holds: name -> the first name of the same tensor, and the tensor."""
    first: dict[Tensor, str] = {}
    held: dict[str, tuple[str, Tensor]] = {}
    for prefix, layer in module.named_modules():
        for local, value in chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False)):
            name = f"{prefix}.{local}" if prefix else local
            held[name] = (first.setdefault(value, name), value.detach())
    return held


def _one_by_one(module: nn.Module, trained: Mapping[str, Tensor], value: Value, columns: Sequence[Tensor]) -> DenseRows:
    rows: _Collected | None = None
    for chunk in slices(0, len(columns[0]), 1):
        with torch.enable_grad():
            number, outputs = value(module, *(column[chunk] for column in columns))
        gradients = {name: gradient[None] for name, gradient in _differentiated(number, trained).items()}
        if rows is None:
            rows = _Collected(len(columns[0]), gradients, [output[None] for output in outputs])
        else:
            rows.put(chunk, gradients, [output[None] for output in outputs])
    if rows is None:
        raise ValueError("no examples")
    return DenseRows(rows.gradients, rows.outputs, ", one example after the other")


def _differentiated(number: Tensor, trained: Mapping[str, Tensor]) -> Vector:
    """The gradient of a number; zero where it depends on nothing that is trained."""
    if not number.requires_grad:
        return {name: torch.zeros_like(value) for name, value in trained.items()}
    try:
        return plain_gradient(number, trained)
    except RuntimeError as error:
        raise InputError(f"one example's gradient cannot be computed: {first_line(error)}") from error


class _Collected:
    """Results of B examples, filled in some at a time, beginning with the first."""

    def __init__(self, examples: int, gradients: Mapping[str, Tensor], outputs: Sequence[Tensor]) -> None:
        self.gradients = {name: value.new_empty(examples, *value.shape[1:]) for name, value in gradients.items()}
        self.outputs = tuple(value.new_empty(examples, *value.shape[1:]) for value in outputs)
        self.put(slice(0, 1), gradients, outputs)

    def put(self, chunk: slice, gradients: Mapping[str, Tensor], outputs: Sequence[Tensor]) -> None:
        for name, value in gradients.items():
            self.gradients[name][chunk] = value
        for kept, output in zip(self.outputs, outputs, strict=True):
            kept[chunk] = output


class _Allocations(TorchDispatchMode):
    """Adds up the bytes of all tensors that are made inside the block, views left out, for how long they may live."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not any(result.alias_info for result in func._schema.returns):
            self.bytes += sum(value.nbytes for value in tree_leaves(made) if isinstance(value, Tensor))
        return made
