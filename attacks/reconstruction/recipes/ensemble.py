"""Many restarts on one upload of rows, put together: each row of a batch as most of them see it.

Rows of a batch come in no order, so each restart's are matched with those of the restart with the lowest loss (Vero et
al.: TabLeak, ICML 2023, section 4.2). The pool is offered where the attack's own objective says that it is better.
Behind noise, public rows decide with the upload (``recipes.decoding``), so that nothing is read into noise alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv import metrics
from fedpriv.attacks.reconstruction.matching.relaxation import relaxation_of
from fedpriv.attacks.reconstruction.recipes.decoding import SURE, decoded, fitted_numbers
from fedpriv.attacks.reconstruction.recipes.descent import run_recipe
from fedpriv.attacks.reconstruction.recipes.parts import Recipe
from fedpriv.attacks.reconstruction.recipes.problem import Problem
from fedpriv.attacks.reconstruction.results import Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["run_ensemble"]

RELAXED = Recipe("cosine", "adam", "cosine", variables="relaxed")
POLISH = Recipe("squared-distance", "lbfgs", box=True)


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
    victims = [rows[row] for row in offered]
    polished = _polished(scene, victims, hard[offered], labels[offered], config)
    # Restarts are chosen by how well they match; what is decided for the chosen one matches less well, on purpose.
    losses[offered] = _losses(scene, victims, polished, labels[offered], config)
    hard[offered] = decoded(scene, victims, polished, labels[offered], config)
    return replace(outcome, images=hard, losses=losses)


def _polished(scene: Scene, rows: Sequence[Victim], images: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Rows with the same categories, and those numbers that match best."""
    logits = SURE * F.one_hot(labels, scene.classes).to(images)
    places = relaxation_of(scene).free(images.shape[-1])
    return scene.box(fitted_numbers(Problem(POLISH, scene, rows, config), images, logits, places)).to(images)


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
