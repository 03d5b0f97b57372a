"""Skellam noise against mpmath, scipy and the normal law that it has with a large variance.

A statistical check fails by chance with probability 2e-7; there are 25.
"""

import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from fedpriv.accounting.skellam import LEVELS, SHARED_SIGMA
from fedpriv.mechanisms.machinery.quantisation import log_probability, skellam
from tests.cases import in_one_test
from tests.noise import stream

CHANCE = 1e-7
COUNT = 1 << 18
# One share of two with the most noise; and means on both sides of the one from which numpy is not asked.
MOST = (SHARED_SIGMA.most * LEVELS) ** 2 / 2
VARIANCES = [2.0**21 - 2, 2.0**21 + 0.5, 1e9 + 0.25, 1e13, MOST, 2 * MOST]


@in_one_test("mean", [2.0**20, 1e9 + 0.25, 1e13 + 0.5, MOST / 2, 2.0**52 - 0.5])
def test_logarithms_of_probabilities_agree_with_mpmath(mean: float) -> None:
    """At 40 digits, out to 200 deviations; the series ends and the other formula begins among them."""
    whole, far = math.floor(mean), [-200, -30, -21, -8, -1, 0, 0.5, 3, 20, 30, 200]
    offsets = [max(math.floor(each * math.sqrt(mean)), 1 - whole) for each in far]
    found = log_probability(np.array(offsets) - (mean - whole), mean)
    with mpmath.workdps(40):
        exact = [k * mpmath.log(mean) - mean - mpmath.loggamma(k + 1) for k in (whole + each for each in offsets)]
    assert found.tolist() == pytest.approx([float(each) for each in exact], rel=1e-11, abs=1e-11)


@in_one_test("mean", [2.0**20, 1e13, 2.0**52])
def test_proposals_cover_the_law(mean: float) -> None:
    """Rejection draws the law only if nowhere more would have to be accepted than is proposed."""
    b = 0.931 + 2.53 * math.sqrt(mean)
    a = -0.059 + 0.02483 * b
    u = np.linspace(-0.5, 0.5, 400_003)[1:-1]
    near = 0.5 - np.abs(u)
    proposed = (1.1239 + 1.1328 / (b - 3.4)) / (a / near**2 + b)
    share = np.exp(log_probability(np.floor((2 * a / near + b) * u + 0.43), mean)) / proposed
    assert 0.99 < share.max() < 1


@in_one_test("variance", VARIANCES)
def test_the_law(variance: float) -> None:
    """Variance, kurtosis, and all of the law; with a large variance the normal one to 1e-3 / sqrt(variance)."""
    drawn = skellam(variance, (COUNT,), stream(1).numpy())
    values = drawn.astype(float)
    scaled = float(np.square(values).sum()) / variance
    assert stats.chi2.ppf(CHANCE, COUNT) < scaled < stats.chi2.isf(CHANCE, COUNT)
    assert abs(float(stats.kurtosis(values))) < stats.norm.isf(CHANCE) * math.sqrt(24 / COUNT)
    bins = 64
    edges = np.floor(stats.norm.ppf(np.arange(1, bins) / bins) * math.sqrt(variance))
    # A whole number is at most an edge: half a level further in the normal law.
    below = stats.norm.cdf((edges + 0.5) / math.sqrt(variance))
    expected = COUNT * np.diff(np.concatenate([[0.0], below, [1.0]]))
    counts = np.bincount(np.searchsorted(edges, values), minlength=bins)
    assert stats.chisquare(counts, expected).pvalue > 2 * CHANCE
    assert stats.chisquare(np.bincount(drawn % 16, minlength=16)).pvalue > 2 * CHANCE


def test_little_noise_has_scipys_law() -> None:
    drawn = skellam(3.0, (COUNT,), stream(2).numpy())
    places = np.arange(-6, 7)
    expected = COUNT * stats.skellam.pmf(places, 1.5, 1.5)
    counts = np.array([(drawn == place).sum() for place in places])
    assert stats.chisquare([*counts, COUNT - counts.sum()], [*expected, COUNT - expected.sum()]).pvalue > 2 * CHANCE


def test_no_noise_and_variances_out_of_range() -> None:
    assert not skellam(0.0, (5,), stream().numpy()).any()
    assert skellam(1e12, (2, 3), stream().numpy()).shape == (2, 3)
    for variance in (-1.0, 2.0**54, math.nan):
        with pytest.raises(ValueError, match=r"variance = .*: allowed is from 0 to 2\^53"):
            skellam(variance, (1,), stream().numpy())
