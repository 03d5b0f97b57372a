"""Parts of a model without a rule: dense gradients of their part alone, compared with what happened in the batch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedpriv.gradients.attention import attend, attention_factors, is_usual
from fedpriv.gradients.calls import Output, Part
from fedpriv.gradients.dense import DenseRows, Forward, dense_rows
from fedpriv.gradients.factors import Factor, Memory, Rows
from fedpriv.gradients.operator import Vector, first_line, flattened, full_precision

# A subtree that is computed again, one example at a time, has to give the batch's outputs and the batch's gradient, up
# to this share of the largest output and of the gradient's norm; where autocast is on, up to the other one, a few times
# the precision of its type.
TOLERANCE = 1e-4
AUTOCAST_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Entangled:
    """Why the gradients of a model cannot be computed layer by layer."""

    reason: str


@dataclass(frozen=True)
class Errors:
    """The gradient of the total loss with respect to one output of a part.

    Attributes:
        output: which one.
        values: (B, ...).
    """

    output: Output
    values: Tensor


@dataclass(frozen=True)
class Made:
    """What became of a part: the factors of its parameters by their names in it, and the way, for people."""

    factors: dict[str, Factor]
    route: str


def is_column(value: Tensor, examples: int) -> bool:
    """Whether what a subtree takes or returns has one entry an example; a mask, say, is the same for all of them."""
    return value.ndim > 0 and len(value) == examples


def subtree(
    part: Part, errors: list[Errors], sums: Vector | None, examples: int, memory: Memory, chunk_bytes: int
) -> Made | Entangled:
    """Dense gradients of a module without a rule: of the inner product of its outputs with the outputs' gradients.

    They are compared with what happened in the batch where its gradients are given.
    """
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


def _attention(part: Part, module: nn.MultiheadAttention, error: Errors, compared: bool, memory: Memory) -> Made | None:
    """The factors of torch's attention; ``None`` where it is not seen to give the batch's outputs again."""
    positional, named = part.call.with_tensors(part.call.tensors)
    tolerance = AUTOCAST_TOLERANCE if torch.is_autocast_enabled(error.values.device.type) else TOLERANCE
    with full_precision(error.values.device):
        attended = attend(module, *positional, **named)
        if compared and not repeats(attended.output, error.output.value, tolerance):
            return None
        return Made(attention_factors(module, attended, error.values, memory), f"ghost: {part.kind}")


def _confirmed(part: Part, errors: list[Errors], rows: DenseRows, sums: Vector, device: torch.device) -> bool:
    """Tell whether a subtree gave the batch's outputs again, and gradients that add up to the batch's."""
    tolerance = AUTOCAST_TOLERANCE if torch.is_autocast_enabled(device.type) else TOLERANCE
    expected = [error.output.value for error in errors]
    same = all(repeats(again[:, 0], value, tolerance) for again, value in zip(rows.outputs, expected, strict=True))
    return same and all(
        _adds_up(rows.gradients[local], sums.get(part.full(local)), tolerance) for local in part.trained
    )


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


def _adds_up(rows: Tensor, total: Tensor | None, tolerance: float) -> bool:
    """Tell whether gradients (B, *shape) add up to that of the batch: not so if the parameter is used elsewhere."""
    difference = rows.sum(dim=0) - (0 if total is None else total)
    size = torch.linalg.vector_norm(flattened(rows), dim=1).sum()
    return not bool(torch.linalg.vector_norm(difference) > tolerance * size)
