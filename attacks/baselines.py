"""Guesses that never saw an upload: what an attack has to beat before it shows any leak."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import binomtest
from torch import Tensor

from fedpriv import metrics
from fedpriv.attacks.rows import most_frequent, recovered_rows
from fedpriv.core.columns import Column

__all__ = ["GREY", "Guess", "best_guess_mse", "guesses", "recovery_chance"]

GREY = 0.5

# Public pictures that are offered as guesses, and those that they are tried on.
OFFERED, TRIED = 48, 192
CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False)
class Guess:
    """One picture that is offered for every victim, or one for every class.

    Attributes:
        name: guess-mean, guess-grey or guess-class; of rows guess-mode or guess-class.
        image: (C, H, W) on the [0, 1] scale, float32; what is offered where nothing is known of the label.
        by_class: (classes, C, H, W), what is offered for a known label; ``None``: the same picture for all.
    """

    name: str
    image: Tensor
    by_class: Tensor | None = None

    def offer(self, labels: Tensor) -> Tensor:
        """Return what is offered for victims with these labels (B,): (B, C, H, W)."""
        if self.by_class is None:
            return self.image.expand(len(labels), *self.image.shape)
        return self.by_class[labels]


def guesses(
    public_images: Tensor, public_labels: Tensor | None = None, classes: int = 0, columns: Sequence[Column] = ()
) -> tuple[Guess, ...]:
    """Return the guesses that public images of the same kind allow: their mean, constant grey, the mean of a class.

    The mean is the constant that minimises the expected MSE for images drawn like these; the mean of a class is that
    for an adversary who knows the label without any upload. Of rows of a table they are the most frequent value or the
    median of each column instead, of all rows and of those of a class.

    Args:
        public_images: (N, C, H, W) with N >= 1, on the [0, 1] scale; not the clients' (test images will do).
        public_labels: int64 (N,), for an adversary who knows the victims' labels; ``None``: no guess by class.
        classes: number of classes; a class without an image gets the mean of all.
        columns: of the table whose rows these are; empty: they are images.

    Raises:
        ValueError: there are no images, they are not on the [0, 1] scale, or the labels do not fit.
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
    """Return the lowest MSE that any of the guesses reaches at each original.

    Args:
        guesses: at least one.
        originals: (B, C, H, W) on the [0, 1] scale.
        labels: int64 (B,).

    Returns:
        float64 (B,).
    """
    true = originals.cpu().double()
    errors = [(true - guess.offer(labels).double()).square().flatten(1).mean(dim=1) for guess in guesses]
    return torch.stack(errors).amin(dim=0)


def recovery_chance(
    public_images: Tensor, guesses: Sequence[Guess], success_ssim: float, columns: Sequence[Column] = ()
) -> float:
    """Return an estimate of how often the best constant picture counts as a recovered image, from above.

    Each guess and some public images are offered for other public images. Of each the upper Clopper-Pearson limit is
    taken, at a confidence that holds for all of them together (Bonferroni), and of these the largest. It is an estimate
    all the same: a better picture may exist that is not among those that were tried.

    Args:
        public_images: (N, C, H, W) on the [0, 1] scale.
        guesses: of these images; they are what a recovered image must beat.
        success_ssim: from which SSIM on an image counts as recovered.
        columns: of the table whose rows these are; empty: they are images.

    Returns:
        From 0 to 1; 1 where there are too few public images to try anything on.
    """
    offered = public_images[:OFFERED]
    tried = public_images[OFFERED : OFFERED + TRIED]
    if len(tried) == 0:
        return 1.0
    constant = [guess.image for guess in guesses if guess.by_class is None]
    pictures = torch.cat([offered, *(image[None] for image in constant)])
    true = tried.cpu().double().flatten(1)
    bar = torch.stack([(true - image.double().flatten()).square().mean(dim=1) for image in constant]).amin(dim=0)
    hits = [_hits(picture.expand_as(tried), tried, bar, success_ssim, columns) for picture in pictures]
    level = 1 - (1 - CONFIDENCE) / len(pictures)
    ends = binomtest(max(hits), len(tried)).proportion_ci(2 * level - 1, method="exact")
    return float(ends.high)


def _hits(offered: Tensor, tried: Tensor, bar: Tensor, success_ssim: float, columns: Sequence[Column]) -> int:
    near = metrics.mse(tried, offered) < bar
    if not bool(near.any()):
        return 0
    if columns:
        return sum(recovered_rows(columns, tried[near], offered[near]))
    return int((metrics.ssim(tried[near], offered[near]) >= success_ssim).sum())


def _row_guesses(rows: Tensor, labels: Tensor | None, classes: int, columns: Sequence[Column]) -> tuple[Guess, ...]:
    common = most_frequent(columns, rows)
    if labels is None:
        return (Guess("guess-mode", common),)
    parts = [rows[labels.cpu() == label] for label in range(classes)]
    by_class = torch.stack([most_frequent(columns, part) if len(part) else common for part in parts])
    return Guess("guess-mode", common), Guess("guess-class", common, by_class)


def _class_means(images: Tensor, labels: Tensor, classes: int, mean: Tensor) -> Tensor:
    if labels.shape != (len(images),) or int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"public labels must be ({len(images)},), from 0 to {classes - 1}")
    total = torch.zeros(classes, *mean.shape, dtype=torch.float64).index_add_(0, labels, images.double())
    counts = labels.bincount(minlength=classes)
    means = (total / counts.clamp(min=1)[:, None, None, None]).float()
    return torch.where((counts > 0)[:, None, None, None], means, mean)
