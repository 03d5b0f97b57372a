"""The figures of attacks: scores condensed by attack and kind of upload, and success rates between guess and ceiling.

The images that are attacked did take part in the upload, and may have been used before it. So their ceiling is that of
as many participations as they had by then, whatever the sampling: who took part does not depend on what the images are,
and may be known. Later uploads are not attacked, and need not be counted.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from scipy.stats import binomtest

from fedpriv.accounting import Ceiling, Release, ceilings
from fedpriv.accounting.estimated import surer
from fedpriv.attacks.intervals import best_interval, median_interval, rate_interval
from fedpriv.attacks.settings import by_conduct, is_active
from fedpriv.core.columns import worded
from fedpriv.core.figure import Interval
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import AttackResult, LeakageRate, RowResult, Score, sentence_result
from fedpriv.core.world import World

_MEDIANS = ("mse", "mse_normalised", "psnr", "ssim", "lpips", "ssim_padded")


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
    medians: dict[str, Any] = {name: _median(getattr(score, name) for score in group) for name in _MEDIANS}
    labels = [score.label_correct for score in group if score.label_correct is not None]
    return AttackResult(
        attack=group[0].attack,
        upload=group[0].upload,
        victims=len(group),
        recovered=sum(score.recovered for score in group),
        success_ssim=success_ssim,
        **medians,
        lpips_reason=lpips_reason if medians["lpips"] is None else None,
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


# A rate is above its ceiling where the lower limit of this one-sided confidence is.
_CONFIDENCE = 0.999
# What chance alone does in fewer than one run of a hundred is more than a guess.
_LUCK = 0.01
_ESTIMATED = "the baseline is an estimate from public images, so nothing is proven"


@dataclass(frozen=True)
class _RatedImage:
    """One image: whether the attack was right, k0, and what no attack exceeds."""

    score: Score
    hit: bool
    chance: float
    ceiling: Ceiling | None


def leakage_rates(world: World, scores: Iterable[Score]) -> tuple[LeakageRate, ...]:
    """Return for each attack how often it picked the original out of others, and how often it named the label."""
    trial = _trials(world)
    rates = []
    for group in _groups(scores):
        told = [score for score in group if score.chance is not None]
        if any(score.rank is not None for score in told):
            trials = [trial(score, score.rank == 1, score.chance or 1.0) for score in told]
            rates.append(_rate("told", trials))
        named = any(score.label_correct is not None for score in group)
        if named and not group[0].picked and not world.experiment.adversary.knows_labels:
            trials = [trial(score, bool(score.label_correct), share) for score, share in _shares(world, group)]
            rates.append(_rate("label", trials))
    return tuple(rates)


def recovery_rates(world: World, scores: Iterable[Score], chance: float) -> tuple[LeakageRate, ...]:
    """Return for each attack how often it recovered an image, with an estimated baseline."""
    trial = _trials(world)
    groups = [group for group in _groups(scores) if not group[0].picked]
    rates = []
    kind = world.dataset.kind
    reason = worded(_ESTIMATED, kind)
    for group in groups:
        trials = [trial(score, score.recovered, min(1.0, chance * score.offered)) for score in group]
        rate = _rate("recovered" if kind == "image" else kind, trials)
        rates.append(replace(rate, estimated=True, exceeded=False, theorem=f"{reason}: {rate.theorem}"))
    return tuple(rates)


def is_above_guess(rates: Iterable[LeakageRate], scores: Sequence[Score], guesses: Sequence[Score]) -> bool:
    """Say whether an attack recovered an example, or more than a guess without any upload."""
    if any(score.recovered for score in scores):
        return True
    for rate in rates:
        chance = binomtest(rate.hits, rate.images, min(1.0, rate.chance), alternative="greater").pvalue
        if chance < _LUCK:
            return True
    read = sentence_result(score.words for score in scores)
    if read is None:
        return False
    named = {score.attack for score in guesses}
    results = (sentence_result(score.words for score in guesses if score.attack == name) for name in named)
    return read.rouge1 > max((result.rouge1 for result in results if result is not None), default=0.0)


def _groups(scores: Iterable[Score]) -> list[list[Score]]:
    """The chosen lines of each attack on each kind of upload, by round and image."""
    ordered = sorted(scores, key=lambda score: (score.round, score.image))
    return [group for (_, upload), group in by_attack(ordered).items() if upload != "none"]


def _shares(world: World, group: Sequence[Score]) -> list[tuple[Score, float]]:
    """With each line how often a guess names the label, which may name one for each picture that it offers."""
    clients = {score.client for score in group}
    counts = {client: sorted(world.class_counts_of(world.true_labels, client), reverse=True) for client in clients}
    return [(score, sum(counts[score.client][: score.offered]) / sum(counts[score.client])) for score in group]


def _trials(world: World) -> Callable[[Score, bool, float], _RatedImage]:
    """Return what makes of an image, whether the attack was right and the baseline a trial with its ceiling."""

    @cache
    def proven(release: Release, chance: float) -> Ceiling:
        (ceiling,) = ceilings(release, [chance])
        return ceiling

    def trial(score: Score, hit: bool, chance: float) -> _RatedImage:
        if score.upload != "protected" or score.releases is None or not 0 < chance < 1:
            return _RatedImage(score, hit, chance, None)
        plan = world.plans[score.client]
        # The adjacency is no part of a ceiling, and zero-out is defined for Poisson batches alone.
        release = replace(
            plan.accounted(()), sampling="full", rate=1.0, participations=score.releases, adjacency="replace-one"
        )
        # Bounds that were estimated of the rows were released beforehand.
        return _RatedImage(score, hit, chance, proven(release, surer(chance, world.experiment.data.bounds_epsilon)))

    return trial


def _rate(event: str, trials: Sequence[_RatedImage]) -> LeakageRate:
    first, hits = trials[0].score, sum(trial.hit for trial in trials)
    ends = rate_interval(hits, len(trials)).ends or (0.0, 1.0)
    gamma = _mean_ceiling(trials)
    proven = [trial.ceiling for trial in trials if trial.ceiling is not None]
    lengths = [trial.score.candidates for trial in trials if trial.score.candidates is not None]
    return LeakageRate(
        event=event,
        attack=first.attack,
        upload=first.upload,
        hits=hits,
        images=len(trials),
        interval=ends,
        chance=float(np.mean([trial.chance for trial in trials])),
        best=_best([trial.score for trial in trials]) if event == "told" else None,
        ceiling=gamma,
        theorem=proven[0].theorem if proven else _why_none(first),
        exceeded=_is_exceeded(_independent(trials)),
        candidates=min(lengths, default=None) if event == "told" else None,
    )


def _why_none(score: Score) -> str:
    return "no mechanism: nothing is proven" if score.upload == "unprotected" else "a guess is always right, or unknown"


def _mean_ceiling(trials: Sequence[_RatedImage]) -> float | None:
    """The ceiling of the mean rate: the mean of the ceilings; a guess that is always right has 1."""
    gammas = [1.0 if trial.ceiling is None else trial.ceiling.gamma for trial in trials]
    known = [gamma for gamma in gammas if gamma is not None]
    if len(known) < len(gammas) or all(trial.ceiling is None for trial in trials):
        return None
    return float(np.mean(known))


def _independent(trials: Sequence[_RatedImage]) -> list[_RatedImage]:
    """One image of each client, the first: others share its upload's noise, or are the same image in another round."""
    first: dict[int | None, _RatedImage] = {}
    for trial in trials:
        first.setdefault(trial.score.client if trial.score.clients == 1 else None, trial)
    return list(first.values())


def _is_exceeded(trials: Sequence[_RatedImage]) -> bool:
    """Whether so many independent successes are all but impossible below the ceiling (Hoeffding 1956, Theorem 4)."""
    gamma = _mean_ceiling(trials)
    if gamma is None or gamma >= 1:
        return False
    hits = sum(trial.hit for trial in trials)
    low = binomtest(hits, len(trials)).proportion_ci(2 * _CONFIDENCE - 1, method="exact").low
    return bool(low > gamma)


def _best(scores: Sequence[Score]) -> Interval | None:
    draws = sum(score.draws for score in scores)
    if not draws or any(score.best is None for score in scores):
        return None
    right = round(sum((score.best or 0.0) * score.draws for score in scores))
    return best_interval(right, draws)
