"""The referee: compares reconstructions with the truth, which the caller rebuilds, and tells nobody but the reader.

All figures are per image. MSE, PSNR, SSIM and LPIPS are on the [0, 1] scale after clamping; ``mse_normalised`` is the
MSE of the same clamped images on the scale of the network's input, so larger by one over the squared deviation.
Re-identification asks another question than these: does the picture, good or bad, lie nearer to its original than to
each of some other images of the same data set? A picture that nobody would call recovered may still tell its owner.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import binomtest, bootstrap
from torch import Tensor

from fedpriv import metrics
from fedpriv.attacks.baselines import Guess, best_guess_mse
from fedpriv.attacks.reconstruction import Reconstruction
from fedpriv.records import CONFIDENCE, Interval, Score

__all__ = [
    "Scores",
    "Truth",
    "median_interval",
    "rate_interval",
    "score",
    "score_guesses",
]

SMALLEST_MSE = 1e-20  # keeps the PSNR of a perfect image finite: 200 dB
ROUNDING = 1 - 1e-6  # of a guess's MSE
RESAMPLES = 9999


@dataclass(frozen=True, eq=False)
class Truth:
    """What one upload, or one sum of uploads, was made of.

    Attributes:
        round: the round.
        client: the client; for a sum the one that its observation names.
        images: (B, C, H, W) on the [0, 1] scale.
        labels: int64 (B,).
        owners: for each image its client and its number in that client's batch; ``None``: ``client``, and their order.
        clients: how many clients' uploads are in the sum; 1 for a single upload.
        others: (N, C, H, W) on the [0, 1] scale: images of the same data set among which the original is to be picked
            out; ``None``: nothing is to be picked.
    """

    round: int
    client: int
    images: Tensor
    labels: Tensor
    owners: tuple[tuple[int, int], ...] | None = None
    clients: int = 1
    others: Tensor | None = None

    def place(self, number: int) -> tuple[int, int]:
        """The client of an image, and the image's number in that client's batch."""
        return (self.client, number) if self.owners is None else self.owners[number]


@dataclass(frozen=True)
class Scores:
    """Lines of scores.jsonl, why they have no LPIPS, and the pictures that they are about.

    Attributes:
        scores: by restart, then image.
        lpips_reason: ``None`` where LPIPS was computed.
        pictures: number of the true image in the truth -> what the chosen restart made of it, (C, H, W) on [0, 1].
    """

    scores: tuple[Score, ...]
    lpips_reason: str | None
    pictures: Mapping[int, Tensor]


@dataclass(frozen=True, eq=False)
class _Figures:
    """The figures of a batch of images, each (B,)."""

    mse: Tensor
    mse_normalised: Tensor
    psnr: Tensor
    ssim: Tensor
    ranks: list[int | None]
    candidates: list[int | None]


def score(
    reconstruction: Reconstruction,
    upload: str,
    truth: Truth,
    guesses: Sequence[Guess],
    std: Sequence[float],
    success_ssim: float,
    *,
    perceptual: bool = True,
) -> Scores:
    """Score every restart of one reconstruction.

    Reconstructed images of a batch come in no order: each restart's are matched one to one with the true ones, by the
    least total MSE, and labels go with their images. Their number follows from public settings and can differ from the
    true one (Poisson sampling, several local passes): then only pairs are scored, and the note says how many are not.

    Args:
        reconstruction: what the attack offers.
        upload: protected or unprotected.
        truth: of the same round and client.
        guesses: what has to be beaten.
        std: the standard deviations of the normalisation, one a channel.
        success_ssim: from which SSIM on an image counts as recovered.
        perceptual: whether to compute LPIPS, for the chosen restart.

    Raises:
        ValueError: reconstruction and truth are of different victims or shapes.
    """
    _check(reconstruction, truth)
    bar = best_guess_mse(guesses, truth.images, truth.labels)
    note = "; ".join(text for text in (reconstruction.note, _unpaired(reconstruction, truth)) if text)
    scores: list[Score] = []
    pictures: dict[int, Tensor] = {}
    reason = None
    for restart, attempt in enumerate(reconstruction.attempts):
        chosen = restart == reconstruction.chosen
        rows, columns = _pairs(truth.images, attempt.images.clamp(0, 1))
        if len(rows) == 0:
            continue
        originals, images, labels = truth.images[rows], attempt.images[columns].clamp(0, 1), attempt.labels[columns]
        figures = _figures(originals, images, std, truth.others)
        lpips, why = _lpips(originals, images) if chosen and perceptual else ([None] * len(images), None)
        reason = why or reason
        if chosen:
            pictures = dict(zip(rows.tolist(), images, strict=True))
        for k, image in enumerate(rows.tolist()):
            label = int(labels[k]) if labels[k] >= 0 else None
            # An attack that offers a guess where it found nothing must not beat that guess by a rounding error.
            beaten = float(figures.mse[k]) < float(bar[image]) * ROUNDING
            recovered = float(figures.ssim[k]) >= success_ssim and beaten
            scores.append(
                _scored(
                    truth, image, figures, k, lpips[k],
                    attack=reconstruction.attack, upload=upload, restart=restart, chosen=chosen, loss=attempt.loss,
                    label=label, label_correct=None if label is None else label == int(truth.labels[image]),
                    recovered=recovered, note=note,
                )
            )  # fmt: skip
    return Scores(tuple(scores), reason, pictures)


def score_guesses(guesses: Sequence[Guess], truth: Truth, std: Sequence[float], *, perceptual: bool = True) -> Scores:
    """Score the guesses as if they were reconstructions; by definition none recovers anything.

    Args:
        guesses: the guesses.
        truth: of one victim.
        std: the standard deviations of the normalisation, one a channel.
        perceptual: whether to compute LPIPS.
    """
    scores: list[Score] = []
    pictures: dict[int, Tensor] = {}
    reason = None
    for guess in guesses:
        images = guess.offer(truth.labels)
        figures = _figures(truth.images, images, std, truth.others)
        lpips, why = _lpips(truth.images, images) if perceptual else ([None] * len(images), None)
        reason = why or reason
        scores += [
            _scored(
                truth, k, figures, k, lpips[k],
                attack=guess.name, upload="none", restart=0, chosen=True, loss=None,
                label=None, label_correct=None, recovered=False, note="",
            )
            for k in range(len(images))
        ]  # fmt: skip
        if guess.by_class is not None:
            pictures = dict(enumerate(images))
    return Scores(tuple(scores), reason, pictures)


def _scored(truth: Truth, image: int, figures: _Figures, k: int, lpips: float | None, **attempt: Any) -> Score:
    """The line about one true image, whose figures are the k-th, and about the attempt at it."""
    client, number = truth.place(image)
    return Score(
        round=truth.round,
        client=client,
        image=number,
        true_label=int(truth.labels[image]),
        mse=float(figures.mse[k]),
        mse_normalised=float(figures.mse_normalised[k]),
        psnr=float(figures.psnr[k]),
        ssim=float(figures.ssim[k]),
        lpips=lpips,
        clients=truth.clients,
        rank=figures.ranks[k],
        candidates=figures.candidates[k],
        **attempt,
    )


def median_interval(
    values: Sequence[float],
    generator: np.random.Generator,
    confidence: float = CONFIDENCE,
    groups: Sequence[Hashable] | None = None,
) -> Interval:
    """Return the median and its percentile bootstrap interval (Efron 1979), 9,999 resamples.

    Images that came out of one upload rise and fall together: with ``groups`` whole groups are drawn, not single
    values (the cluster bootstrap; Davison and Hinkley 1997, section 3.8).

    Args:
        values: one an image, at least one, finite.
        generator: source of the resamples.
        confidence: nominal coverage, between 0 and 1.
        groups: for each value the upload that it comes from; ``None``: each from its own.

    Raises:
        ValueError: there is no value, one is not finite, or the groups are of another number.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError("a median interval needs at least one value, all of them finite")
    if groups is not None and len(groups) != data.size:
        raise ValueError(f"{data.size} values, but {len(groups)} groups")
    members = _members(data, range(data.size) if groups is None else groups)
    median = float(np.median(data))
    if len(members) == 1:
        return Interval(median, None, None, confidence)

    middle = np.nanmedian if np.isnan(members).any() else np.median  # the plain one is many times faster

    def median_of(drawn: np.ndarray, axis: int) -> np.ndarray:
        chosen = members[drawn]
        medians: np.ndarray = middle(chosen.reshape(*chosen.shape[:-2], -1), axis=axis, overwrite_input=True)
        return medians

    result = bootstrap(
        (np.arange(len(members)),),
        median_of,
        vectorized=True,
        batch=max(1, 2**24 // members.size),
        confidence_level=confidence,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=generator,
    )
    low, high = result.confidence_interval
    return Interval(median, float(low), float(high), confidence)


def rate_interval(successes: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """Return a success rate and Wilson's score interval (1927), which has a width for 0 of n and for n of n too.

    Args:
        successes: from 0 to ``trials``.
        trials: at least 1.
        confidence: nominal coverage, between 0 and 1.

    Raises:
        ValueError: there are no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes of {trials} trials")
    ends = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return Interval(successes / trials, float(ends.low), float(ends.high), confidence)


def _members(data: np.ndarray, groups: Iterable[Hashable]) -> np.ndarray:
    """The values of each group in a row, filled up with NaN: (groups, most values in one)."""
    rows: dict[Hashable, list[float]] = {}
    for value, group in zip(data.tolist(), groups, strict=True):
        rows.setdefault(group, []).append(value)
    members = np.full((len(rows), max(map(len, rows.values()))), np.nan)
    for number, row in enumerate(rows.values()):
        members[number, : len(row)] = row
    return members


def _check(reconstruction: Reconstruction, truth: Truth) -> None:
    if (reconstruction.round, reconstruction.client) != (truth.round, truth.client):
        raise ValueError(
            f"the reconstruction is of round {reconstruction.round}, client {reconstruction.client}; "
            f"the truth of round {truth.round}, client {truth.client}"
        )
    if reconstruction.images.shape[1:] != truth.images.shape[1:]:
        raise ValueError(
            f"images of the reconstruction have the shape {tuple(reconstruction.images.shape[1:])}, "
            f"those of the truth {tuple(truth.images.shape[1:])}"
        )


def _unpaired(reconstruction: Reconstruction, truth: Truth) -> str:
    offered, true = len(reconstruction.images), len(truth.images)
    return (
        "" if offered == true else f"{offered} images reconstructed for {true} true ones; {min(offered, true)} paired"
    )


def _pairs(originals: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of originals and of the images that go with them, one to one, in the order of the originals."""
    if originals.shape == images.shape:
        return torch.arange(len(originals)), metrics.match(originals, images)
    one, other = (part.cpu().double().flatten(1) for part in (originals, images))
    rows, columns = linear_sum_assignment(torch.cdist(one, other).square().numpy())
    return torch.from_numpy(rows), torch.from_numpy(columns)


def _figures(originals: Tensor, images: Tensor, std: Sequence[float], others: Tensor | None) -> _Figures:
    scale = torch.tensor(std, dtype=torch.float64)[:, None, None]
    mse = metrics.mse(originals, images)
    ranks, candidates = _ranks(originals, images, others)
    return _Figures(
        mse=mse,
        mse_normalised=metrics.mse(originals.cpu().double() / scale, images.cpu().double() / scale),
        psnr=-10 * mse.clamp(min=SMALLEST_MSE).log10(),
        ssim=metrics.ssim(originals, images),
        ranks=ranks,
        candidates=candidates,
    )


def _ranks(originals: Tensor, images: Tensor, others: Tensor | None) -> tuple[list[int | None], list[int | None]]:
    """The place of each original by distance to its picture, and among how many; copies of the original do not count.

    A tie counts against the attack, so that a picture as near to all candidates as to the original picks nothing.
    """
    if others is None:
        return [None] * len(images), [None] * len(images)
    true, made, rest = (part.cpu().double().flatten(1) for part in (originals, images, others))
    own = (true - made).square().sum(dim=1)
    distances = torch.cdist(made, rest, compute_mode="donot_use_mm_for_euclid_dist").square()
    differs = torch.stack([(rest != one).any(dim=1) for one in true])
    # The two distances are computed in different ways: an equal one may differ in its last digits.
    nearer = (distances <= own[:, None] * (1 + 1e-9)) & differs
    return (1 + nearer.sum(dim=1)).tolist(), (1 + differs.sum(dim=1)).tolist()


def _lpips(originals: Tensor, images: Tensor) -> tuple[list[float | None], str | None]:
    if originals.shape[1] not in (1, 3):
        return [None] * len(images), f"it is for 1 or 3 channels, the images have {len(originals[0])}"
    result = metrics.lpips_scores(originals, images)
    if result.values is None:
        return [None] * len(images), result.reason
    return [float(value) for value in result.values], None
