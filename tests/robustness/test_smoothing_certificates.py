"""Margins and bounds against mpmath, scipy and exact summation: published check values, and orderings."""

import math
from collections.abc import Callable
from functools import partial

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from fedpriv.attacks.intervals import binomial_lower, binomial_upper
from fedpriv.robustness.certify import (
    Bounds,
    hoeffding_bounds,
    hoeffding_deviation,
    main_margin,
    margins,
    pixeldp_margin,
    renyi_margin,
    vote_bounds,
    wrong_at_most,
)
from fedpriv.robustness.settings import RobustnessConfig
from tests.cases import in_one_test

# lower, upper: classic (epsilon <= 1), extended, analytic, Renyi, main.
TABLE = {
    (0.6, 0.4): (0.0592, 0.0616, 0.2513, 0.2022, 0.2533),
    (0.8, 0.2): (0.2352, 0.2410, 0.7706, 0.6742, 0.8416),
    (0.9, 0.1): (0.3903, 0.3903, 1.0488, 1.0319, 1.2816),
    (0.99, 0.01): (0.5549, 0.7410, 1.3179, 1.9080, 2.3263),
    (0.999, 0.001): (0.5689, 0.9776, 1.4198, 2.5757, 3.0902),
    (0.9, 0.05): (0.4800, 0.5022, 1.1319, 1.2494, 1.4632),
}
PIXELDP = [partial(pixeldp_margin, calibration=name) for name in ("classic", "extended", "analytic")]
FUNCTIONS = (*PIXELDP, renyi_margin, main_margin)


def delta_classic(epsilon: float, margin: float) -> mpmath.mpf:
    return mpmath.mpf(5) / 4 * mpmath.exp(-((epsilon / margin) ** 2) / 2)


def delta_extended(epsilon: float, margin: float) -> mpmath.mpf:
    """From the paper's Theorem 2, solved for delta: epsilon sigma - 1 / (2 sigma) = sqrt(2 s)."""
    root = epsilon / margin - margin / 2
    return mpmath.inf if root < 0 else mpmath.sqrt(2 / mpmath.pi) * mpmath.exp(-(root**2) / 2)


def delta_analytic(epsilon: float, margin: float) -> mpmath.mpf:
    mu = mpmath.mpf(margin)
    return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


def is_proven(delta: Callable[[float, float], mpmath.mpf], most: float, bounds: Bounds, margin: float) -> bool:
    """Whether some epsilon of a fine grid proves the margin, by PixelDP's condition itself."""
    end = min(most, math.log(bounds.lower / bounds.upper) / 2)
    epsilons = (mpmath.mpf(end) * number / 500 for number in range(1, 501))
    return any(
        bounds.lower >= mpmath.exp(2 * epsilon) * bounds.upper + (1 + mpmath.exp(epsilon)) * delta(epsilon, margin)
        for epsilon in epsilons
    )


@in_one_test("bounds", [Bounds(*pair) for pair in TABLE])
def test_the_table(bounds: Bounds) -> None:
    found = [function(bounds) for function in FUNCTIONS]
    assert found == pytest.approx(TABLE[bounds.lower, bounds.upper], abs=1e-4)


@pytest.mark.parametrize("bounds", [*(Bounds(*pair) for pair in TABLE), Bounds(0.41, 0.3)], ids=str)
@in_one_test(
    ("margin", "delta", "most"),
    zip(PIXELDP, (delta_classic, delta_extended, delta_analytic), (1, 50, 50), strict=True),
)
def test_pixeldp_margins_are_the_largest(
    margin: Callable[[Bounds], float], delta: Callable[[float, float], mpmath.mpf], most: float, bounds: Bounds
) -> None:
    with mpmath.workdps(20):
        assert is_proven(delta, most, bounds, margin(bounds) - 3e-5)
        assert not is_proven(delta, most, bounds, margin(bounds) + 1e-6)


@pytest.mark.parametrize(
    "bounds",
    [*(Bounds(*pair) for pair in TABLE), Bounds(0.5, 1e-9), Bounds(0.5, 0.499998), Bounds(1 - 2**-53, 1e-16)],
    ids=str,
)
def test_the_renyi_margin_is_the_best_order(bounds: Bounds) -> None:
    def square(order: float) -> mpmath.mpf:
        mean = ((mpmath.mpf(bounds.lower) ** (1 - order) + mpmath.mpf(bounds.upper) ** (1 - order)) / 2) ** (
            1 / (mpmath.mpf(1) - order)
        )
        return -2 / mpmath.mpf(order) * mpmath.log(1 - bounds.lower - bounds.upper + 2 * mean)

    with mpmath.workdps(40):
        best = max(square(1 + mpmath.mpf(10) ** (mpmath.mpf(number) / 100)) for number in range(-500, 500))
    assert renyi_margin(bounds) == pytest.approx(float(mpmath.sqrt(best)), rel=1e-4)
    assert renyi_margin(bounds) >= float(mpmath.sqrt(best)) * (1 - 1e-9)


def test_the_main_margin_is_a_difference_of_quantiles() -> None:
    for lower, upper in [*TABLE, (0.9, 1e-12)]:
        with mpmath.workdps(30):
            quantiles = [mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(p) - 1) for p in (lower, upper)]
        assert main_margin(Bounds(lower, upper)) == pytest.approx(float(quantiles[0] - quantiles[1]) / 2, rel=1e-9)


@given(st.floats(1e-6, 1 - 1e-9), st.floats(1e-12, 1 - 1e-9))
@example(0.5, 0.4999980926513673)
@settings(max_examples=60, deadline=None)
def test_weaker_theorems_prove_less(one: float, share: float) -> None:
    """Whatever the two probabilities are, together at most 1."""
    bounds = Bounds(one, min(share, 1 - one))
    found = margins(bounds, bounds)
    assert found["extended"] == found["paper"]
    assert max(found["extended"], found["classic"]) <= found["analytic"] + 1e-9
    assert found["analytic"] <= found["main"] + 1e-9
    assert found["renyi"] <= found["main"] + 1e-9
    assert (found["main"] > 0) == bounds.decides


SIGMAS = {
    0.5: (9.68961, 9.60657, 7.03183),
    1.0: (4.84481, 4.85424, 3.73063),
    2.0: (None, 2.47657, 1.99381),
    4.0: (None, 1.28508, 1.08116),
    8.0: (None, 0.68513, 0.60023),
}


@in_one_test("epsilon", SIGMAS)
def test_sigma_from_epsilon(epsilon: float) -> None:
    """The settings' sigma for the size 2; each calibration checked on its own condition by mpmath."""
    exact = {"classic": delta_classic, "extended": delta_extended, "analytic": delta_analytic}
    for name, wanted in zip(exact, SIGMAS[epsilon], strict=True):
        if wanted is None:
            continue
        sigma = RobustnessConfig(epsilon=epsilon, delta=1e-5, size=2.0, calibration=name).sigma / 2  # type: ignore[arg-type]
        assert sigma == pytest.approx(wanted, abs=1e-5)
        with mpmath.workdps(30):
            assert float(exact[name](epsilon, 1 / sigma)) == pytest.approx(1e-5, rel=1e-9)


def test_the_extended_mechanisms_own_delta() -> None:
    with mpmath.workdps(30):
        sigma = RobustnessConfig(epsilon=1.0, delta=1e-5, size=1.0, calibration="extended").sigma
        assert float(delta_analytic(1, 1 / sigma)) == pytest.approx(3.91e-8, rel=2e-3)


# ---- votes -----------------------------------------------------------------------------------------------------------


def test_check_values_of_votes() -> None:
    assert binomial_lower(1000, 1000, 0.001) == pytest.approx(0.99311605, abs=5e-9)
    assert binomial_lower(990, 1000, 0.001) == pytest.approx(0.97603619, abs=5e-9)
    assert binomial_upper(10, 1000, 0.001) == pytest.approx(0.02396381, abs=5e-9)
    assert hoeffding_deviation(1000, 0.001) == pytest.approx(0.05876970, abs=5e-9)
    assert wrong_at_most(500, 0.001) == 2
    # What they are defined by, summed over outcomes; Hoeffding's by his inequality.
    for count, lower in ((1000, 0.99311605), (990, 0.97603619)):
        assert stats.binom.sf(count - 1, 1000, lower) == pytest.approx(0.001, rel=1e-5)
    assert stats.binom.cdf(10, 1000, 0.02396381) == pytest.approx(0.001, rel=1e-5)
    assert math.exp(-2 * 1000 * 0.05876970**2) == pytest.approx(0.001, rel=1e-5)
    assert stats.binom.cdf(1, 500, 0.001) < 0.95 <= stats.binom.cdf(2, 500, 0.001)


@in_one_test(
    ("votes", "exact", "hoeffding"),
    [(100, 1.5005, 0.8933), (1000, 2.4633, 1.5652), (10_000, 3.1986, 2.0839), (100_000, 3.8115, 2.5194)],
)
def test_the_largest_margin_of_so_many_votes(votes: int, exact: float, hoeffding: float) -> None:
    assert main_margin(vote_bounds([votes, 0], 0, 0.001, "together")) == pytest.approx(exact, abs=5e-5)
    least = 1 - hoeffding_deviation(votes, 0.001)
    assert main_margin(Bounds(least, 1 - least)) == pytest.approx(hoeffding, abs=5e-5)
    alpha = mpmath.mpf("0.001")
    with mpmath.workdps(30):  # all votes for one class: the exact bound is alpha ** (1 / n)
        for p, wanted in (
            (alpha ** (mpmath.mpf(1) / votes), exact),
            (1 - mpmath.sqrt(-mpmath.log(alpha) / (2 * votes)), hoeffding),
        ):
            assert wanted == pytest.approx(float(mpmath.sqrt(2) * mpmath.erfinv(2 * p - 1)), abs=5e-5)


@in_one_test("trials", [1, 7, 200])
@in_one_test("alpha", [0.3, 0.025, 0.001])
def test_bounds_are_clopper_and_pearsons(trials: int, alpha: float) -> None:
    for count in {0, 1, trials // 2, trials - 1, trials}:
        wanted = stats.binomtest(count, trials).proportion_ci(1 - 2 * alpha, method="exact")
        assert binomial_lower(count, trials, alpha) == pytest.approx(wanted.low, abs=1e-12)
        assert binomial_upper(count, trials, alpha) == pytest.approx(wanted.high, abs=1e-12)


@in_one_test("alpha", [0.2, 0.05, 0.001])
def test_the_lower_bound_is_wrong_as_rarely_as_it_says(alpha: float) -> None:
    """Summed over all outcomes, for probabilities at which it is the hardest: just below where it jumps."""
    trials = 60
    counts = np.arange(trials + 1)
    lows = np.array([binomial_lower(int(count), trials, alpha) for count in counts])
    for p in np.concatenate([lows[1:] - 1e-12, np.linspace(0.01, 0.99, 50)]):
        wrong = float(stats.binom.pmf(counts, trials, p)[lows > p].sum())
        assert wrong <= alpha + 1e-9
    tightest = max(float(stats.binom.pmf(counts, trials, p)[lows > p].sum()) for p in lows[1:] - 1e-12)
    assert tightest == pytest.approx(alpha, rel=1e-6)


@in_one_test("rivals", ["each", "together"])
@in_one_test("p", [(0.55, 0.45, 0.0), (0.4, 0.35, 0.25), (0.9, 0.06, 0.04), (0.97, 0.03, 0.0)])
def test_both_bounds_together_are_wrong_at_most_as_often(p: tuple[float, ...], rivals: str) -> None:
    """Summed over all outcomes of 24 votes on three classes, the first one chosen before."""
    votes, alpha, wrong = 24, 0.05, 0.0
    for first in range(votes + 1):
        for second in range(votes + 1 - first):
            counts = (first, second, votes - first - second)
            bounds = vote_bounds(counts, 0, alpha, rivals)  # type: ignore[arg-type]
            if bounds.lower > p[0] or bounds.upper < max(p[1:]):
                wrong += float(stats.multinomial.pmf(counts, votes, p))
    assert wrong <= alpha


def test_the_papers_rule_is_weaker_than_exact_bounds() -> None:
    counts = [930, 40, 30]
    paper, exact = hoeffding_bounds(counts, 0, 0.001), vote_bounds(counts, 0, 0.001, "each")
    assert paper.lower == pytest.approx(0.93 - math.sqrt(math.log(3000) / 2000))
    assert paper.upper == pytest.approx(0.04 + math.sqrt(math.log(3000) / 2000))
    wanted = stats.binomtest(930, 1000).proportion_ci(1 - 2 * 0.001 / 3, method="exact")
    rival = stats.binomtest(40, 1000).proportion_ci(1 - 2 * 0.001 / 3, method="exact")
    assert (exact.lower, exact.upper) == pytest.approx((wanted.low, rival.high))  # a bound of its own for each class
    assert paper.lower < exact.lower and exact.upper < paper.upper


def test_too_few_votes_prove_nothing() -> None:
    for counts in ([500, 500, 0], [0, 1000, 0], [330, 335, 335]):
        for rivals in ("each", "together"):
            bounds = vote_bounds(counts, 0, 0.001, rivals)  # type: ignore[arg-type]
            assert not any(margins(bounds, hoeffding_bounds(counts, 0, 0.001)).values())
