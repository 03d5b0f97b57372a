"""The ghost operator: the gradients of a batch from one forward pass and one backward pass to the layers' outputs.

Each layer keeps its input and the gradient of its output, from which a rule makes the factors of its parameters. Other
modules that hold parameters get dense gradients of their own, of their part of the model alone. That is right when
every parameter is used once, by its own layer, and the first axis counts the examples. Both are checked on what the
model did; where they do not hold, :class:`Entangled` says why, and the whole model has to be dense.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fedpriv.gradients.dense import Forward, Loss, check_losses, dense_rows
from fedpriv.gradients.factored import FactoredGradients
from fedpriv.gradients.factors import Factor, Memory, Rows, Zero
from fedpriv.gradients.operator import DEFAULT_CHUNK_BYTES, full_precision
from fedpriv.gradients.rules import RULES, has_rule, is_ambiguous

__all__ = ["Entangled", "GhostGradients", "ghost_gradients"]

# Dense gradients of a part of the model have to sum to the batch's gradient up to this share of its norm; where
# autocast is on, up to the other one, a few times the precision of its type.
SUM_TOLERANCE = 1e-3
AUTOCAST_SUM_TOLERANCE = 3e-2


class GhostGradients(FactoredGradients):
    """Gradients from the inputs and the output gradients of the layers."""


@dataclass(frozen=True)
class Entangled:
    """Why the gradients of a model cannot be had layer by layer."""

    reason: str


@dataclass
class Call:
    """What a hook saw of one call of a layer.

    The output is kept as an edge of autograd's graph: a later in-place operation changes the tensor, not the edge.
    """

    inputs: tuple[Any, ...]
    versions: tuple[int, ...]
    edge: GradientEdge | None
    plain: bool


@dataclass
class Part:
    """A module whose parameters are handled together: a layer with a rule, or a subtree without one.

    Attributes:
        name: in the model.
        module: itself.
        ruled: whether there is a rule for it.
        trained: its trained parameters by their names in the module; of a subtree all of them.
        calls: what the hooks saw.
    """

    name: str
    module: nn.Module
    ruled: bool
    trained: Mapping[str, Tensor]
    calls: list[Call] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.kind})"

    @property
    def kind(self) -> str:
        """What the module is."""
        return type(self.module).__name__

    def full(self, local: str) -> str:
        """The name of a parameter in the model."""
        return f"{self.name}.{local}" if self.name else local

    @property
    def call(self) -> Call:
        """The only call."""
        return self.calls[0]


def ghost_gradients(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> GhostGradients | Entangled:
    """Compute the gradients of a batch layer by layer, or say why they cannot be had that way.

    Layers that draw random numbers (dropout) do so once, for the whole batch at once.

    Args:
        model: maps (B, ...) to (B, ...), each example on its own; its mode is left as it is. It is called once.
        loss: (outputs, targets) -> losses of shape (B,).
        x: inputs, (B, ...), B at least 1.
        y: targets, (B, ...).
        chunk_bytes: what may be taken beyond the inputs and the output gradients of the layers, and beyond the rows of
            layers without a rule.

    Raises:
        InputError: the loss does not return one number an example.
    """
    parts = list(_parts(model, ""))
    problem = _static_problem(model, parts)
    if problem:
        return Entangled(problem)
    with torch.enable_grad():
        with _recorded(parts):
            losses = loss(model(x), y)
        check_losses(losses, len(x))
        total = losses.sum()
    used = _used(parts, total)
    problem = next((problem for part, uses in used if (problem := _problem(part, uses, len(x)))), "")
    if problem:
        return Entangled(problem)
    errors, sums = _backward(parts, total)
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    factors: dict[str, Factor] = {name: Zero(value, len(x)) for name, value in trained.items()}
    routes = {part.name: f"unused: {part.kind}" for part in parts}
    memory = Memory(chunk_bytes)
    for part, _ in used:
        if part.name not in errors:
            return Entangled(f"the parameters of {part} are used outside of it")
        error = errors.pop(part.name)
        if part.ruled:
            made, routes[part.name] = _ruled(part, error, memory), f"ghost: {part.kind}"
        else:
            made, way = _subtree(part, error, memory, chunk_bytes)
            routes[part.name] = f"dense: {part.kind}{way}"
            if not _adds_up(part, made, sums):
                return Entangled(f"{part} does not repeat what it did in the batch")
        factors |= {part.full(local): made[local] for local in part.trained}
        part.calls.clear()  # inputs that no factor needs are let go before the next layer's rows are written
    first = next(iter(trained.values()))
    shapes = {name: value.shape for name, value in trained.items()}
    return GhostGradients(factors, len(x), shapes, first.dtype, first.device, routes, chunk_bytes)


def _parts(module: nn.Module, name: str) -> Iterator[Part]:
    """The topmost modules that hold trained parameters themselves."""
    own = {local: value for local, value in module._parameters.items() if value is not None and value.requires_grad}
    if not own:
        for child_name, child in module.named_children():
            yield from _parts(child, f"{name}.{child_name}" if name else child_name)
    elif has_rule(module):
        yield Part(name, module, True, own)
    else:
        trained = {local: value for local, value in module.named_parameters() if value.requires_grad}
        yield Part(name, module, False, trained)


def _static_problem(model: nn.Module, parts: list[Part]) -> str:
    if parts[0].module is model and not parts[0].ruled:
        return f"{type(model).__name__} holds parameters itself"
    seen: dict[int, str] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if value.requires_grad and id(value) in seen:
            return f"{name} is the same parameter as {seen[id(value)]}"
        seen[id(value)] = name
    return ""


@contextmanager
def _recorded(parts: list[Part]) -> Iterator[None]:
    """Record the calls of the parts inside the block."""
    handles = [part.module.register_forward_hook(_recorder(part), with_kwargs=True) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _recorder(part: Part) -> Any:
    def record(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        plain = not keywords and all(isinstance(value, Tensor) for value in (*inputs, output))
        versions = tuple(value._version for value in inputs) if plain else ()
        edge = get_gradient_edge(output) if plain and output.requires_grad else None
        detached = tuple(value.detach() for value in inputs) if plain else ()
        part.calls.append(Call(detached, versions, edge, plain))

    return record


def _used(parts: list[Part], total: Tensor) -> list[tuple[Part, int]]:
    """The parts with parameters that the losses depend on, and how often the most used one enters."""
    uses = _parameter_uses(total)
    most = [(part, max(uses[id(value)] for value in part.trained.values())) for part in parts]
    return [(part, count) for part, count in most if count]


def _problem(part: Part, uses: int, examples: int) -> str:
    """Why the gradients of a used part do not follow from what the hooks saw; empty if they do."""
    if len(part.calls) != 1:
        return f"{part} is called {len(part.calls)} times"
    call = part.call
    if not call.plain or call.edge is None:
        return f"{part} takes or returns something else than tensors"
    if part.ruled and uses > 1:
        return f"a parameter of {part} is also used outside of it"
    if any(value._version != version for value, version in zip(call.inputs, call.versions, strict=True)):
        return f"the input of {part} is changed in place"
    if not call.inputs or any(_unclear(part, value, examples) for value in call.inputs):
        return f"the first axis of the input of {part} may not count the examples"
    return ""


def _unclear(part: Part, value: Tensor, examples: int) -> bool:
    if part.ruled:
        return is_ambiguous(part.module, value, examples)
    return value.ndim < 1 or len(value) != examples or (examples > 1 and examples in value.shape[1:])


def _parameter_uses(total: Tensor) -> Counter[int]:
    """How often each parameter, by its id, enters the computation of the total loss: edges of autograd's graph."""
    uses: Counter[int] = Counter()
    root = total.grad_fn
    seen: set[Node] = set()
    open_ = [] if root is None else [root]
    while open_:
        node = open_.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is None:
                continue
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                uses[id(leaf)] += 1
            else:
                open_.append(following)
    return uses


def _backward(parts: list[Part], total: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One backward pass.

    Returns:
        Part's name -> gradient of its output, for those that the loss depends on; parameter's name -> gradient of the
        batch, for the parameters of subtrees.
    """
    reached = [part for part in parts if part.calls and part.call.edge is not None]
    subtrees = [part for part in reached if not part.ruled]
    parameters = {part.full(local): value for part in subtrees for local, value in part.trained.items()}
    wanted = [part.call.edge for part in reached if part.call.edge is not None]
    wanted += [get_gradient_edge(value) for value in parameters.values()]
    if not wanted or not total.requires_grad:
        return {}, {}
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    errors = zip((part.name for part in reached), found[: len(reached)], strict=True)
    sums = zip(parameters, found[len(reached) :], strict=True)
    return (
        {name: value for name, value in errors if value is not None},
        {name: value for name, value in sums if value is not None},
    )


def _ruled(part: Part, error: Tensor, memory: Memory) -> dict[str, Factor]:
    dtype = next(iter(part.trained.values())).dtype
    x = part.call.inputs[0]
    x = x.to(dtype) if x.is_floating_point() else x
    with full_precision(x.device):
        return RULES[type(part.module)](part.module, x, error.to(dtype), memory)


def _subtree(part: Part, error: Tensor, memory: Memory, chunk_bytes: int) -> tuple[dict[str, Factor], str]:
    """Dense gradients of a module without a rule: of the inner product of its output with the output's gradient."""

    def product(forward: Forward, one_error: Tensor, *inputs: Tensor) -> Tensor:
        total: Tensor = (forward(*inputs) * one_error).sum()
        return total

    rows, way = dense_rows(part.module, part.trained, product, (error, *part.call.inputs), chunk_bytes)
    return {local: Rows(value, memory.scratch) for local, value in rows.items()}, way


def _adds_up(part: Part, made: Mapping[str, Factor], sums: Mapping[str, Tensor]) -> bool:
    """Tell whether dense gradients of a subtree sum to the batch's: not so if it drew other random numbers."""
    autocast = torch.is_autocast_enabled(part.call.inputs[0].device.type)
    tolerance = AUTOCAST_SUM_TOLERANCE if autocast else SUM_TOLERANCE
    for local, value in part.trained.items():
        expected = sums.get(part.full(local), torch.zeros_like(value))
        ones = torch.ones(len(part.call.inputs[0]), dtype=value.dtype, device=value.device)
        difference = made[local].combine(ones) - expected
        if difference.norm() > tolerance * expected.norm():
            return False
    return True
