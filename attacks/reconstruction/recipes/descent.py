"""Recipes carried out: L-BFGS with a line search of each row's own, and Adam with or without the gradient's size.

- L-BFGS, as in DLG: unbounded, in float64 where the device has that: near a match the distance is a small difference of
  large numbers.
- Adam on the gradient or on its sign, as in Inverting Gradients: elementwise, so that rows stay apart. Weights of
  priors may fall from step to step; the losses that are compared and reported are those with the weights at the end.

Of each row the iterate with the lowest loss of its own is kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.matching.evaluation import Evaluator
from fedpriv.attacks.reconstruction.matching.lbfgs import minimise
from fedpriv.attacks.reconstruction.recipes.parts import SCHEDULES, SIGNS, Recipe, warmed
from fedpriv.attacks.reconstruction.recipes.problem import Problem
from fedpriv.attacks.reconstruction.results import Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim
from fedpriv.gradients.operator import wide

__all__ = ["Best", "run_recipe"]

# A mismatch of so much of what an image of zeros would have is a match: float32 cannot tell much more apart.
SOLVED = 1e-12


def run_recipe(
    recipe: Recipe, scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: Any, report: Report
) -> Outcome:
    """Run a recipe on rows of (victim, restart) together.

    Args:
        recipe: the parts.
        scene: what is public.
        rows: the victim of each row.
        images: standard normal numbers (N, B, C, H, W), from which the starts are made.
        logits: starts of the labels' logits (N, B, classes), for rows whose labels are optimised.
        config: iterations, for Adam learning_rate, the weight of each prior, and the start, where it is a setting.
        report: told how it goes.

    Raises:
        AttackRefused: a part cannot be used on these uploads.
    """
    recipe = replace(recipe, start=getattr(config, "start", recipe.start))
    problem = Problem(recipe, scene, rows, config)
    start = problem.start(recipe.start, rows, images)
    if recipe.optimiser == "lbfgs":
        return _lbfgs(problem, rows, start, logits, config.iterations, recipe.objective, report)
    return _adam(problem, start, logits, config, recipe, report)


def _lbfgs(
    problem: Problem,
    rows: Sequence[Victim],
    variables: Tensor,
    logits: Tensor,
    iterations: int,
    objective: str,
    report: Report,
) -> Outcome:
    """Minimise variables and logits in one vector a row; the logits of rows with fixed labels have no effect."""
    shape, pixels = variables.shape[1:], variables[0].numel()
    points = _Points(problem, len(rows), shape, logits.shape[1:], pixels)
    start = wide(torch.cat([variables.flatten(1), logits.flatten(1)], dim=1))
    # A likelihood has no least value that is known.
    known = not problem.regular and objective != "likelihood"
    target = SOLVED * _size(rows, objective) if known else None
    minimum = minimise(points, start, iterations, report, target)
    ended, last = points.split(minimum.points)
    return Outcome(
        problem.images(ended), problem.labels.final(last), minimum.values, minimum.iterations, problem.labels.notes
    )


class _Points:
    """Values and gradients of some rows' points, as :func:`minimise` asks for them."""

    def __init__(self, problem: Problem, count: int, shape: torch.Size, logits: torch.Size, pixels: int) -> None:
        self._all = self._problem = problem
        self._index = torch.arange(count)
        self._shape, self._logits, self._pixels = shape, logits, pixels

    def __call__(self, points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.equal(index.cpu(), self._index):
            self._index, self._problem = index.cpu(), self._all.select(index)
        leaf = points.detach().requires_grad_()
        values = self._problem.losses(*self.split(leaf), self._problem.weights(1, 1))
        (gradients,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach(), gradients

    def split(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Variables (M, B, C, H, W) and logits (M, B, classes) of points (M, D)."""
        pixels = self._pixels
        return points[:, :pixels].unflatten(1, self._shape), points[:, pixels:].unflatten(1, self._logits)


def _size(rows: Sequence[Victim], objective: str) -> Tensor:
    """What each row's objective is about, where nothing matches: (N,)."""
    if objective != "squared-distance":
        return torch.tensor([float(len(victim.uploads)) for victim in rows])
    lengths = [
        torch.stack([wide(value).square().sum() for sent in victim.uploads for value in sent.gradient.values()]).sum()
        for victim in rows
    ]
    return torch.stack(lengths)


def _adam(problem: Problem, variables: Tensor, logits: Tensor, config: Any, recipe: Recipe, report: Report) -> Outcome:
    variables, logits = variables.clone(), logits.clone()
    adam = torch.optim.Adam([variables, logits], lr=config.learning_rate)
    steps, factor, signs = config.iterations, SCHEDULES[recipe.schedule], SIGNS[recipe.optimiser]
    warm_up, last = getattr(config, "warm_up", 0), problem.weights(1, 1)
    best = Best(variables, logits)
    evaluate = Evaluator(problem.losses, steps)
    for step in range(steps):
        adam.param_groups[0]["lr"] = config.learning_rate * warmed(step, warm_up) * factor(step, steps)
        weights = problem.weights(step, steps)
        losses, (*gradients, penalties) = evaluate(variables, logits, weights)
        best.keep(losses + ((last - weights) * penalties).sum(dim=1), variables, logits)
        variables.grad, logits.grad = (signs(gradient, 1 - step / steps) for gradient in gradients)
        adam.step()
        variables.copy_(problem.project(variables))
        report(step + 1, best.losses)
    best.keep(problem.losses(variables, logits, last).detach(), variables, logits)
    iterations = torch.full((len(variables),), steps)
    images, labels = problem.images(best.variables), problem.labels.final(best.logits)
    notes = tuple("; ".join(text for text in (note, evaluate.note) if text) for note in problem.labels.notes)
    return Outcome(images, labels, best.losses, iterations, notes)


class Best:
    """The iterate of each row whose own loss was the lowest so far, with that loss; a NaN never is the lowest."""

    def __init__(self, variables: Tensor, logits: Tensor) -> None:
        self.variables = variables.detach().clone()
        self.logits = logits.detach().clone()
        self.losses = variables.new_full((len(variables),), torch.inf, requires_grad=False)

    def keep(self, losses: Tensor, variables: Tensor, logits: Tensor) -> None:
        """Compare the losses (N,) at these very iterates with the lowest ones so far."""
        lower = losses < self.losses
        self.losses = torch.where(lower, losses, self.losses)
        self.variables = torch.where(lower[:, None, None, None, None], variables.detach(), self.variables)
        self.logits = torch.where(lower[:, None, None], logits.detach(), self.logits)
