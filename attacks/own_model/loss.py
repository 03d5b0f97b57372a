"""A loss that is given: what it is for each example, and whether it adds the examples of a batch up."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fedpriv.attacks.own_model.tensors import one_line
from fedpriv.attacks.reconstruction.dummy_gradients.network import Loss, soft_cross_entropy
from fedpriv.errors import InputError

__all__ = ["Criterion", "TriedLoss", "try_loss"]

Criterion = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, classes), label probabilities (B, classes)) -> the mean or the sum of the examples' losses."""

TRIED = 3  # examples with which a loss is tried out


@dataclass(frozen=True)
class TriedLoss:
    """A loss as the attacks use it: of each example, and whether the given one adds examples up."""

    each: Loss
    sums: bool


def try_loss(loss: Criterion, classes: int) -> TriedLoss:
    """Try a loss on random logits: it must take probabilities and be the mean or the sum over examples."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TRIED, classes, generator=generator, dtype=torch.float64)
    numbers = torch.arange(TRIED) % classes
    probabilities = F.one_hot(numbers, classes).double()
    try:
        together = loss(logits, probabilities)
        alone = torch.stack([loss(logits[k : k + 1], probabilities[k : k + 1]) for k in range(TRIED)])
    except Exception as error:
        raise InputError(
            f"the loss cannot be computed from logits and label probabilities, both (B, {classes}): {one_line(error)}"
        ) from error
    if not isinstance(together, Tensor) or together.ndim != 0 or not bool(torch.isfinite(together)):
        raise InputError("the loss must be one finite number for a batch (reduction = 'mean' or 'sum')")
    sums = bool(torch.isclose(together, alone.sum()))
    if not sums and not torch.isclose(together, alone.mean()):
        raise InputError("the loss of a batch is neither the mean nor the sum of its examples' losses")
    _check_numbers(loss, logits, numbers, together)
    usual = soft_cross_entropy(logits, probabilities)
    if torch.allclose(alone, usual) and torch.allclose(_soft(loss, logits), soft_cross_entropy(logits, _even(logits))):
        return TriedLoss(soft_cross_entropy, sums)
    return TriedLoss(vmap(lambda row, label: loss(row[None], label[None])), sums)


def _check_numbers(loss: Criterion, logits: Tensor, numbers: Tensor, wanted: Tensor) -> None:
    """A loss that takes class numbers must mean the same by them (class weights are averaged otherwise)."""
    try:
        by_number = loss(logits, numbers)
    except Exception:  # noqa: BLE001 - a loss that takes probabilities only is fine, whatever it raises
        return
    if not torch.allclose(by_number, wanted):
        raise InputError(
            "the loss gives another value for class numbers than for the same labels as probabilities (class weights?)"
        )


def _even(logits: Tensor) -> Tensor:
    return torch.full_like(logits, 1 / logits.shape[1])


def _soft(loss: Criterion, logits: Tensor) -> Tensor:
    return torch.stack([loss(row[None], _even(row[None])) for row in logits])
