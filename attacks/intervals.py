"""Statistics over victims with confidence intervals: medians and success rates."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from scipy import special
from scipy.stats import binomtest, bootstrap

from fedpriv.core.figure import CONFIDENCE, Interval

RESAMPLES = 9999


def median_interval(
    values: Sequence[float],
    generator: np.random.Generator,
    groups: Sequence[Hashable] | None = None,
) -> Interval:
    """Return the median and its percentile bootstrap interval (Efron 1979), 9,999 resamples.

    Images that came out of one upload rise and fall together: with ``groups`` whole groups are drawn, not single
    values (the cluster bootstrap; Davison and Hinkley 1997, section 3.8).
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError("a median interval needs at least one value, all of them finite")
    if groups is not None and len(groups) != data.size:
        raise ValueError(f"{data.size} values, but {len(groups)} groups")
    members = _members(data, range(data.size) if groups is None else groups)
    median = float(np.median(data))
    if len(members) == 1:
        return Interval(median, None, None)

    middle = np.nanmedian if np.isnan(members).any() else np.median  # the plain one is many times faster

    def median_of(drawn: np.ndarray, axis: int) -> np.ndarray:
        chosen = members[drawn]
        return middle(chosen.reshape(*chosen.shape[:-2], -1), axis=axis, overwrite_input=True)

    result = bootstrap(
        (np.arange(len(members)),),
        median_of,
        vectorized=True,
        batch=max(1, 2**24 // members.size),
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=generator,
    )
    low, high = result.confidence_interval
    return Interval(median, float(low), float(high))


def rate_interval(successes: int, trials: int) -> Interval:
    """Return a success rate and Wilson's score interval (1927), which has a width for 0 of n and for n of n too."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes of {trials} trials")
    ends = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(successes / trials, float(ends.low), float(ends.high))


def best_interval(right: int, draws: int) -> Interval:
    """Return the share of draws in which a decision was right, and its exact interval (Clopper and Pearson 1934)."""
    ends = binomtest(right, draws).proportion_ci(CONFIDENCE, method="exact")
    return Interval(right / draws, float(ends.low), float(ends.high))


def _members(data: np.ndarray, groups: Iterable[Hashable]) -> np.ndarray:
    """The values of each group in a row, filled up with NaN: (groups, most values in one)."""
    rows: dict[Hashable, list[float]] = {}
    for value, group in zip(data.tolist(), groups, strict=True):
        rows.setdefault(group, []).append(value)
    members = np.full((len(rows), max(map(len, rows.values()))), np.nan)
    for number, row in enumerate(rows.values()):
        members[number, : len(row)] = row
    return members


def binomial_lower(count: int, trials: int, alpha: float) -> float:
    """Return what a probability is at least after ``count`` of ``trials`` (Clopper and Pearson 1934)."""
    return 0.0 if count == 0 else float(special.betaincinv(count, trials - count + 1, alpha))


def binomial_upper(count: int, trials: int, alpha: float) -> float:
    """Return what a probability is at most; arguments as of :func:`binomial_lower`."""
    return 1 - binomial_lower(trials - count, trials, alpha)
