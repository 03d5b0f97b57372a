"""Many restarts on one upload of rows, put together: each row of a batch as most of them see it.

Rows of a batch come in no order, so each restart's are matched with those of the restart with the lowest loss (Vero et
al.: TabLeak, ICML 2023, section 4.2). The pool is offered where the attack's own objective says that it is better.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv import metrics
from fedpriv.attacks.reconstruction.matching.lbfgs import minimise
from fedpriv.attacks.reconstruction.matching.relaxation import relaxation_of
from fedpriv.attacks.reconstruction.recipes.descent import run_recipe
from fedpriv.attacks.reconstruction.recipes.parts import Recipe
from fedpriv.attacks.reconstruction.recipes.problem import Problem
from fedpriv.attacks.reconstruction.results import Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim
from fedpriv.gradients.operator import wide

__all__ = ["run_ensemble"]

RELAXED = Recipe("cosine", "adam", "cosine", variables="relaxed")
POLISH = Recipe("squared-distance", "lbfgs", box=True)
POLISHED = 200  # iterations
SURE = 1e3  # logit of a label that is settled


def run_ensemble(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: Any, report: Report
) -> Outcome:
    """Run the attack; arguments and errors are those of :func:`~.descent.run_recipe`.

    The rows of each restart are made hard: one value a category. The pool of all restarts of a victim takes the place
    of the best of them if its loss is lower.
    """
    relaxation = relaxation_of(scene)
    outcome = run_recipe(RELAXED, scene, rows, images, logits, config, report)
    made, labels = _whole(outcome.images), _whole(outcome.labels)
    hard = relaxation.hard(made)
    losses = _losses(scene, rows, hard, labels, config)
    for members in _by_victim(rows):
        best = min(members, key=lambda row: float(losses[row]))
        orders = [metrics.match(made[best], made[row]) for row in members]
        pool = relaxation.pooled([made[row][order.to(made.device)] for row, order in zip(members, orders, strict=True)])
        loss = _losses(scene, [rows[best]], pool[None], labels[best][None], config)[0]
        if loss < losses[best]:
            hard[best], losses[best] = pool, loss
    offered = [min(members, key=lambda row: float(losses[row])) for members in _by_victim(rows)]
    hard[offered] = _polished(scene, [rows[row] for row in offered], hard[offered], labels[offered], config)
    losses[offered] = _losses(scene, [rows[row] for row in offered], hard[offered], labels[offered], config)
    return replace(outcome, images=hard, losses=losses)


def _polished(scene: Scene, rows: Sequence[Victim], images: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Rows with the same categories, and those numbers that match best: what is left is a smooth problem, and small."""
    numbers = relaxation_of(scene).free(images.shape[-1])
    if not numbers:
        return images
    problem = Problem(POLISH, scene, rows, config)
    points = _Numbers(problem, images, F.one_hot(labels, scene.classes).to(images), numbers)
    start = wide(images[..., numbers].flatten(1))
    ended = minimise(points, start, POLISHED, lambda done, values: None).points
    return scene.box(points.rows(ended, torch.arange(len(rows)))).to(images)


class _Numbers:
    """Values and gradients as functions of the numbers alone, as :func:`minimise` asks for them."""

    def __init__(self, problem: Problem, images: Tensor, labels: Tensor, numbers: list[int]) -> None:
        self._problem, self._images, self._numbers = problem, wide(images), numbers
        self._logits = SURE * wide(labels)

    def __call__(self, points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        leaf = points.detach().requires_grad_()
        problem = self._problem.select(index)
        values = problem.losses(self.rows(leaf, index), self._logits[index], problem.weights(1, 1))
        (gradients,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach(), gradients

    def rows(self, points: Tensor, index: Tensor) -> Tensor:
        """The rows (n, B, 1, 1, features) with these numbers (n, B x numbers)."""
        images = self._images[index].clone()
        images[..., self._numbers] = points.view(*images.shape[:-1], len(self._numbers))
        return images


def _whole(values: Tensor | tuple[Tensor, ...]) -> Tensor:
    return values if isinstance(values, Tensor) else torch.stack(values)


def _losses(scene: Scene, rows: Sequence[Victim], images: Tensor, labels: Tensor, config: Any) -> Tensor:
    """How far from what was heard these rows and labels are, (N,)."""
    problem = Problem(replace(RELAXED, variables="pixels"), scene, rows, config)
    sure = SURE * F.one_hot(labels, scene.classes).to(images)
    with torch.no_grad():
        return problem.losses(images, sure, problem.weights(1, 1))


def _by_victim(rows: Sequence[Victim]) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for row, victim in enumerate(rows):
        members.setdefault(id(victim), []).append(row)
    return list(members.values())
