"""Baselines: guesses without any upload. An attack that does not beat them shows no leak."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.attacks import metrics
from fedpriv.attacks.intervals import binomial_upper
from fedpriv.core.columns import ColumnSpec, decode, slices
from fedpriv.core.records import RowScore

# Rows of tables: how well cells were read, and what is offered by whoever never saw an upload.
#
# What counts is the decoded cell: of a category the value of its largest feature, of a number the number itself.


def row_scores(columns: Sequence[ColumnSpec], originals: Tensor, rows: Tensor) -> list[RowScore]:
    """Compare rows (N, 1, 1, features) on the [0, 1] scale with the true ones, cell by cell."""
    errors = _errors(columns, originals, rows)
    numbers = np.array([column.is_number for column in columns], dtype=bool)
    names = np.array([column.name for column in columns], dtype=object)
    return [
        RowScore(
            dict(zip(names[~numbers], (line[~numbers] == 0).tolist(), strict=True)),
            dict(zip(names[numbers], line[numbers].tolist(), strict=True)),
        )
        for line in errors
    ]


def most_frequent(columns: Sequence[ColumnSpec], rows: Tensor) -> Tensor:
    """Return the row (1, 1, features) of the most frequent values and the medians of rows (N, 1, 1, features)."""
    flat = rows.flatten(1)
    made = torch.zeros_like(flat[0])
    for column, where in slices(columns):
        part = flat[:, where]
        if column.kind == "category":
            made[where.start + int(part.sum(dim=0).argmax())] = 1
        elif column.optional and part[:, 1].mean() >= 0.5:
            made[where] = part.new_tensor([0.5, 1.0])
        else:
            known = part[part[:, 1] < 0.5, 0] if column.optional else part[:, 0]
            made[where.start] = known.quantile(0.5, interpolation="nearest")
    return made.view(rows.shape[1:])


def _errors(columns: Sequence[ColumnSpec], originals: Tensor, rows: Tensor) -> NDArray[np.float64]:
    """(N, columns): 0 or 1 for categories and flags, for numbers as a share of the range."""
    true, made = (decode(columns, part.cpu().flatten(1).numpy()) for part in (originals, rows))
    spans = np.array([column.span if column.is_number else 1.0 for column in columns])
    errors = np.abs(true - made) / spans
    named = np.array([not column.is_number for column in columns], dtype=bool)
    errors[:, named] = errors[:, named] > 0
    # Where one of the two has no number; where neither has one, nothing is wrong.
    return np.where(np.isnan(true) & np.isnan(made), 0.0, np.where(np.isnan(errors), 1.0, errors))


GREY = 0.5

# Public pictures that are offered as guesses, and those that they are tried on.
OFFERED, TRIED = 48, 192
CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False)
class Guess:
    """One picture that is offered for every victim, or one for every class, or as many others as a batch has."""

    name: str  # guess-mean, guess-grey or guess-class; of rows and texts others, such as guess-drawn
    image: Tensor  # (C, H, W) on the [0, 1] scale, float32; what is offered where nothing is known of the label
    # (classes, C, H, W), what is offered for a known label; `None`: the same picture for all
    by_class: Tensor | None = None
    # Public rows, or texts (N, 1, 1, T): of these a batch is offered, and paired with the true ones as an attack's are.
    pool: Tensor | None = None

    def offer(self, labels: Tensor) -> Tensor:
        """Return what is offered for victims with these labels (B,): (B, C, H, W)."""
        if self.pool is not None:
            return self.pool[torch.linspace(0, len(self.pool) - 1, len(labels)).long()]
        if self.by_class is None:
            return self.image.expand(len(labels), *self.image.shape)
        return self.by_class[labels]


def guesses(
    public_images: Tensor, public_labels: Tensor | None = None, classes: int = 0, columns: Sequence[ColumnSpec] = ()
) -> tuple[Guess, ...]:
    """Return the guesses that public images of the same kind allow: their mean, constant grey, the mean of a class.

    The mean is the constant that minimises the expected MSE for images drawn like these; the mean of a class is
    that for an adversary who knows the label without any upload. Of rows of a table they are the most frequent
    value or the median of each column instead, of all rows and of those of a class, and a batch of the public rows
    themselves. ``None`` labels: no guess by class.
    """
    if public_images.ndim != 4 or len(public_images) == 0:
        raise ValueError(f"public images must be (N, C, H, W) with N >= 1; given {tuple(public_images.shape)}")
    images = public_images.detach().cpu().float()
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise ValueError("public images must be on the [0, 1] scale")
    if columns:
        return _row_guesses(images, public_labels, classes, columns)
    mean = images.double().mean(dim=0).float()
    common = (Guess("guess-mean", mean), Guess("guess-grey", torch.full_like(mean, GREY)))
    if public_labels is None:
        return common
    return (*common, Guess("guess-class", mean, _class_means(images, public_labels.cpu(), classes, mean)))


def best_guess_mse(guesses: Sequence[Guess], originals: Tensor, labels: Tensor) -> Tensor:
    """Return the lowest MSE (B,) that any of the guesses reaches at each original (B, C, H, W), in float64."""
    true = originals.cpu().double()
    same = (guess for guess in guesses if guess.pool is None)
    errors = [(true - guess.offer(labels).double()).square().flatten(1).mean(dim=1) for guess in same]
    return torch.stack(errors).amin(dim=0)


def recovery_chance(
    public_images: Tensor, guesses: Sequence[Guess], success_ssim: float, columns: Sequence[ColumnSpec] = ()
) -> float:
    """Return an estimate of how often the best constant picture counts as a recovered image, from above.

    Each guess and some public images are offered for other public images. Of each the upper Clopper-Pearson limit
    is taken, at a confidence that holds for all of them together (Bonferroni), and of these the largest. It is an
    estimate all the same: a better picture may exist that is not among those that were tried. It is 1 where there
    are too few public images to try anything on.
    """
    offered = public_images[:OFFERED]
    tried = public_images[OFFERED : OFFERED + TRIED]
    if len(tried) == 0:
        return 1.0
    constant = [guess.image for guess in guesses if guess.by_class is None and guess.pool is None]
    pictures = torch.cat([offered, *(image[None] for image in constant)])
    true = tried.cpu().double().flatten(1)
    bar = torch.stack([(true - image.double().flatten()).square().mean(dim=1) for image in constant]).amin(dim=0)
    hits = [_hits(picture.expand_as(tried), tried, bar, success_ssim, columns) for picture in pictures]
    return binomial_upper(max(hits), len(tried), (1 - CONFIDENCE) / len(pictures))


def _hits(offered: Tensor, tried: Tensor, bar: Tensor, success_ssim: float, columns: Sequence[ColumnSpec]) -> int:
    near = metrics.mse(tried, offered) < bar
    if not bool(near.any()):
        return 0
    if columns:
        return sum(score.is_recovered for score in row_scores(columns, tried[near], offered[near]))
    return int((metrics.ssim(tried[near], offered[near]) >= success_ssim).sum())


def _row_guesses(rows: Tensor, labels: Tensor | None, classes: int, columns: Sequence[ColumnSpec]) -> tuple[Guess, ...]:
    common = most_frequent(columns, rows)
    mode, drawn = Guess("guess-mode", common), Guess("guess-drawn", common, pool=rows)
    if labels is None:
        return mode, drawn
    parts = [rows[labels.cpu() == label] for label in range(classes)]
    by_class = torch.stack([most_frequent(columns, part) if len(part) else common for part in parts])
    return mode, Guess("guess-class", common, by_class), drawn


def _class_means(images: Tensor, labels: Tensor, classes: int, mean: Tensor) -> Tensor:
    if labels.shape != (len(images),) or int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"public labels must be ({len(images)},), from 0 to {classes - 1}")
    total = torch.zeros(classes, *mean.shape, dtype=torch.float64).index_add_(0, labels, images.double())
    counts = labels.bincount(minlength=classes)
    means = (total / counts.clamp(min=1)[:, None, None, None]).float()
    return torch.where((counts > 0)[:, None, None, None], means, mean)
