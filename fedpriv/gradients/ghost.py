"""The ghost operator: the gradients of a batch from one forward pass and one backward pass to the layers' outputs.

A rule makes the factors of a layer's parameters from its input and its output's gradient; other modules get dense
gradients of their part of the model alone. That is right when every parameter is used once, by its own layer (or by an
embedding and a Linear layer together), and the first axis counts the examples. Both are checked on what the model did;
where they do not hold, :class:`Entangled` says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves

from fedpriv.core.randomness import seeded_generators
from fedpriv.gradients.calls import (
    ModelPart,
    Output,
    ReachedNodes,
    find_parts,
    hidden_parameters,
    lengths_seen,
    reached,
    recorded,
    spread,
)
from fedpriv.gradients.dense import DenseRows, FactoredGradients, Forward, Loss, check_losses, dense_rows
from fedpriv.gradients.factors import Factor, Memory, Rows, Zero
from fedpriv.gradients.operator import DEFAULT_CHUNK_BYTES, Vector, first_line, flattened, full_precision
from fedpriv.gradients.rules import (
    attend,
    attention_factors,
    has_rule,
    is_ambiguous,
    is_usual,
    rule_of,
    summed_positions,
    tied_weight,
)

# Parts of a model without a rule: dense gradients of their part alone, compared with what happened in the batch.


# A subtree that is computed again, one example at a time, has to give the batch's outputs and the batch's gradient, up
# to this share of the largest output and of the gradient's norm; where autocast is on, up to the other one, a few times
# the precision of its type.
TOLERANCE = 1e-4
# The gradient of a bias of keys is a sum of what cancels, and rounding is all that is left of it: it may be so many
# roundings of the longest gradient off.
ROUNDINGS = 64
AUTOCAST_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Entangled:
    """Why the gradients of a model cannot be computed layer by layer."""

    reason: str


@dataclass(frozen=True)
class Errors:
    """The gradient of the total loss with respect to one output of a part."""

    output: Output  # which one
    values: Tensor  # (B, ...)


@dataclass(frozen=True)
class Made:
    """What became of a part: the factors of its parameters by their names in it, and the way, for people."""

    factors: dict[str, Factor]
    route: str


def is_column(value: Tensor, examples: int) -> bool:
    """Whether what a subtree takes or returns has one entry an example; a mask, say, is the same for all of them."""
    return value.ndim > 0 and len(value) == examples


def subtree(
    part: ModelPart, errors: list[Errors], sums: Vector | None, examples: int, memory: Memory, chunk_bytes: int
) -> Made | Entangled:
    """Dense gradients of a module without a rule, compared with what happened in the batch where that is given."""
    if is_usual(part.module) and [error.output.place for error in errors] == [0]:
        made = _attention(part, part.module, errors[0], sums is not None, memory)
        if made is not None:
            return made
    if not all(is_column(error.values, examples) for error in errors):
        return Entangled(f"the first axis of an output of {part} does not count the examples")
    columns = [value for value in part.call.tensors if is_column(value, examples)]

    def product(forward: Forward, *one: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        ours = iter(one[len(errors) :])
        tensors = (next(ours) if is_column(value, examples) else value for value in part.call.tensors)
        positional, named = part.call.with_tensors(tensors)
        returned = tree_leaves(forward(*positional, **named))
        outputs = tuple(returned[error.output.place] for error in errors)
        pairs = zip(outputs, one, strict=False)
        total = torch.stack([_inner(output, error) for output, error in pairs]).sum()
        return total, tuple(output.detach() for output in outputs)

    try:
        rows = dense_rows(part.module, part.trained, product, [*(e.values for e in errors), *columns], chunk_bytes)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return Entangled(f"{part} cannot be computed one example at a time ({first_line(error)})")
    if sums is not None and not _confirmed(part, errors, rows, sums, columns[0].device):
        return Entangled(f"{part} does not repeat what it did in the batch")
    factors: dict[str, Factor] = {local: Rows(value, memory.scratch) for local, value in rows.gradients.items()}
    return Made(factors, f"dense: {part.kind}{rows.way}")


def _attention(
    part: ModelPart, module: nn.MultiheadAttention, error: Errors, compared: bool, memory: Memory
) -> Made | None:
    """The factors of torch's attention; ``None`` where it is not seen to give the batch's outputs again."""
    positional, named = part.call.with_tensors(part.call.tensors)
    tolerance = AUTOCAST_TOLERANCE if torch.is_autocast_enabled(error.values.device.type) else TOLERANCE
    with full_precision(error.values.device):
        attended = attend(module, *positional, **named)
        if compared and not repeats(attended.output, error.output.value, tolerance):
            return None
        return Made(attention_factors(module, attended, error.values, memory), f"ghost: {part.kind}")


def _confirmed(part: ModelPart, errors: list[Errors], rows: DenseRows, sums: Vector, device: torch.device) -> bool:
    """Tell whether a subtree gave the batch's outputs again, and gradients that add up to the batch's."""
    tolerance = AUTOCAST_TOLERANCE if torch.is_autocast_enabled(device.type) else TOLERANCE
    expected = [error.output.value for error in errors]
    if not all(repeats(again[:, 0], value, tolerance) for again, value in zip(rows.outputs, expected, strict=True)):
        return False
    return _add_up([(rows.gradients[local], sums.get(part.full(local))) for local in part.trained], tolerance)


def _inner(output: Tensor, error: Tensor) -> Tensor:
    if output.shape != error.shape:
        raise ValueError(f"an output of shape {tuple(output.shape)} for one example, {tuple(error.shape)} in the batch")
    return (output * error).sum()


def repeats(again: Tensor, value: Tensor | None, tolerance: float) -> bool:
    """Tell whether a subtree gave the same outputs again: not so if it drew other random numbers."""
    if value is None:
        return False
    value = value.to(again.dtype)
    largest = float(value[torch.isfinite(value)].abs().max().nan_to_num()) if value.numel() else 0.0
    return bool(torch.isclose(again, value, rtol=tolerance, atol=tolerance * largest, equal_nan=True).all())


def _add_up(pairs: Sequence[tuple[Tensor, Tensor | None]], tolerance: float) -> bool:
    """Tell whether gradients (B, *shape) add up to the batch's: not so if their parameter is used elsewhere."""
    sizes = [torch.linalg.vector_norm(flattened(rows), dim=1).sum() for rows, _ in pairs]
    rounding = ROUNDINGS * torch.finfo(sizes[0].dtype).eps * torch.stack(sizes).max()
    apart = [torch.linalg.vector_norm(rows.sum(dim=0) - (0 if total is None else total)) for rows, total in pairs]
    return not any(bool(off > tolerance * size + rounding) for off, size in zip(apart, sizes, strict=True))


class GhostGradients(FactoredGradients):
    """Gradients from the inputs and the output gradients of the layers."""


@dataclass(frozen=True)
class Route:
    """How the gradients of a model are computed.

    Attributes:
        dense: why the whole model is dense, for people; empty: layer by layer.
        batch_first: whether the first axis of what attention takes is known to count the examples, so that another axis
            of the same length, of a sequence, misleads nobody.
        shared: names of embeddings that are asked once for all examples.
    """

    dense: str = ""
    batch_first: bool = False
    shared: tuple[str, ...] = ()


def ghost_gradients(
    model: nn.Module,  # maps (B, ...) to (B, ...), each example on its own; its mode is left as it is
    loss: Loss,  # (outputs, targets) -> losses of shape (B,)
    x: Tensor,  # inputs, (B, ...), B at least 1
    y: Tensor,  # targets, (B, ...)
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    *,
    route: Route | None = None,
) -> GhostGradients | Entangled:
    """Compute the gradients of a batch layer by layer, random layers drawing once, or say why that is not possible."""
    parts = list(find_parts(model))
    problem = problem_of_model(model, parts)
    if problem:
        return Entangled(problem)
    return gradients_of_parts(model, parts, loss, x, y, Memory(chunk_bytes), route)


def gradients_of_parts(
    model: nn.Module, parts: Sequence[ModelPart], loss: Loss, x: Tensor, y: Tensor, memory: Memory, route: Route | None
) -> GhostGradients | Entangled:
    """Compute the gradients of a batch from what is seen of a model's parts, or say why that is not possible."""
    chunk_bytes = 2 * memory.scratch
    try:
        with torch.enable_grad(), recorded(parts, len(x), None if route is None else route.shared):
            losses = loss(model(x), y)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        table = next((part for part in parts if part.spread), None)
        if table is None:
            raise
        return Entangled(f"{table} is asked once for all examples, and cannot be for each ({first_line(error)})")
    check_losses(losses, len(x))
    with torch.enable_grad():
        total = losses.sum()
    used = reached(total, parts)
    batch_first = route is not None and route.batch_first
    problem = next((problem for part in parts if (problem := _problem_of_part(part, used, len(x), batch_first))), "")
    if route is None and not problem:
        problem = (
            _problem_of_hiding(parts, total)
            or _problem_of_growth(model, parts, x)
            or _problem_of_sharing(model, parts, loss, x, y)
        )
    if problem:
        return Entangled(problem)
    try:
        errors, sums = _backward(parts, total)
    except RuntimeError as error:
        return Entangled(f"its backward pass fails ({first_line(error)})")
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    factors: dict[str, Factor] = {name: Zero(value, len(x)) for name, value in trained.items()}
    routes = _idle(model, parts)
    known = sums if route is None else None
    for name, pair in _pairs(model, parts, errors).items():
        table, layer = pair
        shared = _tied(table, layer, errors.pop(table.name)[0].values, errors.pop(layer.name)[0].values, memory)
        routes |= {part.name: f"ghost: {part.kind}" for part in pair}
        factors |= {name if local == "weight" else layer.full(local): each for local, each in shared.items()}
    for part in parts:
        if part.name not in errors:
            continue
        own = errors.pop(part.name)
        made = _ruled(part, own, memory) if part.ruled else subtree(part, own, known, len(x), memory, chunk_bytes)
        if isinstance(made, Entangled):
            return made
        routes[part.name] = made.route
        factors |= {part.full(local): factor for local, factor in made.factors.items() if local in part.trained}
        part.calls.clear()  # inputs that no factor needs are let go before the next layer's rows are written
    first = next(iter(trained.values()))
    shapes = {name: value.shape for name, value in trained.items()}
    return GhostGradients(factors, len(x), shapes, first.dtype, first.device, routes, chunk_bytes)


def _problem_of_hiding(parts: Sequence[ModelPart], total: Tensor) -> str:
    """Why gradients of layers are not to be seen: a backward pass of the model's own makes them."""
    trained = {part.full(local): value for part in parts for local, value in part.trained.items()}
    try:
        hidden = hidden_parameters(total, trained)
    except RuntimeError as error:
        return f"its backward pass fails ({first_line(error)})"
    return f"{hidden[0]} is used in a reentrant checkpoint or another backward pass of its own" if hidden else ""


def _problem_of_growth(model: nn.Module, parts: Sequence[ModelPart], x: Tensor) -> str:
    """Why the first axis of what a layer takes does not count the examples: with one more it is no longer."""
    try:
        with torch.enable_grad(), seeded_generators(0, x.device), lengths_seen(parts) as seen:
            model(torch.cat([x, x[:1]]))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return f"it does not take one example more ({first_line(error)})"
    fixed = (part for part in parts if not part.spread and seen.get(part.name, len(x) + 1) != len(x) + 1)
    return next((f"what {part} takes does not grow with the batch" for part in fixed), "")


def _problem_of_sharing(model: nn.Module, parts: Sequence[ModelPart], loss: Loss, x: Tensor, y: Tensor) -> str:
    """Why embeddings that are asked once must not be asked for each example: losses or gradients change."""
    tables = [part for part in parts if part.spread]
    names = [table.name for table in tables]

    def seen(shared: Sequence[str]) -> list[Tensor]:
        with torch.enable_grad(), seeded_generators(0, x.device), spread(tables, len(x), shared):
            losses = loss(model(x), y)
            weights = [table.trained["weight"] for table in tables]
            found = torch.autograd.grad(losses.sum(), weights, allow_unused=True, materialize_grads=True)
            return [losses.detach(), *found]

    if not tables or all(repeats(again, value, TOLERANCE) for again, value in zip(seen(names), seen(()), strict=True)):
        return ""
    return f"{tables[0]} is asked once for all examples, and the model does otherwise when it is asked for each"


def _idle(model: nn.Module, parts: Sequence[ModelPart]) -> dict[str, str]:
    """The routes of layers before anything is known of their use: frozen ones, and the others as unused."""
    names = {part.name for part in parts}
    inside = tuple(part.full("") for part in parts if not part.ruled)
    routes = {}
    for name, layer in model.named_modules():
        if name in names:
            routes[name] = f"unused: {type(layer).__name__}"
        elif any(value is not None for value in layer._parameters.values()) and not name.startswith(inside):
            routes[name] = f"frozen: {type(layer).__name__}"
    return routes


def problem_of_model(model: nn.Module, parts: Sequence[ModelPart]) -> str:
    """Why a model cannot be taken apart, before it runs; empty if it may be."""
    if parts[0].module is model and not parts[0].ruled:
        return f"{type(model).__name__} holds parameters itself"
    if _has_any_global_hook():
        return "torch has hooks for all modules"
    for part in parts:
        if isinstance(part.module, torch.jit.ScriptModule):
            return f"{part} is compiled by TorchScript"
    seen: dict[int, str] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if value.requires_grad and id(value) in seen and not _is_pair(model, seen[id(value)], name):
            return f"{name} is the same parameter as {seen[id(value)]}"
        if value._backward_hooks:
            return f"{name} has a hook on its gradient"
        seen[id(value)] = name
    return ""


def _is_pair(model: nn.Module, first: str, second: str) -> bool:
    """Tell whether two names of a weight are those of an embedding and of a Linear layer."""
    layers = [model.get_submodule(name.rpartition(".")[0]) for name in (first, second)]
    return {type(layer) for layer in layers} == {nn.Embedding, nn.Linear} and all(has_rule(layer) for layer in layers)


def _pairs(
    model: nn.Module, parts: Sequence[ModelPart], errors: Mapping[str, object]
) -> dict[str, tuple[ModelPart, ModelPart]]:
    """Parameter's name -> embedding and Linear layer that share it, where the losses depend on both."""
    names = {id(value): name for name, value in model.named_parameters()}
    sharing: dict[str, list[ModelPart]] = {}
    for part in parts:
        if part.ruled and part.name in errors and "weight" in part.trained:
            sharing.setdefault(names[id(part.trained["weight"])], []).append(part)
    both = {name: sorted(pair, key=lambda part: part.kind) for name, pair in sharing.items() if len(pair) == 2}
    return {name: (table, layer) for name, (table, layer) in both.items()}


def _tied(table: ModelPart, layer: ModelPart, looked_up: Tensor, error: Tensor, memory: Memory) -> dict[str, Factor]:
    """The factors of a weight that an embedding and a Linear layer share, and of the Linear layer's bias."""
    if not isinstance(table.module, nn.Embedding):
        raise TypeError(f"{table} is no embedding")
    dtype = layer.trained["weight"].dtype
    indices, x = (part.call.tensors[0] for part in (table, layer))
    looked_up, error = looked_up.to(dtype), error.to(dtype)
    with full_precision(x.device):
        made = {"weight": tied_weight(table.module, indices, looked_up, (x.to(dtype), error), memory)}
        if "bias" in layer.trained:
            made["bias"] = summed_positions(error.reshape(len(error), -1, error.shape[-1]), 1, memory)
    return made


def _problem_of_part(part: ModelPart, used: ReachedNodes, examples: int, batch_first: bool) -> str:
    """Why the gradients of a part do not follow from what was seen of it; empty if they do, or if it is not used."""
    entered = any(output.edge.node in used.nodes for call in part.calls for output in call.outputs)
    outside = any(id(value) in used.leaves for value in part.trained.values())
    if not entered:
        return f"the parameters of {part} are used outside of it" if outside else ""
    if len(part.calls) != 1:
        return f"{part} is called {len(part.calls)} times"
    if part.ruled and outside:
        return f"a parameter of {part} is also used outside of it"
    if part.call.changed:
        return f"the input of {part} is changed in place"
    if part.ruled:
        unclear = len(part.call.tensors) != 1 or is_ambiguous(part.module, part.call.tensors[0], examples)
    else:
        columns = [value for value in part.call.tensors if is_column(value, examples)]
        usual = is_usual(part.module)
        others = [value.shape[1:2] if usual else value.shape[1:] for value in columns]
        # Whether the first axis of the only tensor counts the examples is seen with one example more.
        known = len(part.call.tensors) == 1 or (usual and batch_first) or examples == 1
        unclear = not columns or (not known and any(examples in shape for shape in others))
    return f"the first axis of the input of {part} may not count the examples" if unclear else ""


def _backward(parts: Sequence[ModelPart], total: Tensor) -> tuple[dict[str, list[Errors]], Vector]:
    """Return gradients of the parts' outputs, as far as the loss depends on them, and of the subtrees' parameters."""
    outputs = [(part, output) for part in parts if len(part.calls) == 1 for output in part.call.outputs]
    subtrees = [part for part in parts if not part.ruled]
    parameters = {part.full(local): value for part in subtrees for local, value in part.trained.items()}
    wanted = [output.edge for _, output in outputs] + [get_gradient_edge(value) for value in parameters.values()]
    if not wanted or not total.requires_grad:
        return {}, {}
    gradients = torch.autograd.grad(total, wanted, allow_unused=True)
    errors: dict[str, list[Errors]] = {}
    for (part, output), values in zip(outputs, gradients, strict=False):
        if values is not None:
            errors.setdefault(part.name, []).append(Errors(output, values))
    sums = zip(parameters, gradients[len(outputs) :], strict=True)
    return errors, {name: value for name, value in sums if value is not None}


def _ruled(part: ModelPart, errors: list[Errors], memory: Memory) -> Made:
    rule = rule_of(part.module)
    if rule is None:
        raise TypeError(f"{part} has no rule")
    dtype = next(iter(part.trained.values())).dtype
    x, error = part.call.tensors[0], errors[0].values
    x = x.to(dtype) if x.is_floating_point() else x
    with full_precision(x.device):
        return Made(rule(part.module, x, error.to(dtype), memory), f"ghost: {part.kind}")
