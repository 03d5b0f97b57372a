"""A loss that is given: what it is for each example, and whether it adds the examples of a batch up."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fedpriv.attacks.own_model.tensors import one_line
from fedpriv.attacks.reconstruction.dummy_gradients.network import Loss, soft_cross_entropy
from fedpriv.core.errors import InputError

Criterion = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, classes), label probabilities (B, classes)) -> the mean or the sum of the examples' losses."""

TRIED = 3  # examples of a batch with which a loss is tried out
ROUNDINGS = 1000  # in which two ways to compute a loss may differ


@dataclass(frozen=True)
class TriedLoss:
    """A loss as the attacks use it.

    Attributes:
        each: of each example.
        sums: whether the given one adds examples up.
        shows_labels: whether the gradient of the logits is least at the label, while logits are small.
    """

    each: Loss
    sums: bool
    shows_labels: bool = True


def try_loss(loss: Criterion, classes: int, like: Tensor) -> TriedLoss:
    """Try a loss on random logits: it must take probabilities and be the mean or the sum over examples.

    Args:
        loss: given.
        classes: number of logits.
        like: a parameter; logits are tried in its type and on its device, because a loss may hold weights of classes.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(max(TRIED, classes), classes, generator=generator).to(like)
    numbers = torch.arange(len(logits), device=like.device) % classes
    probabilities = F.one_hot(numbers, classes).to(like)
    try:
        together = loss(logits[:TRIED], probabilities[:TRIED])
        alone = torch.stack([loss(logits[k : k + 1], probabilities[k : k + 1]) for k in range(len(logits))])
    except Exception as error:
        raise InputError(
            f"the loss cannot be computed from logits and label probabilities, both (B, {classes}): {one_line(error)}"
        ) from error
    if not isinstance(together, Tensor) or together.ndim != 0 or not bool(torch.isfinite(together)):
        raise InputError("the loss must be one finite number for a batch (reduction = 'mean' or 'sum')")
    sums = _same(together, alone[:TRIED].sum())
    if not sums and not _same(together, alone[:TRIED].mean()):
        raise InputError("the loss of a batch is neither the mean nor the sum of its examples' losses")
    _check_numbers(loss, logits, numbers, together, alone)
    usual = soft_cross_entropy(logits, probabilities)
    if _same(alone, usual) and _same(_soft(loss, logits), soft_cross_entropy(logits, _even(logits))):
        return TriedLoss(soft_cross_entropy, sums)
    each = vmap(lambda row, label: loss(row[None], label[None]))
    return TriedLoss(each, sums, _shows_labels(loss, 0.1 * logits, probabilities))


def _shows_labels(loss: Criterion, logits: Tensor, probabilities: Tensor) -> bool:
    """Whether the label of one example is where the gradient of its logits is least (Zhao et al. 2020, iDLG)."""
    leaf = logits.clone().requires_grad_()
    losses = [loss(leaf[k : k + 1], probabilities[k : k + 1]) for k in range(len(leaf))]
    (slopes,) = torch.autograd.grad(torch.stack(losses).sum(), leaf)
    return bool((slopes.argmin(dim=1) == probabilities.argmax(dim=1)).all())


def _same(one: Tensor, other: Tensor) -> bool:
    share = ROUNDINGS * torch.finfo(one.dtype).eps
    return bool(torch.allclose(one, other, rtol=share, atol=share))


def _check_numbers(loss: Criterion, logits: Tensor, numbers: Tensor, together: Tensor, alone: Tensor) -> None:
    """A loss that takes class numbers must mean the same by them, for every class: a mean with class weights divides by
    the sum of the labels' weights for class numbers, and by the number of examples for probabilities.
    """
    try:
        batch = loss(logits[:TRIED], numbers[:TRIED])
        each = torch.stack([loss(logits[k : k + 1], numbers[k : k + 1]) for k in range(len(logits))])
    except Exception:  # noqa: BLE001 - a loss that takes probabilities only is fine, whatever it raises
        return
    if not (_same(together, batch.to(together)) and _same(alone, each.to(alone))):
        raise InputError(
            "the loss gives another value for class numbers than for the same labels as probabilities (class "
            "weights?); give reduction = 'sum', and an upload that is multiplied by the sum of its labels' weights"
        )


def _even(logits: Tensor) -> Tensor:
    return torch.full_like(logits, 1 / logits.shape[1])


def _soft(loss: Criterion, logits: Tensor) -> Tensor:
    return torch.stack([loss(row[None], _even(row[None])) for row in logits])
