"""The referee: scores reconstructions against the truth, which its caller rebuilds. Attacks never see the result.

All figures are per image. MSE, PSNR, SSIM and LPIPS are on the [0, 1] scale after clamping; ``mse_normalised`` is the
MSE of the same clamped images on the scale of the network's input, so larger by one over the squared deviation.
Re-identification asks another question than these: does the picture, good or bad, lie nearer to its original than to
each of some other images of the same data set? A picture that nobody would call recovered may still tell its owner.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedpriv.attacks import metrics
from fedpriv.attacks.baselines import Guess, best_guess_mse, guesses, recovery_chance, row_scores
from fedpriv.attacks.observation import CandidateLists
from fedpriv.attacks.reconstruction import Optimum, Reconstruction, Restart
from fedpriv.core.columns import ColumnSpec, is_signal
from fedpriv.core.names import END, PAD, START
from fedpriv.core.records import Score
from fedpriv.data.tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class Truth:
    """What one upload, or one sum of uploads, was made of."""

    round: int
    client: int  # the client; for a sum the one that its observation names
    images: Tensor  # (B, C, H, W) on the [0, 1] scale
    labels: Tensor  # int64 (B,), by which those that an attack names are scored
    # for each image its client and its number in that client's batch; `None`: `client`, and their order
    owners: tuple[tuple[int, int], ...] | None = None
    clients: int = 1  # how many clients' uploads are in the sum; 1 for a single upload
    # (N, C, H, W) on the [0, 1] scale: images of the same data set among which the original is to be picked out, no two
    # of them alike, and none of them like an original; `None`: nothing is to be picked
    others: Tensor | None = None
    other_labels: Tensor | None = None  # int64 (N,)
    labels_known: bool = False  # whether the adversary knows the originals' labels, and so which of the others are out
    # what an attack picks from that is given a list for each image; `None`: no attack is
    candidates: CandidateLists | None = None
    # for each image, in how many releases it was used by the time of this upload; `None`: not known
    releases: tuple[int, ...] | None = None
    # for each image, how often the best decision among it and the others is right; `None`: not known
    optima: tuple[Optimum, ...] | None = None
    # int64 (B,), those that went into the upload, where clients change labels; `None`: `labels`
    used_labels: Tensor | None = None
    columns: tuple[ColumnSpec, ...] = ()  # of the table whose rows the "images" are; empty: they are images
    # of texts, whose tokens the "images" are, int64 (B, 1, 1, T); `None`: they are images or rows
    tokenizer: Tokenizer | None = None

    @property
    def used(self) -> Tensor:
        """The labels (B,) that went into the upload, true or changed."""
        return self.labels if self.used_labels is None else self.used_labels

    def place(self, number: int) -> tuple[int, int]:
        """The client of an image, and the image's number in that client's batch."""
        return (self.client, number) if self.owners is None else self.owners[number]


@dataclass(frozen=True)
class Scores:
    """Lines of scores.jsonl, why they have no LPIPS, and the pictures that they are about."""

    scores: tuple[Score, ...]  # by restart, then image
    lpips_reason: str | None  # `None` where LPIPS was computed
    # number of the true image in the truth -> what the chosen restart made of it, (C, H, W) on [0, 1]
    pictures: Mapping[int, Tensor]


# fields of what no attack has made
UNMADE: Mapping[str, Any] = {"restart": 0, "chosen": True, "loss": None, "note": ""}


def scored(truth: Truth, number: int, label: int | None, *, offered: int, picked: bool = False, **fields: Any) -> Score:
    """Return the line about a true image; ``fields``: of :class:`Score`, all that the truth does not decide.

    ``label``: the inferred one. ``offered``: the images from which the one that goes with it was chosen by its error.
    """
    client, place = truth.place(number)
    true_label = int(truth.labels[number])
    # In a batch the best decision is that of somebody who gives one answer for each image.
    optimum = truth.optima[number] if truth.optima is not None and (picked or offered == 1) else None
    return Score(
        round=truth.round,
        client=client,
        image=place,
        label=label,
        true_label=true_label,
        label_correct=None if label is None else label == true_label,
        clients=truth.clients,
        picked=picked,
        offered=offered,
        chance=_chance(truth, number, offered, picked=picked),
        releases=None if truth.releases is None else truth.releases[number],
        best=None if optimum is None else optimum.share,
        draws=0 if optimum is None else optimum.draws,
        is_signal=not truth.columns and "words" not in fields and is_signal(*truth.images.shape[-2:]),
        **fields,
    )


def _chance(truth: Truth, image: int, offered: int, *, picked: bool) -> float | None:
    """How often a guess, of several images the nearest, picks an image out of candidates as likely as it is."""
    label = truth.used[image]
    if picked:
        return None if truth.candidates is None else 1 / len(truth.candidates.alike(image, label, truth.labels_known))
    if truth.others is None:
        return None
    alike = len(truth.others)
    if truth.labels_known and truth.other_labels is not None:
        alike = int((truth.other_labels == label).sum())
    return min(1.0, offered / (1 + alike))


def bare(tokens: Tensor) -> list[int]:
    """Return the tokens of one sequence that are part of a text: without beginnings, ends and padding."""
    numbers: list[int] = tokens.flatten().tolist()
    return [number for number in numbers if number not in (PAD, START, END)]


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
    every, picked = torch.arange(len(truth.images)), reconstruction.picked
    common: dict[str, Any] = {"attack": reconstruction.attack, "upload": upload, "picked": picked, "note": note}
    scores: list[Score] = []
    pictures: dict[int, Tensor] = {}
    reasons: list[str | None] = []
    for restart, attempt in enumerate(reconstruction.attempts):
        chosen = restart == reconstruction.chosen
        rows, columns = (every, every) if picked else _pairs(truth.images, attempt)
        if len(rows) == 0:
            continue
        images = attempt.images[columns].clamp(0, 1)
        if chosen:
            pictures = dict(zip(rows.tolist(), images, strict=True))
        found, reason = _compared(
            truth, rows, images, std, perceptual=chosen and perceptual, padded=padded, picked=picked
        )
        reasons.append(reason)
        # An attack that shows fewer pictures than it may has chosen when to guess.
        offered = 1 if picked else max(len(attempt.images), len(truth.images))
        about = common | {"restart": restart, "chosen": chosen, "loss": attempt.loss, "offered": offered}
        for number, label, figures in zip(rows.tolist(), attempt.labels[columns].tolist(), found, strict=True):
            # Recovered is what is like the original and nearer to it than every guess; but what was in the adversary's
            # hands already is not.
            is_alike = figures["cells"].is_recovered if truth.columns else figures["ssim"] >= success_ssim
            recovered = not picked and is_alike and figures["mse"] < float(bar[number])
            named = label if label >= 0 else None
            scores.append(scored(truth, number, named, recovered=recovered, **about, **figures))
    return Scores(tuple(scores), _last(reasons), pictures)


def missed(truth: Truth, attack: str, upload: str, scores: Sequence[Score], *, picked: bool) -> tuple[Score, ...]:
    """Return a line, for rates alone and without figures, for each image for which the attack offered nothing."""
    if truth.tokenizer is not None:
        from fedpriv.attacks.texts.referee import missed_sentences  # which only texts need

        return missed_sentences(truth, attack, upload, scores)
    places = {(score.client, score.image) for score in scores if score.chosen}
    about = {**UNMADE, "attack": attack, "upload": upload, "offered": 1 if picked else len(truth.labels)}
    nothing: dict[str, Any] = {
        "mse": math.inf,
        "mse_normalised": math.inf,
        "psnr": -math.inf,
        "ssim": -1.0,
        "lpips": None,
    }
    return tuple(
        scored(truth, number, None, picked=picked, recovered=False, **nothing, **about)
        for number in range(len(truth.labels))
        if truth.place(number) not in places
    )


def score_guesses(
    guesses: Sequence[Guess], truth: Truth, std: Sequence[float], *, perceptual: bool = True, padded: bool = False
) -> Scores:
    """Score the guesses as if they were reconstructions; by definition none recovers anything.

    Of a batch an attack's rows are paired with the true ones, which alone makes many cells right. So is the guess of
    other public rows; a single row has none to be paired with.
    """
    if truth.tokenizer is not None:
        from fedpriv.attacks.texts.referee import score_guessed_sentences  # which only texts need

        return score_guessed_sentences(guesses, truth)
    scores: list[Score] = []
    pictures: dict[int, Tensor] = {}
    reasons: list[str | None] = []
    for guess in guesses:
        images = guess.offer(truth.labels)
        if guess.by_class is not None:
            pictures = dict(enumerate(images))
        if guess.pool is not None:
            if len(images) == 1:
                continue
            images = images[metrics.match(truth.images, images)]
        offered = 1 if guess.pool is None else len(images)
        about = {**UNMADE, "attack": guess.name, "upload": "none", "recovered": False, "offered": offered}
        found, reason = _compared(truth, torch.arange(len(images)), images, std, perceptual=perceptual, padded=padded)
        scores += [scored(truth, number, None, **figures, **about) for number, figures in enumerate(found)]
        reasons.append(reason)
    return Scores(tuple(scores), _last(reasons), pictures)


def _compared(
    truth: Truth,
    rows: Tensor,
    images: Tensor,
    std: Sequence[float],
    *,
    perceptual: bool,
    padded: bool,
    picked: bool = False,
) -> tuple[list[dict[str, Any]], str | None]:
    """Compare images (B, C, H, W) with the true ones of these numbers (B,).

    Returned are of each the fields of :class:`Score` that are figures, and why there is no LPIPS.
    """
    originals, scale = truth.images[rows], torch.tensor(std, dtype=torch.float64)[:, None, None]
    mse = metrics.mse(originals, images)
    nothing = [None] * len(images)
    lpips, reason = _lpips(truth, originals, images) if perceptual else (nothing, None)
    ranks, candidates = _picks(truth, rows, images) if picked else _ranks(originals, images, truth.others)
    figures: dict[str, Sequence[Any]] = {
        "mse": mse.tolist(),
        "mse_normalised": metrics.mse(originals.cpu().double() / scale, images.cpu().double() / scale).tolist(),
        "lpips": lpips,
        "rank": ranks,
        "candidates": candidates,
    }
    if truth.columns:
        figures |= {"psnr": nothing, "ssim": nothing, "cells": row_scores(truth.columns, originals, images)}
    else:
        psnr = -10 * mse.clamp(min=SMALLEST_MSE).log10()
        figures |= {"psnr": psnr.tolist(), "ssim": metrics.ssim(originals, images).tolist()}
        figures["ssim_padded"] = metrics.padded_ssim(originals, images).tolist() if padded else nothing
    return [dict(zip(figures, values, strict=True)) for values in zip(*figures.values(), strict=True)], reason


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


def _pairs(originals: Tensor, attempt: Restart) -> tuple[Tensor, Tensor]:
    """Numbers of originals and of the images that go with them, one to one, in the order of the originals."""
    images = attempt.images.clamp(0, 1)
    if originals.shape == images.shape:
        # What stands for examples that were not read is as a broken image: it takes no original of one that was read.
        _, kinds, counts = images.flatten(1).unique(dim=0, return_inverse=True, return_counts=True)
        read = (counts[kinds] == 1) | (attempt.labels >= 0)
        return torch.arange(len(originals)), metrics.match(
            originals, images.where(read[:, None, None, None], torch.nan)
        )
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
        return [None] * len(images), f"it is for 1 or 3 channels, the images have {len(originals[0])}, drawn as tiles"
    result = metrics.lpips_scores(originals, images)
    if result.values is None:
        return [None] * len(images), result.reason
    return [float(value) for value in result.values], None
