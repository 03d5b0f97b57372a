"""The referee: scores reconstructions against the truth, which its caller rebuilds. Attacks never see the result.

All figures are per image. MSE, PSNR, SSIM and LPIPS are on the [0, 1] scale after clamping; ``mse_normalised`` is the
MSE of the same clamped images on the scale of the network's input, so larger by one over the squared deviation.
Re-identification asks another question than these: does the picture, good or bad, lie nearer to its original than to
each of some other images of the same data set? A picture that nobody would call recovered may still tell its owner.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedpriv.attacks import metrics
from fedpriv.attacks.baselines import Guess, best_guess_mse, guesses, recovery_chance, row_scores
from fedpriv.attacks.reconstruction import Reconstruction
from fedpriv.attacks.truth import Scores, Truth, odds, subject
from fedpriv.core.columns import ColumnSpec
from fedpriv.core.records import RowScore, Score

SMALLEST_MSE = 1e-20  # keeps the PSNR of a perfect image finite: 200 dB
ROUNDING = 1 - 1e-6  # of a guess's MSE


def public_guesses(
    public: Tensor, labels: Tensor | None = None, classes: int = 0, columns: Sequence[ColumnSpec] = ()
) -> tuple[Guess, ...]:
    """Return guesses made of public images, rows or texts, without any upload."""
    if public.dtype != torch.int64:
        return guesses(public, labels, classes, columns)
    from fedpriv.attacks.texts.referee import sentence_guesses  # which only texts need

    return sentence_guesses(public)


def guessed_by_chance(
    public: Tensor, offered: Sequence[Guess], success_ssim: float, columns: Sequence[ColumnSpec] = ()
) -> float:
    """Return how often such a guess counts as a recovered example, estimated on public ones."""
    if public.dtype != torch.int64:
        return recovery_chance(public, offered, success_ssim, columns)
    from fedpriv.attacks.texts.referee import exact_chance  # which only texts need

    return exact_chance(public, offered)


def score(
    reconstruction: Reconstruction,
    upload: str,
    truth: Truth,
    guesses: Sequence[Guess],
    std: Sequence[float],
    success_ssim: float,
    *,
    perceptual: bool = True,
    padded: bool = False,
) -> Scores:
    """Score every restart of one reconstruction.

    Reconstructed images of a batch come in no order: each restart's are matched one to one with the true ones, by the
    least total MSE, and labels go with their images. Their number follows from public settings and can differ from the
    true one (Poisson sampling, several local passes): then only pairs are scored, and the note says how many are not.
    """
    if truth.tokenizer is not None:
        from fedpriv.attacks.texts.referee import score_sentences  # which only texts need

        return score_sentences(reconstruction, upload, truth, guesses)
    _check(reconstruction, truth)
    # An attack that offers a guess where it found nothing must not beat that guess by a rounding error.
    bar = best_guess_mse(guesses, truth.images, truth.labels) * ROUNDING
    note = "; ".join(text for text in (reconstruction.note, _unpaired(reconstruction, truth)) if text)
    scores: list[Score] = []
    pictures: dict[int, Tensor] = {}
    reasons: list[str | None] = []
    for restart, attempt in enumerate(reconstruction.attempts):
        chosen = restart == reconstruction.chosen
        rows, columns = _in_order(truth) if reconstruction.picked else _pairs(truth.images, attempt.images.clamp(0, 1))
        if len(rows) == 0:
            continue
        images = attempt.images[columns].clamp(0, 1)
        labels = [label if label >= 0 else None for label in attempt.labels[columns].tolist()]
        if chosen:
            pictures = dict(zip(rows.tolist(), images, strict=True))
        lines, reason = _lines(
            truth,
            rows,
            images,
            std,
            perceptual=chosen and perceptual,
            padded=padded,
            labels=labels,
            bar=bar,
            success_ssim=success_ssim,
            # An attack that shows fewer pictures than it may has chosen when to guess.
            offered=1 if reconstruction.picked else max(len(attempt.images), len(truth.images)),
            picked=reconstruction.picked,
            attack=reconstruction.attack,
            upload=upload,
            restart=restart,
            chosen=chosen,
            loss=attempt.loss,
            note=note,
        )
        scores += lines
        reasons.append(reason)
    return Scores(tuple(scores), _last(reasons), pictures)


def missed(truth: Truth, attack: str, upload: str, scores: Sequence[Score], *, picked: bool) -> tuple[Score, ...]:
    """Return a line, for rates alone and without figures, for each image for which the attack offered nothing."""
    if truth.tokenizer is not None:
        from fedpriv.attacks.texts.referee import missed_sentences  # which only texts need

        return missed_sentences(truth, attack, upload, scores)
    places = {(score.client, score.image) for score in scores if score.chosen}
    offered = 1 if picked else len(truth.labels)
    lines = []
    for number in range(len(truth.labels)):
        if truth.place(number) in places:
            continue
        lines.append(
            Score(
                attack=attack,
                upload=upload,
                restart=0,
                chosen=True,
                loss=None,
                mse=math.inf,
                mse_normalised=math.inf,
                psnr=-math.inf,
                ssim=-1.0,
                lpips=None,
                recovered=False,
                note="",
                picked=picked,
                **subject(truth, number, None),
                **odds(truth, number, offered, picked=picked),
            )
        )
    return tuple(lines)


def score_guesses(
    guesses: Sequence[Guess], truth: Truth, std: Sequence[float], *, perceptual: bool = True, padded: bool = False
) -> Scores:
    """Score the guesses as if they were reconstructions; by definition none recovers anything."""
    if truth.tokenizer is not None:
        from fedpriv.attacks.texts.referee import score_guessed_sentences  # which only texts need

        return score_guessed_sentences(guesses, truth)
    scores: list[Score] = []
    pictures: dict[int, Tensor] = {}
    reasons: list[str | None] = []
    count = len(truth.labels)
    for guess in guesses:
        images = guess.offer(truth.labels)
        if guess.by_class is not None:
            pictures = dict(enumerate(images))
        lines, reason = _lines(
            truth,
            torch.arange(count),
            images,
            std,
            perceptual=perceptual,
            padded=padded,
            labels=[None] * count,
            bar=torch.zeros(count),
            success_ssim=0.0,
            offered=1,
            picked=False,
            attack=guess.name,
            upload="none",
            restart=0,
            chosen=True,
            loss=None,
            note="",
        )
        scores += lines
        reasons.append(reason)
    return Scores(tuple(scores), _last(reasons), pictures)


def _lines(
    truth: Truth,
    rows: Tensor,
    images: Tensor,
    std: Sequence[float],
    *,
    perceptual: bool,
    padded: bool,
    labels: Sequence[int | None],
    bar: Tensor,
    success_ssim: float,
    offered: int,
    picked: bool,
    **about: Any,
) -> tuple[list[Score], str | None]:
    """Compare images (B, C, H, W) with the true ones of these numbers (B,); return one line each, why without LPIPS.

    Recovered is what reaches the SSIM, or is a recovered row, and has an MSE below the bar of its true image; but what
    was in the adversary's hands already is not. ``offered``: images from which
    the one that goes with a true image was chosen by its error. ``about``: the fields of :class:`Score` that all lines
    have in common.
    """
    originals, scale = truth.images[rows], torch.tensor(std, dtype=torch.float64)[:, None, None]
    mse = metrics.mse(originals, images)
    normalised = metrics.mse(originals.cpu().double() / scale, images.cpu().double() / scale)
    if truth.columns:
        likeness = _rows(truth, originals, images)
    else:
        likeness = _pictures(originals, images, success_ssim, mse, padded=padded)
    ranks, candidates = _picks(truth, rows, images) if picked else _ranks(originals, images, truth.others)
    lpips, reason = _lpips(truth, originals, images) if perceptual else ([None] * len(images), None)
    lines = []
    for k, (image, label) in enumerate(zip(rows.tolist(), labels, strict=True)):
        line = Score(
            mse=float(mse[k]),
            mse_normalised=float(normalised[k]),
            psnr=likeness[k].psnr,
            ssim=likeness[k].ssim,
            ssim_padded=likeness[k].ssim_padded,
            lpips=lpips[k],
            recovered=not picked and likeness[k].is_alike and float(mse[k]) < float(bar[image]),
            cells=likeness[k].cells,
            rank=ranks[k],
            candidates=candidates[k],
            picked=picked,
            **subject(truth, image, label),
            **odds(truth, image, offered, picked=picked),
            **about,
        )
        lines.append(line)
    return lines, reason


@dataclass(frozen=True)
class _Likeness:
    """Scores other than the MSE: PSNR and SSIM of pictures, cells of rows; and whether they count as alike."""

    is_alike: bool
    psnr: float | None = None
    ssim: float | None = None
    ssim_padded: float | None = None
    cells: RowScore | None = None


def _pictures(originals: Tensor, images: Tensor, success_ssim: float, mse: Tensor, *, padded: bool) -> list[_Likeness]:
    psnr = -10 * mse.clamp(min=SMALLEST_MSE).log10()
    ssim = metrics.ssim(originals, images).tolist()
    others = metrics.padded_ssim(originals, images).tolist() if padded else [None] * len(images)
    figures = zip(psnr.tolist(), ssim, others, strict=True)
    return [_Likeness(valid >= success_ssim, decibel, valid, other) for decibel, valid, other in figures]


def _rows(truth: Truth, originals: Tensor, images: Tensor) -> list[_Likeness]:
    return [_Likeness(cells.is_recovered, cells=cells) for cells in row_scores(truth.columns, originals, images)]


def _in_order(truth: Truth) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(len(truth.images))
    return numbers, numbers


def _last(reasons: Sequence[str | None]) -> str | None:
    return next((reason for reason in reversed(reasons) if reason), None)


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
    true, made = (part.cpu().double().flatten(1) for part in (originals, images))
    rows, columns = linear_sum_assignment(torch.cdist(true, made).square().numpy())
    return torch.from_numpy(rows), torch.from_numpy(columns)


def _ranks(originals: Tensor, images: Tensor, others: Tensor | None) -> tuple[list[int | None], list[int | None]]:
    """The place of each original by distance to its picture, and among how many without copies; ties count against."""
    if others is None:
        return [None] * len(images), [None] * len(images)
    true, made, rest = (part.cpu().double().flatten(1) for part in (originals, images, others))
    own = (true - made).square().sum(dim=1)
    distances = torch.cdist(made, rest, compute_mode="donot_use_mm_for_euclid_dist").square()
    differs = torch.stack([(rest != original).any(dim=1) for original in true])
    # The two distances are computed in different ways: an equal one may differ in its last digits.
    nearer = (distances <= own[:, None] * (1 + 1e-9)) & differs
    return (1 + nearer.sum(dim=1)).tolist(), (1 + differs.sum(dim=1)).tolist()


def _picks(truth: Truth, rows: Tensor, images: Tensor) -> tuple[list[int | None], list[int | None]]:
    """As :func:`_ranks`, each original in the list from which it was to be picked."""
    ranks: list[int | None] = []
    counts: list[int | None] = []
    for number, image in zip(rows.tolist(), images, strict=True):
        listed = None if truth.candidates is None else truth.candidates.images[truth.candidates.lists[number]]
        (rank,), (count,) = _ranks(truth.images[number : number + 1], image[None], listed)
        ranks.append(rank)
        counts.append(count)
    return ranks, counts


def _lpips(truth: Truth, originals: Tensor, images: Tensor) -> tuple[list[float | None], str | None]:
    if truth.columns:
        return [None] * len(images), "it is for pictures, these are rows"
    if originals.shape[1] not in (1, 3):
        return [None] * len(images), f"it is for 1 or 3 channels, the images have {len(originals[0])}"
    result = metrics.lpips_scores(originals, images)
    if result.values is None:
        return [None] * len(images), result.reason
    return [float(value) for value in result.values], None
