"""MI-FACE (Fredrikson, Jha and Ristenpart 2015, Algorithm 1): pictures that a model takes for its classes.

The printed stop rule, cost <= gamma, is met at once with the usual gamma = 0.99, since the cost is at most 1. What is
meant, and what is done here, is cost <= 1 - gamma; and the best picture is returned behind the loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.attacks.endpoint.equations import rounding_unit
from fedpriv.attacks.endpoint.scene import Network, probabilities
from fedpriv.service.questions import Questions

__all__ = ["Auxiliary", "Cost", "Descent", "Gradient", "by_answers", "by_model", "invert", "total_variation"]

Cost = Callable[[Tensor], Tensor]
"""Probabilities of the wanted labels (n,) -> costs (n,)."""

Auxiliary = Callable[[Tensor], Tensor]
"""Images (n, C, H, W) -> what unlikely ones cost (n,), differentiable."""

Gradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]
"""Images and labels (n,) -> costs (n,) and gradients (n, C, H, W); ``None``: no questions are left."""

_SMALLEST = 1e-12


@dataclass(frozen=True)
class Descent:
    """How far each step goes, and when it ends.

    Attributes:
        rate: of a step.
        steps: at most (alpha).
        patience: steps without gain after which a class ends (beta).
        enough: the cost at which a class ends.
        blur: standard deviation in pixels of the blur after each step; 0: none.
    """

    rate: float
    steps: int
    patience: int
    enough: float
    blur: float = 0.0


def invert(gradient: Gradient, start: Tensor, descent: Descent) -> tuple[Tensor, Tensor]:
    """Go down the cost of every class at once, and keep the best picture of each.

    Args:
        gradient: of the cost.
        start: (classes, C, H, W) on [0, 1].
        descent: steps and stop rules; a class that has ended is asked for no more.

    Returns:
        The pictures (classes, C, H, W) and their costs (classes,); those of a start that was never left are infinite.
    """
    images, labels = start.clone(), torch.arange(len(start))
    best, costs = start.clone(), torch.full((len(start),), torch.inf, dtype=torch.float64)
    waited = torch.zeros(len(start), dtype=torch.int64)
    active = torch.ones(len(start), dtype=torch.bool)
    for step in range(descent.steps + 1):
        cost_and_slope = gradient(images[active], labels[active])
        if cost_and_slope is None:
            # Nobody could be asked whether the last step was one too far; the steps before it gained.
            ahead = active & (waited == 0) & (costs < torch.inf)
            best[ahead] = images[ahead]
            break
        _keep(images, labels[active], cost_and_slope[0], best, costs, waited)
        if step == descent.steps:
            break
        images[active] = _processed(images[active] - descent.rate * cost_and_slope[1], descent.blur)
        active = (waited < descent.patience) & (costs > descent.enough)
        if not bool(active.any()):
            break
    return best, costs


def by_model(model: Network, cost: Cost, auxiliary: Auxiliary | None) -> Gradient:
    """Return the exact gradient of whoever has the model."""

    def gradient(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        leaf = images.detach().requires_grad_()
        shares = model(leaf).log_softmax(dim=1).gather(1, labels[:, None])[:, 0].exp()
        costs = cost(shares)
        if auxiliary is not None:
            costs = costs + auxiliary(leaf)
        (gradients,) = torch.autograd.grad(costs.sum(), leaf)
        return costs.detach(), gradients

    return gradient


def by_answers(
    endpoint: Questions, budget: int, cost: Cost, auxiliary: Auxiliary | None, difference: float
) -> Gradient:
    """Return the gradient by differences of answers: d + 1 questions an image, shared by all labels that start there.

    Args:
        endpoint: answers.
        budget: images that it answers at most.
        cost: of a label's probability.
        auxiliary: of images; nobody has to be asked for it.
        difference: by which a pixel is changed, towards the middle of [0, 1].
    """

    def gradient(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        distinct, place = images.unique(dim=0, return_inverse=True)
        pixels = distinct[0].numel()
        if endpoint.asked + len(distinct) * (pixels + 1) > budget:
            return None
        shares = [_differences(endpoint, image, difference) for image in distinct]
        here = torch.stack([shares[at][0][label] for at, label in zip(place.tolist(), labels.tolist(), strict=True)])
        moved = [shares[at][1][:, label] for at, label in zip(place.tolist(), labels.tolist(), strict=True)]
        costs = cost(here)
        signs = torch.where(images > 0.5, -difference, difference).flatten(1)
        slopes = (cost(torch.stack(moved)) - costs[:, None]) / signs
        return _with_auxiliary(costs, slopes.view_as(images), images, auxiliary)

    return gradient


def total_variation(images: Tensor) -> Tensor:
    """Return the mean squared difference of neighbouring pixels (n,), of images (n, C, H, W)."""
    down, right = images.diff(dim=2).square(), images.diff(dim=3).square()
    return down.mean(dim=(1, 2, 3)) + right.mean(dim=(1, 2, 3))


def _keep(images: Tensor, labels: Tensor, costs: Tensor, best: Tensor, least: Tensor, waited: Tensor) -> None:
    """Remember the pictures that are better than all before, and count the steps without gain of the others."""
    gained = labels[costs < least[labels]]
    waited[labels] += 1
    waited[gained] = 0
    least[labels] = torch.minimum(least[labels], costs)
    best[gained] = images[gained]


def _differences(endpoint: Questions, image: Tensor, difference: float) -> tuple[Tensor, Tensor]:
    """The probabilities at an image (classes,), and with each pixel changed (d, classes)."""
    flat = image.flatten()
    step = torch.where(flat > 0.5, -difference, difference)
    asked = torch.cat([flat[None], flat + torch.diag(step)]).view(-1, *image.shape)
    answers = endpoint.ask(asked)
    shown = probabilities(answers, endpoint.classes)
    unit = 0.0 if answers.probabilities is None else rounding_unit(np.nan_to_num(answers.probabilities))
    shares = torch.from_numpy(shown.clip(max(unit / 2, _SMALLEST), 1.0))
    return shares[0], shares[1:]


def _with_auxiliary(
    costs: Tensor, gradients: Tensor, images: Tensor, auxiliary: Auxiliary | None
) -> tuple[Tensor, Tensor]:
    if auxiliary is None:
        return costs, gradients
    leaf = images.detach().requires_grad_()
    extra = auxiliary(leaf)
    (added,) = torch.autograd.grad(extra.sum(), leaf)
    return costs + extra.detach(), gradients + added


def _processed(images: Tensor, blur: float) -> Tensor:
    """PROCESS: a small blur where one is wanted, then back onto [0, 1]."""
    return (images if blur == 0 else _blurred(images, _window(blur))).clamp(0, 1)


def _window(blur: float) -> Sequence[float]:
    reach = max(1, int(np.ceil(2 * blur)))
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * blur**2))
    window: list[float] = (weights / weights.sum()).tolist()
    return window


def _blurred(images: Tensor, window: Sequence[float]) -> Tensor:
    kernel, channels = torch.tensor(window, dtype=images.dtype), images.shape[1]
    reach = len(window) // 2
    padded = functional.pad(images, (reach,) * 4, mode="replicate")
    rows = functional.conv2d(padded, kernel.view(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)
    return functional.conv2d(rows, kernel.view(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)
