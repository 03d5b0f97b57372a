"""The dense operator: every per-example gradient is held, B x K numbers. It works for any kind of layer."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedpriv.errors import InputError
from fedpriv.gradients.factored import FactoredGradients
from fedpriv.gradients.factors import Memory, Rows, slices
from fedpriv.gradients.operator import DEFAULT_CHUNK_BYTES, Vector

__all__ = ["DenseGradients", "Loss", "check_losses", "dense_gradients", "dense_rows"]

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
        scratch = Memory(chunk_bytes).scratch
        factors = {name: Rows(rows, scratch) for name, rows in gradients.items()}
        shapes = {name: rows.shape[1:] for name, rows in gradients.items()}
        routes = {"": f"dense: {reason}"}
        super().__init__(factors, first.shape[0], shapes, first.dtype, first.device, routes, chunk_bytes)


def dense_gradients(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, reason: str, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> DenseGradients:
    """Compute the gradients of a batch one example at a time, vectorised and in chunks of bounded memory.

    Parameters that do not require gradients are left out; one used in several places gets the sum over its uses.
    Layers that draw random numbers (dropout) draw anew for each example, from torch's global generator.

    Args:
        model: maps (B, ...) to (B, ...), each example on its own; its mode (train or eval) is left as it is.
        loss: (outputs, targets) -> losses of shape (B,).
        x: inputs, (B, ...).
        y: targets, (B, ...).
        reason: why they are dense, for people.
        chunk_bytes: what may be taken beyond the B x K numbers that are kept.

    Raises:
        InputError: the loss does not return one number an example.
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not len(x):
        none = {name: value.new_empty(0, *value.shape) for name, value in trained.items()}
        return DenseGradients(none, reason, chunk_bytes)

    def one_loss(forward: Forward, one_x: Tensor, one_y: Tensor) -> Tensor:
        losses = loss(forward(one_x), one_y)
        check_losses(losses, 1)
        return losses[0]

    rows, way = dense_rows(model, trained, one_loss, (x, y), chunk_bytes)
    return DenseGradients(rows, reason + way, chunk_bytes)


def check_losses(losses: Tensor, examples: int) -> None:
    """Raise InputError unless there is one loss an example."""
    if losses.shape != (examples,):
        raise InputError(
            f"the loss of {examples} examples has shape {tuple(losses.shape)}; allowed: ({examples},), one number each"
        )


Forward = Callable[..., Any]
"""What a module computes, as a function of its inputs."""


def dense_rows(
    module: nn.Module,
    trained: Mapping[str, Tensor],
    value: Callable[..., Tensor],
    columns: tuple[Tensor, ...],
    chunk_bytes: int,
) -> tuple[Vector, str]:
    """Write out the gradients of a number that is computed from each example alone.

    Many examples are computed at once where torch can map the module over them, as many as fit; their memory is that
    of the first one, computed alone, with all that it allocates. Where it cannot (a module that decides by its numbers,
    kernels without such a rule), one example comes after the other.

    Args:
        module: holds the parameters.
        trained: its parameters by name, those to differentiate by.
        value: (the module as a function, one entry of each column with a first axis of 1) -> a number.
        columns: tensors (B, ...), B at least 1.
        chunk_bytes: what may be taken beyond the rows; a single example is computed at once even when it takes more.

    Returns:
        The gradients, (B, *shape) each, and what is to be said about the way; empty for the usual one.
    """
    try:
        return _mapped(module, trained, value, columns, chunk_bytes), ""
    except RuntimeError:
        # What is wrong with the module itself rather than with mapping it is raised again, and now to the caller.
        return _one_by_one(module, trained, value, columns), ", one example after the other"


def _mapped(
    module: nn.Module,
    trained: Mapping[str, Tensor],
    value: Callable[..., Tensor],
    columns: tuple[Tensor, ...],
    chunk_bytes: int,
) -> Vector:
    constants = {name: value.detach() for name, value in module.named_parameters() if name not in trained}
    constants |= dict(module.named_buffers())

    def of_one(parameters: Vector, *one: Tensor) -> Tensor:
        def forward(*inputs: Any) -> Any:
            return functional_call(module, (parameters, constants), inputs)

        return value(forward, *(entry.unsqueeze(0) for entry in one))

    parameters = {name: value.detach() for name, value in trained.items()}
    gradients = vmap(grad(of_one), in_dims=(None, *(0 for _ in columns)), randomness="different")
    with _Allocations() as allocations:
        first = gradients(parameters, *(column[:1] for column in columns))
    rows = {name: one.new_empty(len(columns[0]), *one.shape[1:]) for name, one in first.items()}
    _put(rows, slice(0, 1), first)
    step = max(1, chunk_bytes // max(1, allocations.bytes))
    for some in slices(1, len(columns[0]), step):
        _put(rows, some, gradients(parameters, *(column[some] for column in columns)))
    return rows


def _one_by_one(
    module: nn.Module, trained: Mapping[str, Tensor], value: Callable[..., Tensor], columns: tuple[Tensor, ...]
) -> Vector:
    rows = {name: parameter.new_empty(len(columns[0]), *parameter.shape) for name, parameter in trained.items()}
    for some in slices(0, len(columns[0]), 1):
        with torch.enable_grad():
            number = value(module, *(column[some] for column in columns))
        found = torch.autograd.grad(number, list(trained.values()), allow_unused=True, materialize_grads=True)
        _put(rows, some, {name: gradient[None] for name, gradient in zip(trained, found, strict=True)})
    return rows


def _put(rows: Vector, some: slice, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        rows[name][some] = value


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
