"""The ghost operator: the gradients of a batch from one forward pass and one backward pass to the layers' outputs.

Where a parameter meets the examples is traced (:mod:`tracing`). Rules make the gradients of layers, autograd those of
parameters that were copied for each example, and what was computed from parameters passes its gradients on to these.
Modules that hold a parameter whose use has no rule get dense gradients of their part of the model alone. All of it is
tried before it is relied on; where it does not hold, :class:`Entangled` says why.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedpriv.core.randomness import generator_states, seeded_generators
from fedpriv.gradients.calls import (
    Call,
    ModelPart,
    Output,
    hidden_parameters,
    plain_gradient,
    reached,
    recorded,
)
from fedpriv.gradients.dense import DenseRows, FactoredGradients, Forward, Loss, check_losses, dense_rows, grouped
from fedpriv.gradients.factors import Factor, Memory, Sizes, Written, Zero
from fedpriv.gradients.operator import DEFAULT_CHUNK_BYTES, Vector, first_line, full_precision
from fedpriv.gradients.rules import Contribution, factor_of
from fedpriv.gradients.tracing import Otherwise, Source, Step, Tracer, Use

# Gradients of a batch add up to that of plain training, and outputs of a part that is computed again are the batch's,
# up to this share of the largest; where autocast is on, up to the other one, a few times the precision of its type.
TOLERANCE = 1e-4
AUTOCAST_TOLERANCE = 3e-2
# Of what cancels, rounding is all that is left: so many roundings of the longest gradient, or of what is summed.
ROUNDINGS = 64

# Gradients are written out to be kept, where that is faster, in as many bytes as the parameters take, or in so many;
# in all that there are where more is asked than norms and a sum.
LEAST_KEPT = 1 << 24

# Numbers of examples in which a model is traced: two that divide no size of its parameters.
TRIED = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31)

# With these a model that may decide by random numbers is traced again.
SEEDS = range(1, 8)

# What models raise that do not take other inputs than theirs.
RAISED = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Entangled:
    """Why the gradients of a model cannot be computed layer by layer."""

    reason: str


Columns = tuple[tuple[bool, ...], ...]


@dataclass(frozen=True)
class Route:
    """How the gradients of a model are computed, whatever the batch.

    Attributes:
        dense: why the whole model is dense, for people; empty: layer by layer.
        steps: what happens to the parameters in a forward pass; ``None``: it is found out on the batch.
        apart: names of modules of which all is dense -> why.
        columns: of these modules -> for each call which of the tensors that it is given have a row for each example.
        ways: modules that hold parameters -> how their gradients are computed, for people; empty: it is found out.
    """

    dense: str = ""
    steps: tuple[Step, ...] | None = None
    apart: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Columns] = field(default_factory=dict)
    ways: Mapping[str, str] = field(default_factory=dict)


class GhostGradients(FactoredGradients):
    """Gradients from the inputs and the output gradients of the layers."""


def ghost_gradients(
    model: nn.Module,  # maps (B, ...) to (B, ...), each example on its own; its mode is left as it is
    loss: Loss,  # (outputs, targets) -> losses of shape (B,)
    x: Tensor,  # inputs, (B, ...), B at least 1
    y: Tensor,  # targets, (B, ...)
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    *,
    route: Route | None = None,
    often: bool | None = None,  # whether more than norms and a sum will be asked for; None: perhaps
    trained: Mapping[str, Tensor] | None = None,  # the trained parameters; None: they are looked for
) -> GhostGradients | Entangled:
    """Compute the gradients of a batch layer by layer, random layers drawing once, or say why that is not possible."""
    if route is None or route.steps is None:
        route = traced_route(model, loss, x, y, chunk_bytes)
    if route.dense:
        return Entangled(route.dense)
    graph = _passed(model, loss, x, y, route, trained)
    if isinstance(graph, Entangled):
        return graph
    most = None if often else max(LEAST_KEPT, sum([value.nbytes for value in graph.trained.values()]))
    return gradients_of(model, graph, len(x), Memory(chunk_bytes, most=most, bounds=often is not False), route)


# ---- one pass -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """What a forward pass left behind."""

    total: Tensor  # the sum of the losses
    trained: Mapping[str, Tensor]  # all parameters that are trained
    uses: list[Use]
    copies: Sequence[tuple[Source, Tensor]] = ()  # of sources, for each example, (B, *shape)
    stand_ins: Sequence[tuple[Source, Tensor]] = ()
    parts: Sequence[ModelPart] = ()  # that are dense


def _passed(
    model: nn.Module,
    loss: Loss,
    x: Tensor,
    y: Tensor,
    route: Route,
    trained: Mapping[str, Tensor] | None = None,
    with_stand_ins: bool = False,
) -> Graph | Entangled:
    """Run a model along a route."""
    trained = _trained(model) if trained is None else trained
    parts, traced = _taken_apart(model, trained, route.apart)
    tracer = Tracer(traced, len(x), route.steps, with_stand_ins=with_stand_ins)
    try:
        with torch.enable_grad(), recorded(parts), _uncompiled(), tracer:
            losses = loss(model(x), y)
            check_losses(losses, len(x))
            total = losses.sum()
    except Otherwise as error:
        return Entangled(str(error))
    if not tracer.complete:
        return Entangled("it does not use all parameters that it was seen to use")
    return Graph(total, trained, tracer.uses, list(tracer.copies.values()), tracer.stand_ins, parts)


def gradients_of(
    model: nn.Module, graph: Graph, examples: int, memory: Memory, route: Route
) -> GhostGradients | Entangled:
    """Return the gradients of what a forward pass left behind, or say why they do not follow from it."""
    changed = [str(part) for part in graph.parts for call in part.calls if call.changed]
    changed += ["a layer" for use in graph.uses if use.operation.input._version != use.version]
    if changed:
        return Entangled(f"the input of {changed[0]} is changed in place")
    try:
        given = _backward(graph)
    except RuntimeError as error:
        return Entangled(f"its backward pass fails ({first_line(error)})")
    graph.uses.clear()  # what they hold goes as the factors are made
    trained = graph.trained
    first = next(iter(trained.values()))
    with full_precision(first.device):
        factors = _factors(given, trained, examples, memory)
    routes = dict(route.ways) or _routes(model, factors, route.apart)
    names = {id(value): name for name, value in trained.items()} if graph.parts else {}
    for part in graph.parts:
        rows = dense_part(part, given.errors, route.columns[part.name], memory)
        if isinstance(rows, Entangled):
            return rows
        own, way = rows
        factors |= {names[id(part.trained[local])]: factor for local, factor in own.items()}
        routes.setdefault(part.name, f"dense: {part.kind} ({route.apart[part.name]}){way}")
    shapes = {name: value.shape for name, value in trained.items()}
    parts = {name: factors.get(name) or Zero(value.detach(), examples) for name, value in trained.items()}
    groups = grouped(parts, examples, 2 * memory.scratch)
    return GhostGradients(groups, examples, shapes, first.dtype, first.device, routes, 2 * memory.scratch)


def _uncompiled() -> ExitStack:
    """Run what torch compiled as it was before."""
    stack = ExitStack()
    if "torch._dynamo.eval_frame" in sys.modules:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    return stack


def _part(model: nn.Module, name: str) -> ModelPart:
    module = model.get_submodule(name)
    return ModelPart(name, module, {n: v for n, v in module.named_parameters() if v.requires_grad})


@dataclass(frozen=True)
class Errors:
    """The gradient of the total loss with respect to one output of a part."""

    output: Output  # which one
    values: Tensor  # (B, ...)


@dataclass(frozen=True)
class Given:
    """What a backward pass gave."""

    uses: list[tuple[Use, Tensor]]  # layers, and the gradients of their outputs
    copies: list[tuple[Source, Tensor]]  # sources, and their gradients for each example, (B, *shape)
    errors: dict[int, list[Errors]]  # id of a call of a module without a rule -> gradients of its outputs


def _backward(graph: Graph) -> Given:
    """Return the gradients of all that was recorded, as far as the losses depend on it."""
    uses, copies = graph.uses, graph.copies
    outputs = [(call, output) for part in graph.parts for call in part.calls for output in call.outputs]
    wanted = [use.edge for use in uses] + [get_gradient_edge(copy) for _, copy in copies]
    wanted += [output.edge for _, output in outputs]
    if not wanted or not graph.total.requires_grad:
        return Given([], [], {})
    gradients = iter(torch.autograd.grad(graph.total, wanted, allow_unused=True))
    of_uses = [(use, error) for use, error in zip(uses, gradients, strict=False) if error is not None]
    of_copies = [(source, rows) for (source, _), rows in zip(copies, gradients, strict=False) if rows is not None]
    errors: dict[int, list[Errors]] = {}
    for (call, output), values in zip(outputs, gradients, strict=True):
        if values is not None:
            errors.setdefault(id(call), []).append(Errors(output, values))
    return Given(of_uses, of_copies, errors)


def _factors(given: Given, trained: Mapping[str, Tensor], examples: int, memory: Memory) -> dict[str, Factor | Written]:
    """The factors of all parameters that layers, or autograd, gave gradients."""
    given_to = [id(source.value) for use, _ in given.uses for source in use.sources.values()]
    uses_left = Counter(given_to + [id(source.value) for source, _ in given.copies])
    gathered = _Gathered(uses_left, trained, memory)
    dtype = next(iter(trained.values())).dtype
    # What has several uses comes first: it gains most from being written out.
    if len(uses_left) < len(given_to):
        given.uses.sort(key=lambda pair: max([uses_left[id(source.value)] for source in pair[0].sources.values()]))
    while given.uses:  # what no factor needs is let go before the next layer's rows are written
        use, error = given.uses.pop()
        made = use.operation.contributions(error, examples, use.place, memory, dtype)
        for role, source in use.sources.items():
            gathered.add(source, made[role]())
    for source, rows in given.copies:
        gathered.add(source, memory.rows(rows if rows.is_complex() else rows.to(dtype)))
    return gathered.finished()


class _Gathered:
    """What parameters, and tensors computed from them, are given; each is passed on once all of it is there."""

    def __init__(self, uses_left: Counter[int], trained: Mapping[str, Tensor], memory: Memory) -> None:
        self._trained = trained
        self._memory = memory
        self._left = uses_left
        self._bounds: list[Sizes] = []
        self._waiting = 0  # bytes that are kept for these
        self._found: dict[int, list[Contribution]] = {}
        self._factors: dict[str, list[Factor | Written]] = {}

    def add(self, source: Source, contribution: Contribution) -> None:
        """Take what a parameter, or what was computed from parameters, is given."""
        number = id(source.value)
        left = self._left[number] = self._left[number] - 1
        parts: Sequence[Contribution] = (contribution,)
        if left or number in self._found:
            self._found.setdefault(number, []).append(contribution)
            if left:
                return
            parts = self._found.pop(number)
        factor = factor_of(source.value.shape, parts, self._memory)
        for name, share in _passed_on(source, factor, self._trained, self._memory):
            self._factors.setdefault(name, []).append(share)
            if bounds := share.bounds():
                self._bounds += bounds
                self._waiting += sum([bound.waits for bound in bounds])
        if self._waiting > self._memory.scratch // 8:
            Sizes.compute(self._bounds)
            self._bounds.clear()
            self._waiting = 0

    def finished(self) -> dict[str, Factor | Written]:
        """Return the parameters' factors."""
        return {
            name: found[0] if len(found) == 1 else factor_of(self._trained[name].shape, found, self._memory)
            for name, found in self._factors.items()
        }


def _passed_on(
    source: Source, factor: Factor | Written, trained: Mapping[str, Tensor], memory: Memory
) -> Sequence[tuple[str, Factor | Written]]:
    """What the gradients of a tensor that was computed from parameters give these."""
    value, roots = source.value, source.roots
    if value is trained[roots[0]]:
        return ((roots[0], factor),)
    rows = factor.rows if isinstance(factor, Written) else factor.rows(0, factor.examples)
    pulled = zip(roots, _pulled_back(value, [trained[root] for root in roots], rows.to(value.dtype)), strict=True)
    return [(name, memory.rows(gradients)) for name, gradients in pulled if gradients is not None]


def _pulled_back(value: Tensor, parameters: Sequence[Tensor], rows: Tensor) -> Sequence[Tensor | None]:
    """The gradients (B, *shape) of parameters from those of what was computed from them."""
    pull = partial(torch.autograd.grad, value, parameters, retain_graph=True, allow_unused=True)
    try:
        return pull(rows, is_grads_batched=True)
    except RuntimeError:  # a function that torch cannot map over the examples
        each = zip(*(pull(row) for row in rows), strict=True)
        return [None if one[0] is None else torch.stack(one) for one in each]


def _routes(model: nn.Module, given: Iterable[str], apart: Iterable[str]) -> dict[str, str]:
    """The routes of modules that hold parameters themselves, for people, but for those that are dense."""
    used, inside = set(given), tuple(f"{name}." for name in apart)
    routes = {}
    names = {id(value): name for name, value in model.named_parameters()}
    for name, layer in model.named_modules():
        own = [value for value in layer._parameters.values() if value is not None]
        if not own or name.startswith(inside) or name in apart:
            continue
        kind = type(layer).__name__
        if not any(value.requires_grad for value in own):
            routes[name] = f"frozen: {kind}"
        else:
            seen = any(names[id(value)] in used for value in own)
            routes[name] = f"ghost: {kind}" if seen else f"unused: {kind}"
    return routes


# ---- modules without a rule -----------------------------------------------------------------------------------------


def is_column(value: Tensor, examples: int) -> bool:
    """Whether what a module takes or returns has one entry an example; a mask, say, is the same for all of them."""
    return value.ndim > 0 and len(value) == examples


def dense_part(
    part: ModelPart, errors: Mapping[int, list[Errors]], columns: Columns, memory: Memory
) -> tuple[dict[str, Factor | Written], str] | Entangled:
    """Return the factors of a module's parameters, dense gradients of each of its calls, and the way, for people."""
    found: dict[str, list[Contribution]] = {}
    way = ""
    if len(part.calls) != len(columns):
        return Entangled(f"{part} is called {len(part.calls)} times, not {len(columns)}")
    for call, chosen in zip(part.calls, columns, strict=True):
        own = errors.get(id(call), [])
        if not own:
            continue
        rows = _dense_call(part, call, own, chosen, 2 * memory.scratch)
        if isinstance(rows, Entangled):
            return rows
        way = rows.way
        for local, value in rows.gradients.items():
            found.setdefault(local, []).append(memory.rows(value))
    return {local: factor_of(part.trained[local].shape, each, memory) for local, each in found.items()}, way


def _dense_call(
    part: ModelPart, call: Call, errors: Sequence[Errors], chosen: Sequence[bool], chunk_bytes: int
) -> DenseRows | Entangled:
    """Dense gradients of a call, whose outputs have to be those of the batch."""
    columns = [value for value, is_chosen in zip(call.tensors, chosen, strict=True) if is_chosen]
    if not columns:
        return Entangled(f"the first axis of the input of {part} does not count the examples")
    if not all(is_column(value, len(columns[0])) for value in (*columns, *(error.values for error in errors))):
        return Entangled(f"the first axis of an output of {part} does not count the examples")

    def product(forward: Forward, *one: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        ours = iter(one[len(errors) :])
        tensors = (next(ours) if own else value for value, own in zip(call.tensors, chosen, strict=True))
        positional, named = call.with_tensors(tensors)
        returned = tree_leaves(forward(*positional, **named))
        outputs = tuple(returned[error.output.place] for error in errors)
        total = torch.stack([_inner(output, error) for output, error in zip(outputs, one, strict=False)]).sum()
        return total, tuple(output.detach() for output in outputs)

    try:
        rows = dense_rows(part.module, part.trained, product, [*(e.values for e in errors), *columns], chunk_bytes)
    except RAISED as error:
        return Entangled(f"{part} cannot be computed one example at a time ({first_line(error)})")
    expected = [error.output.value for error in errors]
    tolerance = _tolerance(columns[0])
    if not all(repeats(again[:, 0], value, tolerance) for again, value in zip(rows.outputs, expected, strict=True)):
        return Entangled(f"{part} does not repeat what it did in the batch")
    return rows


def _inner(output: Tensor, error: Tensor) -> Tensor:
    if output.shape != error.shape:
        raise ValueError(f"an output of shape {tuple(output.shape)} for one example, {tuple(error.shape)} in the batch")
    return (output * error).sum()


def repeats(again: Tensor, value: Tensor, tolerance: float) -> bool:
    """Tell whether the same numbers came out again: not so if others were drawn."""
    value = value.to(again.dtype)
    largest = float(value[torch.isfinite(value)].abs().max().nan_to_num()) if value.numel() else 0.0
    return bool(torch.isclose(again, value, rtol=tolerance, atol=tolerance * largest, equal_nan=True).all())


def _tolerance(values: Tensor) -> float:
    return AUTOCAST_TOLERANCE if torch.is_autocast_enabled(values.device.type) else TOLERANCE


# ---- the route ------------------------------------------------------------------------------------------------------


def traced_route(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Route:
    """Find out how the gradients of a model are computed, and try it on a batch."""
    problem = problem_of_model(model)
    apart: dict[str, str] = {}
    while not problem:
        traced = _traced(model, loss, x, y, apart)
        if isinstance(traced, Entangled):
            return Route(traced.reason)
        steps, columns, blamed = traced
        route = Route("", steps, dict(apart), columns)
        if not blamed:
            problem, blamed, ways = _tried(model, loss, x, y, route, chunk_bytes)
        if not problem and not blamed:
            return replace(route, ways=ways)
        known = set(apart)
        for name, reason in blamed.items():
            problem = problem or _set_apart(name, reason, apart, known)
    return Route(problem)


def _set_apart(name: str, reason: str, apart: dict[str, str], known: Iterable[str]) -> str:
    """Have the module that holds a parameter be dense, or the one around it; return why not, if it is the model."""
    owner = name.rpartition(".")[0]
    while owner and owner in known:
        owner = owner.rpartition(".")[0]
    if not owner:
        return f"{name}: {reason}"
    if not any(owner == other or owner.startswith(f"{other}.") for other in set(apart).difference(known)):
        for inner in [other for other in apart if other.startswith(f"{owner}.")]:
            del apart[inner]
        apart[owner] = reason
    return ""


def _traced(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, apart: Iterable[str]
) -> tuple[tuple[Step, ...], dict[str, Columns], dict[str, str]] | Entangled:
    """Return what happens to parameters with two other numbers of examples, or why nothing follows from it for some."""
    sizes = {size for value in chain(model.parameters(), model.buffers()) for size in value.shape}
    numbers = sorted(TRIED, key=lambda number: any(size % number == 0 for size in sizes if size))
    reason = ""
    for pair in zip(numbers[::2], numbers[1::2], strict=False):
        try:
            one, other = (_noted(model, loss, x, y, apart, number) for number in pair)
            again = [_noted(model, loss, x, y, apart, pair[0], seed) for seed in SEEDS] if one.draws else []
            if any((noted.steps, noted.columns) != (one.steps, one.columns) for noted in again):
                return Entangled("it draws at random which functions it calls")
        except RAISED as error:
            return Entangled(f"it does not take another number of examples ({first_line(error)})")
        if one.blamed or other.blamed:
            return (), {}, other.blamed | one.blamed
        steps = [step.common(same) for step, same in zip(one.steps, other.steps, strict=False)]
        if len(one.steps) == len(other.steps) and None not in steps and one.columns == other.columns:
            return tuple(step for step in steps if step is not None), one.columns, {}
        reason = "it works otherwise with another number of examples"
    return Entangled(reason)


class _Noted(NamedTuple):
    """What was seen of a forward pass."""

    draws: bool  # random numbers, by which it may decide what it calls
    steps: Sequence[Step]
    columns: dict[str, Columns]  # of dense modules
    blamed: dict[str, str]  # names of parameters whose gradients do not follow -> why


class _Decisions(TorchFunctionMode):
    """Notes whether a number of a tensor is taken out of it, to decide by."""

    taken = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.taken |= func in (Tensor.__bool__, Tensor.__float__, Tensor.item)
        return func(*args, **(kwargs or {}))


def _noted(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, apart: Iterable[str], examples: int, seed: int = 0
) -> _Noted:
    some = torch.arange(examples, device=x.device) % len(x)
    parts, trained = _taken_apart(model, _trained(model), apart)
    tracer = Tracer(trained, examples)
    with torch.enable_grad(), seeded_generators(seed, x.device), recorded(parts), _uncompiled(), tracer:
        before = generator_states()
        with _Decisions() as decisions:
            outputs = model(x[some])
        drawn = [now != then for now, then in zip(generator_states(), before, strict=True)]
        with suppress(*RAISED):  # a loss of this very batch
            loss(outputs, y[some.to(y.device)]).sum()
    columns = {
        part.name: tuple(tuple(is_column(value, examples) for value in call.tensors) for call in part.calls)
        for part in parts
    }
    draws = any(drawn[1:]) or (drawn[0] and decisions.taken)
    return _Noted(draws, tracer.steps, columns, tracer.blamed)


def _tried(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, route: Route, chunk_bytes: int
) -> tuple[str, dict[str, str], dict[str, str]]:
    """Compare with plain training, and where one example is another one; return what is wrong, and all ways."""
    trained = _trained(model)

    def plain() -> tuple[list[str], Vector]:
        with seeded_generators(0, x.device), torch.enable_grad():
            total = loss(model(x), y).sum()
            hidden = hidden_parameters(total, trained)
            return hidden, {} if hidden or not total.requires_grad else plain_gradient(total, trained)

    try:
        hidden, wanted = plain()
    except RuntimeError as error:
        return f"its backward pass fails ({first_line(error)})", {}, {}
    if hidden:
        return f"{hidden[0]} is used in a reentrant checkpoint or another backward pass of its own", {}, {}
    with seeded_generators(0, x.device):
        graph = _passed(model, loss, x, y, route, with_stand_ins=True)
    if isinstance(graph, Entangled):
        return graph.reason, {}, {}
    outside = _used_outside(model, graph)
    if outside:
        return "", dict.fromkeys(outside, "it is used by something else than a function of torch"), {}
    with seeded_generators(1, x.device):  # a part that is computed again must not draw by chance what the batch drew
        gradients = gradients_of(model, graph, len(x), Memory(chunk_bytes), route)
    if isinstance(gradients, Entangled):
        return gradients.reason, {}, {}
    off = _other_sum(gradients, wanted, _tolerance(x))
    if off and torch.equal(plain()[1][off], wanted[off]):
        return f"gradients of {off} for each example do not add up to that of the batch", {}, {}
    return _problem_of_others(model, loss, x, y, route, chunk_bytes), {}, gradients.routes


def _used_outside(model: nn.Module, graph: Graph) -> list[str]:
    """Names of parameters that the losses depend on in another way than was seen."""
    nodes: dict[Node, Sequence[Node]] = {
        use.edge.node: () if use.entry is None else (use.entry.node,) for use in graph.uses
    }
    calls = [call for part in graph.parts for call in part.calls]
    nodes |= {output.edge.node: call.sources for call in calls for output in call.outputs}
    leaves = reached(graph.total, nodes).leaves
    names = {id(value): name for name, value in model.named_parameters()}
    names |= {id(value): source.roots[0] for source, value in graph.stand_ins}
    return [name for number, name in names.items() if number in leaves]


def _other_sum(gradients: GhostGradients, wanted: Vector, tolerance: float) -> str:
    """The first parameter whose gradients do not add up to the batch's, but for rounding; empty: there is none."""
    sums = gradients.combine(gradients.norms().new_ones(gradients.examples))
    rounding, whole = ROUNDINGS * torch.finfo(gradients.dtype).eps, float(gradients.norms().sum())
    for name, value in wanted.items():
        rounded = rounding * max(whole, float(gradients.magnitudes((name,)).sum()))
        room = tolerance * float(gradients.norms((name,)).sum()) + rounded
        if float(torch.linalg.vector_norm(sums[name] - value)) > room:
            return name
    return ""


def _problem_of_others(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, route: Route, chunk_bytes: int) -> str:
    """Why an axis of examples and positions may lie otherwise: another example changes others' gradients."""
    if all(share == 1 for step in route.steps or () for _, share in step.axes):
        return ""
    some = torch.arange(max(3, len(x)), device=x.device) % len(x)
    x, y = x[some], y[some.to(y.device)]
    other, label = x.clone(), y.clone()
    other[0], label[0] = x[-1].flip(*range(x.ndim - 1)) if x.ndim > 1 else x[-1], y[-1]
    seen = []
    for images, labels in ((x, y), (other, label)):
        with seeded_generators(0, x.device):
            gradients = ghost_gradients(model, loss, images, labels, chunk_bytes, route=route)
        if isinstance(gradients, Entangled):
            return gradients.reason
        generator = torch.Generator().manual_seed(0)
        vector = {name: torch.randn(shape, generator=generator) for name, shape in gradients.shapes.items()}
        vector = {name: value.to(gradients.device, gradients.dtype) for name, value in vector.items()}
        seen.append(torch.stack([gradients.norms(), gradients.dot(vector)])[:, 1:])
    first, again = seen
    return "" if repeats(again, first, _tolerance(x)) else "an axis may not count the examples first"


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def _taken_apart(
    model: nn.Module, trained: Mapping[str, Tensor], apart: Iterable[str]
) -> tuple[list[ModelPart], Mapping[str, Tensor]]:
    """The modules that are dense, and the trained parameters outside of them."""
    parts = [_part(model, name) for name in apart]
    inside = {id(value) for part in parts for value in part.trained.values()}
    return parts, {name: value for name, value in trained.items() if id(value) not in inside} if parts else trained


def problem_of_model(model: nn.Module) -> str:
    """Why a model cannot be taken apart, before it runs; empty if it may be."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name or 'the model'} ({type(module).__name__}) is compiled by TorchScript"
    hooked = [name for name, value in model.named_parameters() if value.requires_grad and value._backward_hooks]
    return f"{hooked[0]} has a hook on its gradient" if hooked else ""
