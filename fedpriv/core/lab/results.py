"""What attacks found, in figures: the chosen reconstructions' scores, condensed by attack and kind of upload."""

import statistics
from collections.abc import Iterable, Sequence

from fedpriv.attacks.intervals import median_interval, rate_interval
from fedpriv.attacks.settings import by_conduct, is_active
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import AttackResult, RowResult, Score, sentence_result

_MEDIANS = ("mse", "mse_normalised", "psnr", "ssim", "lpips")


def attack_results(
    scores: Iterable[Score], success_ssim: float, lpips_reason: str | None, seed: int = 0
) -> tuple[AttackResult, ...]:
    """Condense the chosen reconstructions' scores, one row for each attack and kind of upload."""
    chosen = [score for score in scores if score.chosen]
    images = {active: len({score.victim for score in part}) for active, part in by_conduct(chosen).items()}
    guessed = len({score.victim for score in chosen})
    return tuple(
        _condense(group, guessed if upload == "none" else images[is_active(attack)], success_ssim, lpips_reason, seed)
        for (attack, upload), group in by_attack(chosen).items()
    )


def by_attack(scores: Iterable[Score]) -> dict[tuple[str, str], list[Score]]:
    """Return the chosen lines of each attack, or guess, on each kind of upload."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        if score.chosen:
            groups.setdefault((score.attack, score.upload), []).append(score)
    return groups


def _condense(
    group: Sequence[Score], images: int, success_ssim: float, lpips_reason: str | None, seed: int
) -> AttackResult:
    perceptual = [score.lpips for score in group if score.lpips is not None]
    labels = [score.label_correct for score in group if score.label_correct is not None]
    return AttackResult(
        attack=group[0].attack,
        upload=group[0].upload,
        victims=len(group),
        recovered=sum(score.recovered for score in group),
        success_ssim=success_ssim,
        mse=_median(score.mse for score in group),
        mse_normalised=_median(score.mse_normalised for score in group),
        psnr=_median(score.psnr for score in group),
        ssim=_median(score.ssim for score in group),
        lpips=_median(perceptual),
        lpips_reason=None if perceptual else lpips_reason,
        label_accuracy=sum(labels) / len(labels) if labels else None,
        missing=images - len(group),
        identified=_identified(group),
        candidates=min((score.candidates for score in group if score.candidates is not None), default=None),
        intervals=_intervals(group, seed),
        active=is_active(group[0].attack),
        picked=group[0].picked,
        rows=_row_result(group),
        sentences=sentence_result(score.words for score in group),
    )


def _row_result(group: Sequence[Score]) -> RowResult | None:
    """What was read of rows, column by column; ``None``: these are no rows."""
    cells = [score.cells for score in group if score.cells is not None]
    if not cells:
        return None
    right = [each.share_right for each in cells if each.share_right is not None]
    errors = (each.mean_error for each in cells if each.mean_error is not None)
    return RowResult(
        categories={name: statistics.fmean(each.categories[name] for each in cells) for name in cells[0].categories},
        numbers={name: statistics.median(each.numbers[name] for each in cells) for name in cells[0].numbers},
        share_right=statistics.fmean(right) if right else None,
        median_error=_median(errors),
    )


def _median(values: Iterable[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _identified(group: Sequence[Score]) -> int | None:
    """How many originals were picked out; ``None`` where some line does not say (of an earlier version)."""
    ranks = [score.rank for score in group]
    return None if None in ranks else ranks.count(1)


def _intervals(group: Sequence[Score], seed: int) -> dict[str, tuple[float, float]]:
    stream = numpy_stream(seed, "bootstrap")
    # What came out of one upload is drawn together.
    uploads = [score.source for score in group]
    intervals = {}
    for name in _MEDIANS:
        values = [getattr(score, name) for score in group]
        if None not in values:
            intervals[name] = median_interval(values, stream, groups=uploads)
    intervals["recovered"] = rate_interval(sum(score.recovered for score in group), len(group))
    identified = _identified(group)
    if identified is not None:
        intervals["identified"] = rate_interval(identified, len(group))
    return {name: interval.ends for name, interval in intervals.items() if interval.ends is not None}
