"""Curves and intervals against scikit-learn, brute force and simulation."""

import numpy as np
import pytest
from scipy.stats import mannwhitneyu
from sklearn.metrics import roc_auc_score, roc_curve

from fedpriv.attacks.intervals import RocCurve, auc_interval, bootstrap_intervals, curve
from fedpriv.attacks.membership.audit import score_membership
from fedpriv.core.errors import InputError
from tests.cases import in_one_test


def sample(seed: int, members: int, others: int, shift: float = 1.0, digits: int | None = None):
    rng = np.random.default_rng(seed)
    scores = np.concatenate([rng.normal(shift, 1, members), rng.normal(0, 1, others)])
    truth = np.arange(members + others) < members
    order = rng.permutation(len(truth))
    return (scores if digits is None else scores.round(digits))[order], truth[order]


@in_one_test("digits", [None, 1, 0])
@in_one_test(("members", "others"), [(1, 1), (3, 200), (150, 40), (500, 500)])
def test_the_curve_is_that_of_scikit_learn(members: int, others: int, digits: int | None) -> None:
    scores, truth = sample(members, members, others, digits=digits)
    found = curve(scores, truth)
    wanted = roc_curve(truth, scores, drop_intermediate=False)
    np.testing.assert_allclose(found.false_positive_rate, wanted[0])
    np.testing.assert_allclose(found.true_positive_rate, wanted[1])
    assert found.auc == pytest.approx(roc_auc_score(truth, scores))
    pairs = mannwhitneyu(scores[truth], scores[~truth]).statistic / (members * others)
    assert found.auc == pytest.approx(pairs)


@in_one_test("rate", [0.0, 0.001, 0.01, 0.1, 1.0])
def test_rates_and_advantage_are_those_of_trying_every_threshold(rate: float) -> None:
    scores, truth = sample(5, 120, 300, digits=1)
    best, widest = 0.0, 0.0
    for threshold in [*np.unique(scores), np.inf]:
        tpr, fpr = (scores[truth] >= threshold).mean(), (scores[~truth] >= threshold).mean()
        best = max(best, tpr) if fpr <= rate else best
        widest = max(widest, tpr - fpr)
    assert curve(scores, truth).tpr_at(rate) == pytest.approx(best)
    assert curve(scores, truth).advantage == pytest.approx(widest)


def test_logarithmic_points_lie_on_the_curve() -> None:
    scores, truth = sample(6, 400, 900)
    found = curve(scores, truth)
    shown = found.log_points(30)
    points = set(zip(*found, strict=True))
    assert set(zip(*shown, strict=True)) <= points
    assert 10 < len(shown.false_positive_rate) <= 30
    assert shown.false_positive_rate[0] == found.false_positive_rate[found.false_positive_rate > 0][0]
    for rate, value in zip(*shown, strict=True):
        assert value == found.tpr_at(rate)
    assert len(RocCurve(np.array([0.0, 0.0, 1.0]), np.array([0.0, 1.0, 1.0])).log_points().true_positive_rate) == 1


def delong_by_pairs(scores, truth):
    """The formula of the paper, over all pairs."""
    inside, outside = scores[truth][:, None], scores[~truth][None, :]
    wins = (inside > outside) + 0.5 * (inside == outside)
    variance = wins.mean(axis=1).var(ddof=1) / len(inside) + wins.mean(axis=0).var(ddof=1) / outside.size
    return wins.mean(), np.sqrt(variance)


@pytest.mark.parametrize("digits", [None, 0])
def test_delongs_interval_is_the_papers_formula(digits: int | None) -> None:
    scores, truth = sample(7, 60, 90, digits=digits)
    area, deviation = delong_by_pairs(scores, truth)
    low, high = auc_interval(scores, truth, 0.9)
    assert low == pytest.approx(area - 1.6448536 * deviation)
    assert high == pytest.approx(area + 1.6448536 * deviation)


def test_delongs_interval_covers_the_truth() -> None:
    """400 samples at 95 %: below 91 or above 99 % has a probability below 1e-3; the seeds are fixed."""
    area = 0.7602499  # Phi(1 / sqrt(2)) for normal scores one apart
    held = [low <= area <= high for low, high in (auc_interval(*sample(seed, 80, 120)) for seed in range(400))]
    assert 0.91 <= np.mean(held) <= 0.99


def test_bootstrap_agrees_with_delong_and_repeats() -> None:
    scores, truth = sample(8, 300, 300)
    figures = {"auc": lambda one: one.auc, "one": lambda one: 1.0}
    first, again = (bootstrap_intervals(scores, truth, figures, np.random.default_rng(1)) for _ in range(2))
    assert first == again
    assert first["one"] == (1.0, 1.0)
    np.testing.assert_allclose(first["auc"], auc_interval(scores, truth), atol=0.01)


def test_all_figures_come_with_intervals_around_them() -> None:
    scores, truth = sample(9, 200, 200, shift=2.0)
    found = score_membership("lira", scores, truth, np.random.default_rng(0), repeats=200)
    assert (found.members, found.non_members) == (200, 200)
    for name in ("auc", "tpr_at_1_percent", "tpr_at_01_percent", "advantage"):
        low, high = found.intervals[name]
        assert 0 <= low <= getattr(found, name) <= high <= 1


def test_what_cannot_be_scored_is_refused() -> None:
    truth = np.array([True, False])
    with pytest.raises(InputError, match="NaN"):
        curve(np.array([np.nan, 1.0]), truth)
    with pytest.raises(InputError, match="both kinds"):
        curve(np.array([0.0, 1.0]), np.array([True, True]))
    with pytest.raises(InputError, match="shape"):
        curve(np.zeros(3), truth)
    with pytest.raises(InputError, match="two members"):
        auc_interval(np.zeros(2), truth)
