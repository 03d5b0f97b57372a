"""Statistics over victims with confidence intervals: medians, success rates, and ROC curves of membership scores."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
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

    result = scipy.stats.bootstrap(
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
    ends = scipy.stats.binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(successes / trials, float(ends.low), float(ends.high))


def best_interval(right: int, draws: int) -> Interval:
    """Return the share of draws in which a decision was right, and its exact interval (Clopper and Pearson 1934)."""
    ends = scipy.stats.binomtest(right, draws).proportion_ci(CONFIDENCE, method="exact")
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
    return 0.0 if count == 0 else float(scipy.special.betaincinv(count, trials - count + 1, alpha))


def binomial_upper(count: int, trials: int, alpha: float) -> float:
    """Return what a probability is at most; arguments as of :func:`binomial_lower`."""
    return 1 - binomial_lower(trials - count, trials, alpha)


Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class RocCurve(NamedTuple):
    """The points of a receiver operating characteristic, from (0, 0) to (1, 1), both ascending.

    A higher score says member. Curves are step functions of the distinct scores: nothing is interpolated, so a true
    positive rate at a false positive rate below one over the number of non-members is the one at no false positive.
    """

    false_positive_rate: Floats  # (P,), from 0 to 1
    true_positive_rate: Floats  # (P,), from 0 to 1

    @property
    def auc(self) -> float:
        """The area under the curve, ties counted half."""
        return float(np.trapezoid(self.true_positive_rate, self.false_positive_rate))

    @property
    def advantage(self) -> float:
        """The largest true minus false positive rate, from 0 to 1 (Yeom et al. 2018, Definition 4)."""
        return float((self.true_positive_rate - self.false_positive_rate).max())

    def tpr_at(self, rate: float) -> float:
        """The largest true positive rate at a false positive rate of ``rate`` at most."""
        return float(self.true_positive_rate[self.false_positive_rate <= rate].max())

    def log_points(self, count: int = 100) -> "RocCurve":
        """Return at most ``count`` points above zero for logarithmic axes, false positive rates spread evenly."""
        shown = (self.false_positive_rate > 0) & (self.true_positive_rate > 0)
        if not shown.any():
            return RocCurve(np.empty(0), np.empty(0))
        rates = np.geomspace(self.false_positive_rate[shown].min(), 1.0, count)
        last = np.searchsorted(self.false_positive_rate, rates * (1 + 1e-12), side="right") - 1
        kept = np.unique(last)
        kept = kept[shown[kept]]
        return RocCurve(self.false_positive_rate[kept], self.true_positive_rate[kept])


def curve(scores: Floats, members: Bools) -> RocCurve:
    """Return the receiver operating characteristic of scores, infinite ones included, without NaN."""
    _check(scores, members)
    order = np.argsort(-scores, kind="stable")
    ranked, truth = scores[order], members[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    hits, false_hits = np.cumsum(truth)[ends], np.cumsum(~truth)[ends]
    return RocCurve(np.append(0.0, false_hits / (~members).sum()), np.append(0.0, hits / members.sum()))


def auc_interval(scores: Floats, members: Bools, confidence: float = 0.95) -> tuple[float, float]:
    """Return an interval for the area under the curve after DeLong, DeLong and Clarke-Pearson (1988).

    The variance is that of the two samples' structural components, computed from midranks (Sun and Xu 2014); the
    normal quantile is applied to the area itself and the ends are cut off at 0 and 1. Where all members are above all
    non-members the estimated variance is 0 and so is the interval's length: read it as "not told apart from 1".
    """
    _check(scores, members)
    inside, outside = scores[members], scores[~members]
    if min(len(inside), len(outside)) < 2:
        raise InputError("an interval of the AUC needs two members and two non-members")
    ranks = scipy.stats.rankdata(np.concatenate([inside, outside]))
    above = (ranks[: len(inside)] - scipy.stats.rankdata(inside)) / len(outside)
    below = 1 - (ranks[len(inside) :] - scipy.stats.rankdata(outside)) / len(inside)
    deviation = np.sqrt(above.var(ddof=1) / len(inside) + below.var(ddof=1) / len(outside))
    reach = float(scipy.stats.norm.ppf((1 + confidence) / 2) * deviation)
    area = float(above.mean())
    return max(0.0, area - reach), min(1.0, area + reach)


def bootstrap_intervals(
    scores: Floats,
    members: Bools,
    figures: Mapping[str, Callable[[RocCurve], float]],
    rng: np.random.Generator,
    confidence: float = 0.95,
    repeats: int = 1000,
) -> dict[str, tuple[float, float]]:
    """Return percentile intervals; members and non-members are drawn again with replacement, each among themselves."""
    _check(scores, members)
    inside, outside = np.flatnonzero(members), np.flatnonzero(~members)
    drawn = []
    for _ in range(repeats):
        rows = np.concatenate([rng.choice(inside, len(inside)), rng.choice(outside, len(outside))])
        again = curve(scores[rows], members[rows])
        drawn.append([figure(again) for figure in figures.values()])
    ends = np.quantile(np.array(drawn), [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return {name: (float(low), float(high)) for name, low, high in zip(figures, *ends, strict=True)}


def _check(scores: Floats, members: Bools) -> None:
    if scores.ndim != 1 or scores.shape != members.shape:
        raise InputError(
            f"scores of shape {scores.shape} for members of shape {members.shape}; expected: (N,) for both"
        )
    if np.isnan(scores).any():
        raise InputError(f"{int(np.isnan(scores).sum())} of {len(scores)} membership scores are NaN")
    if members.all() or not members.any():
        raise InputError(f"{int(members.sum())} of {len(members)} candidates are members; both kinds are needed")
