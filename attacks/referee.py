"""The referee: compares reconstructions with the truth, which the caller rebuilds, and tells nobody but the reader.

All figures are per image. MSE, PSNR, SSIM and LPIPS are on the [0, 1] scale after clamping; ``mse_normalised`` is the
MSE of the same clamped images on the scale of the network's input, so larger by one over the squared deviation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import bootstrap
from torch import Tensor

from attacks.baselines import Guess, best_guess_mse
from attacks.reconstruction import Reconstruction
from fedpriv import metrics

__all__ = ["Interval", "Score", "Scores", "Truth", "median_interval", "score", "score_guesses"]

SMALLEST_MSE = 1e-20  # keeps the PSNR of a perfect image finite: 200 dB


@dataclass(frozen=True, eq=False)
class Truth:
    """What one upload was made of.

    Attributes:
        round: the round.
        client: the client.
        images: (B, C, H, W) on the [0, 1] scale.
        labels: int64 (B,).
    """

    round: int
    client: int
    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Score:
    """One line of scores.jsonl: one true image, and what one restart of one attack (or a guess) made of it.

    Attributes:
        round: the round.
        client: the client.
        image: the number of the true image in its batch.
        attack: dlg, iga, guess-mean or guess-grey.
        upload: protected or unprotected; none for a guess.
        restart: the restart's number.
        chosen: whether the attack offers this restart.
        loss: the attack's own objective; ``None`` where not finite, and for guesses.
        label: the label that this restart gives; ``None`` for guesses.
        true_label: the label.
        label_correct: whether they agree; ``None`` for guesses.
        mse: on the [0, 1] scale.
        mse_normalised: on the scale of the network's input.
        psnr: in dB, at most 200.
        ssim: at most 1.
        lpips: ``None`` where not computed; only chosen restarts and guesses have one.
        recovered: SSIM of at least the threshold and an MSE below every guess's.
        seconds: wall time of the attack on this victim, all restarts; 0 for guesses.
        note: what the attack said about its result.
    """

    round: int
    client: int
    image: int
    attack: str
    upload: str
    restart: int
    chosen: bool
    loss: float | None
    label: int | None
    true_label: int
    label_correct: bool | None
    mse: float
    mse_normalised: float
    psnr: float
    ssim: float
    lpips: float | None
    recovered: bool
    seconds: float
    note: str


@dataclass(frozen=True)
class Scores:
    """Lines of scores.jsonl, why they have no LPIPS, and the pictures that they are about.

    Attributes:
        scores: by restart, then image.
        lpips_reason: ``None`` where LPIPS was computed.
        pictures: number of the true image -> what the chosen restart made of it, (C, H, W) on [0, 1].
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
    bar = best_guess_mse(guesses, truth.images)
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
        figures = _figures(originals, images, std)
        lpips, why = _lpips(originals, images) if chosen and perceptual else ([None] * len(images), None)
        reason = why or reason
        if chosen:
            pictures = dict(zip(rows.tolist(), images, strict=True))
        for k, image in enumerate(rows.tolist()):
            correct = int(labels[k]) == int(truth.labels[image])
            recovered = float(figures.ssim[k]) >= success_ssim and float(figures.mse[k]) < float(bar[image])
            scores.append(
                Score(
                    round=truth.round,
                    client=truth.client,
                    image=image,
                    attack=reconstruction.attack,
                    upload=upload,
                    restart=restart,
                    chosen=chosen,
                    loss=attempt.loss,
                    label=int(labels[k]),
                    true_label=int(truth.labels[image]),
                    label_correct=correct,
                    mse=float(figures.mse[k]),
                    mse_normalised=float(figures.mse_normalised[k]),
                    psnr=float(figures.psnr[k]),
                    ssim=float(figures.ssim[k]),
                    lpips=lpips[k],
                    recovered=recovered,
                    seconds=reconstruction.seconds,
                    note=note,
                )
            )
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
    reason = None
    for guess in guesses:
        images = guess.image.expand_as(truth.images)
        figures = _figures(truth.images, images, std)
        lpips, why = _lpips(truth.images, images) if perceptual else ([None] * len(images), None)
        reason = why or reason
        scores += [
            Score(
                round=truth.round,
                client=truth.client,
                image=k,
                attack=guess.name,
                upload="none",
                restart=0,
                chosen=True,
                loss=None,
                label=None,
                true_label=int(truth.labels[k]),
                label_correct=None,
                mse=float(figures.mse[k]),
                mse_normalised=float(figures.mse_normalised[k]),
                psnr=float(figures.psnr[k]),
                ssim=float(figures.ssim[k]),
                lpips=lpips[k],
                recovered=False,
                seconds=0.0,
                note="",
            )
            for k in range(len(images))
        ]
    return Scores(tuple(scores), reason, {})


@dataclass(frozen=True)
class Interval:
    """A median over victims and its bootstrap interval.

    Attributes:
        median: the median.
        low: lower end; ``None`` for fewer than two values.
        high: upper end; ``None`` for fewer than two values.
        confidence: the nominal coverage.
    """

    median: float
    low: float | None
    high: float | None
    confidence: float


def median_interval(values: Sequence[float], generator: np.random.Generator, confidence: float = 0.95) -> Interval:
    """Return the median and its percentile bootstrap interval (Efron 1979), 9,999 resamples.

    Args:
        values: one a victim, at least one, finite.
        generator: source of the resamples.
        confidence: nominal coverage, between 0 and 1.

    Raises:
        ValueError: there is no value, or one is not finite.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError("a median interval needs at least one value, all of them finite")
    median = float(np.median(data))
    if data.size == 1:
        return Interval(median, None, None, confidence)
    result = bootstrap(
        (data,), np.median, confidence_level=confidence, n_resamples=9999, method="percentile", rng=generator
    )
    low, high = result.confidence_interval
    return Interval(median, float(low), float(high), confidence)


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


def _figures(originals: Tensor, images: Tensor, std: Sequence[float]) -> _Figures:
    scale = torch.tensor(std, dtype=torch.float64)[:, None, None]
    mse = metrics.mse(originals, images)
    return _Figures(
        mse=mse,
        mse_normalised=metrics.mse(originals.cpu().double() / scale, images.cpu().double() / scale),
        psnr=-10 * mse.clamp(min=SMALLEST_MSE).log10(),
        ssim=metrics.ssim(originals, images),
    )


def _lpips(originals: Tensor, images: Tensor) -> tuple[list[float | None], str | None]:
    if originals.shape[1] not in (1, 3):
        return [None] * len(images), f"it is for 1 or 3 channels, the images have {len(originals[0])}"
    result = metrics.lpips_scores(originals, images)
    if result.values is None:
        return [None] * len(images), result.reason
    return [float(value) for value in result.values], None
