"""The most probable row of a table behind noise: each value by how frequent it is and how well it explains the upload.

Matching follows noise as readily as rows: behind much of it, what it reads is worse than a guess. Here each column is
decided in turn, all others as they are (iterated conditional modes, Besag 1986), by the mechanism's own density and the
shares of values among public rows. Where an upload says nothing, the most frequent value and the median are left.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.matching.lbfgs import minimise
from fedpriv.attacks.reconstruction.recipes.parts import Recipe
from fedpriv.attacks.reconstruction.recipes.problem import Problem
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim
from fedpriv.attacks.rows import most_frequent
from fedpriv.columns import slices
from fedpriv.gradients.operator import wide

__all__ = ["SURE", "NumberPrior", "decoded", "fitted_numbers"]

LIKELY = Recipe("likelihood", "lbfgs", box=True)
POLISHED = 200  # iterations
SURE = 1e3  # logit of a label that is settled
SWEEPS = 4  # over all columns, at most: later ones change hardly anything
AT_ONCE = 64  # values that are compared together
ROUND = 0.1  # deviations from the median within which its density is rounded, for searches along derivatives
NARROWEST = 1e-3  # of a number's range: the least deviation of a column that is nearly constant


@dataclass(frozen=True, eq=False)
class NumberPrior:
    """Laplace distributions of numbers around their medians, normalised: many a column is mostly one number.

    Attributes:
        middle: (numbers,).
        deviation: (numbers,), mean absolute ones, above 0.
    """

    middle: Tensor
    deviation: Tensor

    def energy(self, numbers: Tensor) -> Tensor:
        """Return minus the log-density (N,) of numbers (N, B, numbers), but for a constant."""
        return (((numbers - self.middle) / self.deviation).square() + ROUND**2).sqrt().sum(dim=(1, 2))


@dataclass(frozen=True, eq=False)
class _Choice:
    """The values of one category or flag.

    Attributes:
        places: the features.
        values: (values, places), normalised.
        surprise: (values,), minus the logarithms of their shares.
    """

    places: slice
    values: Tensor
    surprise: Tensor


@dataclass(frozen=True, eq=False)
class _RowPrior:
    """What public rows say about each column, taken as independent.

    Attributes:
        middle: (1, 1, features), the most frequent values and medians, normalised.
        choices: of categories, flags, and whether a number is missing.
        places: features that are numbers.
        numbers: their distribution.
    """

    middle: Tensor
    choices: tuple[_Choice, ...]
    places: list[int]
    numbers: NumberPrior

    @staticmethod
    def of(scene: Scene, public: Tensor) -> "_RowPrior":
        """Count public rows (M, 1, 1, features) on the [0, 1] scale."""
        rows = public.to(wide(scene.mean))
        flat, mean, std = rows.flatten(1), wide(scene.mean).flatten(), wide(scene.std).flatten()
        discrete = [where for where, _ in _discrete(scene)]
        choices = tuple(_choice(flat[:, where], where, one_hot, mean, std) for where, one_hot in _discrete(scene))
        taken = {place for where in discrete for place in range(where.start, where.stop)}
        places = [place for place in range(flat.shape[1]) if place not in taken]
        middle = (most_frequent(scene.columns, rows) - mean) / std
        spread = (((flat - mean) / std)[:, places] - middle.flatten()[places]).abs().mean(dim=0)
        numbers = NumberPrior(middle.flatten()[places], spread.clamp(min=float(NARROWEST / std)))
        return _RowPrior(middle, choices, places, numbers)


def _discrete(scene: Scene) -> Iterator[tuple[slice, bool]]:
    """Features that hold one of a few values, and whether exactly one of them is 1."""
    for column, where in slices(scene.columns):
        if not column.is_number:
            yield where, column.kind == "category"
        elif column.optional:
            yield slice(where.stop - 1, where.stop), False


def _choice(rows: Tensor, where: slice, one_hot: bool, mean: Tensor, std: Tensor) -> _Choice:
    """Count the values of a column's rows (M, places); one that never occurs counts as half a row."""
    width = rows.shape[1] if one_hot else 2
    values = torch.eye(width).to(rows) if one_hot else torch.tensor([[0.0], [1.0]]).to(rows)
    counts = rows.sum(dim=0) if one_hot else torch.stack([(1 - rows).sum(), rows.sum()])
    shares = (counts + 0.5) / (len(rows) + width / 2)
    return _Choice(where, (values - mean) / std, -shares.log())


def decoded(scene: Scene, rows: Sequence[Victim], images: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Return what is decided from these rows where they explain more than noise would, else from frequent values.

    Args:
        scene: what is public; without public rows the given ones are returned.
        rows: N victims.
        images: (N, B, 1, 1, features), normalised, one value a category.
        labels: (N, B).
        config: of the attack.
    """
    if scene.public_images is None or not len(scene.public_images):
        return images
    prior = _RowPrior.of(scene, scene.public_images)
    made = [
        _decided(_Posterior(scene, victim, known, config, prior), wide(start)) if _has_density(victim) else start
        for victim, start, known in zip(rows, images, labels, strict=True)
    ]
    return torch.stack(made).to(images)


def _has_density(victim: Victim) -> bool:
    """Whether there is noise of which the upload's density is known: behind Adam's steps it is not."""
    model = victim.model
    adam = model.training is not None and model.training.optimizer == "adam"
    return model.mechanism.protects and not (adam and model.protects_examples)


class _Posterior:
    """Minus the logarithm of how probable rows of one victim are."""

    def __init__(self, scene: Scene, victim: Victim, labels: Tensor, config: Any, prior: _RowPrior) -> None:
        self.scene, self.prior = scene, prior
        self.problem = Problem(LIKELY, scene, [victim], config)
        self.labels = SURE * wide(F.one_hot(labels, scene.classes).to(scene.mean))

    def misfits(self, images: Tensor) -> Tensor:
        """Of rows (N, B, 1, 1, features): (N,)."""
        parts = []
        with torch.no_grad():
            for part in images.split(AT_ONCE):
                problem = self.problem.select(torch.zeros(len(part), dtype=torch.long))
                logits = self.labels.expand(len(part), *self.labels.shape)
                parts.append(problem.losses(part, logits, problem.weights(1, 1)))
        return torch.cat(parts)

    def energy(self, images: Tensor) -> float:
        """Of rows (B, 1, 1, features)."""
        chosen = (_nearest(images, choice) for choice in self.prior.choices)
        surprise = sum(float(each.surprise[at].sum()) for each, at in zip(self.prior.choices, chosen, strict=True))
        numbers = self.prior.numbers.energy(images[None, :, 0, 0, self.prior.places])
        return float(self.misfits(images[None])) + surprise + float(numbers)

    def with_numbers(self, images: Tensor) -> Tensor:
        """The same rows (B, 1, 1, features) with the most probable numbers."""
        logits = self.labels[None]
        return fitted_numbers(self.problem, images[None], logits, self.prior.places, self.prior.numbers)[0]


def _nearest(images: Tensor, choice: _Choice) -> Tensor:
    """Which value each of the rows (B, 1, 1, features) holds, (B,)."""
    return torch.cdist(images[:, 0, 0, choice.places], choice.values).argmin(dim=1)


def _decided(posterior: _Posterior, start: Tensor) -> Tensor:
    """The decision for one victim's rows (B, 1, 1, features).

    Rows that follow noise gain half a unit of log-likelihood for each free number (Wilks 1938), on narrow peaks where
    little of the probability lies. What was read counts only where it gains more than that.
    """
    middle = posterior.prior.middle.expand_as(start)
    read, guessed = (_settled(posterior, posterior.with_numbers(begin)) for begin in (start, middle))
    gain = posterior.energy(guessed) - posterior.energy(read)
    return posterior.scene.box(read if gain > start.numel() / 2 else guessed)


def _settled(posterior: _Posterior, images: Tensor) -> Tensor:
    """Decide each value of each row in turn, then all numbers, until nothing changes."""
    for _ in range(SWEEPS):
        before = images
        for example in range(len(images)):
            for choice in posterior.prior.choices:
                tried = images.repeat(len(choice.values), 1, 1, 1, 1)
                tried[:, example, 0, 0, choice.places] = choice.values
                images = tried[int((posterior.misfits(tried) + choice.surprise).argmin())]
        if torch.equal(before, images):
            break
        images = posterior.with_numbers(images)
    return images


def fitted_numbers(
    problem: Problem, images: Tensor, logits: Tensor, places: list[int], prior: NumberPrior | None = None
) -> Tensor:
    """Return rows with the same categories, and those numbers that fit best: a smooth problem, and a small one.

    Args:
        problem: what is minimised, of N rows, in float64.
        images: (N, B, 1, 1, features), normalised.
        logits: (N, B, classes).
        places: the features that are numbers.
        prior: of numbers, beside the problem; ``None``: it alone counts.
    """
    if not places:
        return images
    points = _Numbers(problem, images, logits, places, prior)
    start = wide(images[..., places].flatten(1))
    ended = minimise(points, start, POLISHED, lambda done, values: None).points
    return points.rows(ended, torch.arange(len(images)))


class _Numbers:
    """Values and gradients as functions of the numbers alone, as :func:`minimise` asks for them."""

    def __init__(
        self, problem: Problem, images: Tensor, logits: Tensor, places: list[int], prior: NumberPrior | None
    ) -> None:
        self._problem, self._images, self._places = problem, wide(images), places
        self._logits, self._prior = wide(logits), prior

    def __call__(self, points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        leaf = points.detach().requires_grad_()
        problem = self._problem.select(index)
        rows = self.rows(leaf, index)
        values = problem.losses(rows, self._logits[index], problem.weights(1, 1))
        if self._prior is not None:
            values = values + self._prior.energy(rows[:, :, 0, 0, self._places])
        (gradients,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach(), gradients

    def rows(self, points: Tensor, index: Tensor) -> Tensor:
        """The rows (n, B, 1, 1, features) with these numbers (n, B x numbers)."""
        images = self._images[index].clone()
        images[..., self._places] = points.view(*images.shape[:-1], len(self._places))
        return images
