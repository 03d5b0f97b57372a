"""Backward passes as training does them, which reach more parameters than autograd's graph shows.

A reentrant checkpoint runs its layers without a graph. Its backward pass runs them again, with a graph of their own,
and adds the gradients to ``.grad``: ``torch.autograd.grad`` returns none of them.
"""

from collections import Counter
from collections.abc import Mapping

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fedpriv.gradients.calls import reached, until_the_end
from fedpriv.gradients.operator import Vector


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
    """Return the parameters that a backward pass reaches past autograd's graph; the graph is kept.

    Autograd adds to the gradient of a leaf once. Only a function written in Python can run a backward pass of its own.
    """
    graph = reached(total, ())
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
