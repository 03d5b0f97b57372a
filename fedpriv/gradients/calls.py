"""Recorded calls of modules, walks through autograd's graph, and backward passes as training does them."""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from fedpriv.gradients.operator import Vector


class Output(NamedTuple):
    """A tensor that a call returned and that has a gradient, kept as an edge, which in-place changes leave alone."""

    place: int  # among all that the call returned
    edge: GradientEdge  # of autograd's graph
    value: Tensor  # a copy of its numbers


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    arguments: tuple[Any, ...]  # all that it was given, laid end to end, tensors detached
    form: TreeSpec  # of positional and named arguments
    versions: tuple[int, ...]  # of the tensors among them, when the module returned; they count changes in place
    sources: tuple[Node, ...]  # the nodes of autograd's graph that made these tensors
    outputs: tuple[Output, ...]  # what it returned that has a gradient

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments."""
        return tuple(value for value in self.arguments if isinstance(value, Tensor))

    @property
    def changed(self) -> bool:
        """Whether a tensor that the module was given has been changed in place since."""
        return any(value._version != version for value, version in zip(self.tensors, self.versions, strict=True))

    def with_tensors(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments with other tensors in place of those that were given."""
        new = iter(tensors)
        values = [next(new) if isinstance(value, Tensor) else value for value in self.arguments]
        return tree_unflatten(values, self.form)


@dataclass
class ModelPart:
    """A module whose parameters are handled together."""

    name: str  # in the model
    module: nn.Module  # itself
    trained: Mapping[str, Tensor]  # all its trained parameters by their names in it
    calls: list[Call] = field(default_factory=list)  # what was seen of it

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.kind})"

    @property
    def kind(self) -> str:
        """What the module is."""
        return type(self.module).__name__


@contextmanager
def recorded(parts: Sequence[ModelPart]) -> Iterator[None]:
    """Record the calls of the parts inside the block."""
    with until_the_end([part.module.register_forward_hook(_recorder(part), with_kwargs=True) for part in parts]):
        yield


@contextmanager
def until_the_end(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the block."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode inside the block, and each of its layers in its own mode afterwards."""
    modes = {layer: layer.training for layer in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for layer, mode in modes.items():  # outer layers first; some do more than set a flag, such as unmerge adapters
            if layer.training != mode:
                layer.train(mode)


def _recorder(part: ModelPart) -> Any:
    def record(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        values, form = tree_flatten((inputs, keywords))
        tensors = [value for value in values if isinstance(value, Tensor)]
        outputs = (
            Output(place, get_gradient_edge(value), value.detach().clone())
            for place, value in enumerate(tree_leaves(output))
            if isinstance(value, Tensor) and value.requires_grad
        )
        part.calls.append(
            Call(
                tuple(value.detach() if isinstance(value, Tensor) else value for value in values),
                form,
                tuple(value._version for value in tensors),
                tuple(get_gradient_edge(value).node for value in tensors if value.requires_grad),
                tuple(outputs),
            )
        )

    return record


class ReachedNodes(NamedTuple):
    """What the losses depend on."""

    nodes: set[Node]  # of autograd's graph
    leaves: set[int]  # ids of tensors, such as parameters


def reached(total: Tensor, past: Mapping[Node, Sequence[Node]]) -> ReachedNodes:
    """Walk from a number through autograd's graph, past some nodes to what others stand for in their place."""
    visited = ReachedNodes(set(), set())
    open_ = [] if total.grad_fn is None else [total.grad_fn]
    while open_:
        node = open_.pop()
        if node in visited.nodes:
            continue
        visited.nodes.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            visited.leaves.add(id(leaf))
        following = past[node] if node in past else [next_node for next_node, _ in node.next_functions]
        open_.extend(next_node for next_node in following if next_node is not None)
    return visited


# Backward passes as training does them, which reach more parameters than autograd's graph shows.
#
# A reentrant checkpoint runs its layers without a graph. Its backward pass runs them again, with a graph of their own,
# and adds the gradients to ``.grad``: ``torch.autograd.grad`` returns none of them.


def plain_gradient(total: Tensor, trained: Mapping[str, Tensor], *, retain_graph: bool = False) -> Vector:
    """Return the gradients that ``total.backward()`` computes, zero where it reaches nothing; ``.grad`` is left as is.

    Args:
        total: a number that requires a gradient.
        trained: leaves of autograd's graph by name.
        retain_graph: whether another backward pass follows.
    """
    kept = {name: value.grad for name, value in trained.items()}
    try:
        for value in trained.values():
            value.grad = None
        total.backward(retain_graph=retain_graph)
        return {
            name: value.new_zeros(value.shape) if value.grad is None else value.grad.to_dense()
            for name, value in trained.items()
        }
    finally:
        for name, value in trained.items():
            value.grad = kept[name]


def hidden_parameters(total: Tensor, trained: Mapping[str, Tensor]) -> list[str]:
    """Return the parameters that a backward pass of a Python function reaches past autograd's graph, which is kept."""
    graph = reached(total, {})
    if not any(isinstance(node, BackwardCFunction) for node in graph.nodes):
        return []
    times: Counter[int] = Counter()
    leaves = {id(value): value for value in trained.values()}  # a tied weight has two names
    hooks = [
        value.register_post_accumulate_grad_hook(lambda leaf: times.update((id(leaf),))) for value in leaves.values()
    ]
    with until_the_end(hooks):
        plain_gradient(total, trained, retain_graph=True)
    return [name for name, value in trained.items() if times[id(value)] > (id(value) in graph.leaves)]


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy; of what layers keep of earlier passes, in autograd's graph, the numbers alone."""
    twin = copy.deepcopy(model, kept_numbers(model))
    keep_hooks(model, twin)
    return twin


def keep_hooks(model: nn.Module, twin: nn.Module) -> None:
    """Put the hooks on the gradients of a model's parameters on those of its deep copy, which has none.

    Parameters that were frozen later have no gradient, and torch takes no hook on them.
    """
    for value, other in zip(model.parameters(), twin.parameters(), strict=True):
        for hook in (value._backward_hooks or {}).values() if other.requires_grad else ():
            other.register_hook(hook)


def kept_numbers(model: nn.Module) -> dict[int, Any]:
    """Return copies of what layers keep of earlier passes by its ids, for ``copy.deepcopy``, which takes no graph."""
    kept = (value for layer in model.modules() for value in tree_leaves(vars(layer)))
    return {id(value): value.detach().clone() for value in kept if isinstance(value, Tensor) and not value.is_leaf}


class RandomLayer(nn.Module):
    """A layer of ours that draws random numbers in every forward pass of training."""

    @property
    def draws(self) -> bool:
        """Whether it draws, apart from whether it is training."""
        return True


def coupled_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that mix the examples of a batch: BatchNorm and its family."""
    return tuple(name for name, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))


def dropout_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that are random while training: dropout with a probability above 0, and noise."""
    return tuple(name for name, layer in model.named_modules() if _drops(layer))


def _drops(layer: nn.Module) -> bool:
    if isinstance(layer, RandomLayer):
        return layer.draws
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p > 0
    return isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0
