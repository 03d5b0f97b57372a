"""Ceilings of membership inference: against the best test of a mechanism that reaches them."""

import math
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
import riskcal.analysis
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import optimize, stats

from fedpriv.accounting import (
    Release,
    calibrate_membership,
    guarantee,
    membership_bound,
    release_with,
)
from fedpriv.accounting.ceiling import membership_advantage, membership_auc
from fedpriv.core.errors import InputError
from fedpriv.core.names import SamplingName
from tests.cases import in_one_test

PAIRS = [(0.0, 0.0), (0.5, 0.0), (1.0, 1e-5), (3.0, 0.1), (50.0, 0.0), (0.0, 0.3)]


def outcomes(epsilon: float, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """The mechanism that dominates all others (Kairouz, Oh and Viswanath 2015): two laws of four outcomes."""
    larger = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    smaller = (1 - delta) / (1 + math.exp(epsilon))
    return np.array([delta, larger, smaller, 0.0]), np.array([0.0, smaller, larger, delta])


@in_one_test(("epsilon", "delta"), PAIRS)
def test_the_advantage_is_the_total_variation_of_the_worst_mechanism(epsilon: float, delta: float) -> None:
    one, two = outcomes(epsilon, delta)
    assert membership_advantage(epsilon, delta) == pytest.approx(np.abs(one - two).sum() / 2, abs=1e-12)


@in_one_test(("epsilon", "delta"), PAIRS)
def test_the_auc_is_reached_by_a_release_that_answers_who_is_in(epsilon: float, delta: float) -> None:
    """The worst mechanism is asked which of a pair is in; the pair's scores differ in that."""
    one, _ = outcomes(epsilon, delta)
    assert membership_auc(epsilon, delta) == pytest.approx(one[0] + one[1], abs=1e-12)
    assert 0.5 <= membership_auc(epsilon, delta) <= 1


def test_nothing_proven_and_nonsense() -> None:
    assert membership_auc(math.inf, 0.0) == membership_advantage(math.inf, 0.0) == 1.0
    assert membership_auc(2000.0, 0.0) == 1.0
    for wrong in ((-1.0, 0.0), (1.0, 2.0), (math.nan, 0.0)):
        with pytest.raises(InputError, match="allowed is from"):
            membership_auc(*wrong)


# ---- from the mechanism itself --------------------------------------------------------------------------------------


def run_of(mechanism: str, noise: float, count: int = 1, rate: float = 1.0, **options: Any) -> Release:
    options = {"sampling": "full" if rate == 1 else "poisson", "dimensions": (1,), **options}
    return release_with(noise, 1e-5, mechanism=mechanism, rate=rate, participations=count, **options)


@in_one_test(("sigma", "rate", "count"), [(0.8, 0.01, 500), (1.0, 0.3, 5)])
def test_poisson_batches_have_the_trade_off_of_dp_accounting(sigma: float, rate: float, count: int) -> None:
    """The lower envelope of its deltas. riskcal, whose sums of losses are not rounded upwards, is up to 0.1 % below."""
    found = membership_bound(run_of("gaussian", sigma, count, rate, adjacency="zero-out"), [0.01, 0.3])
    steps = pld.from_gaussian_mechanism(sigma, sampling_prob=rate).self_compose(count)
    assert found.advantage == pytest.approx(steps.get_delta_for_epsilon(0.0), rel=1e-4)
    assert found.advantage == pytest.approx(riskcal.analysis.get_advantage_from_pld(steps), rel=1e-4)
    for fpr, tpr in found.rates:
        assert tpr == pytest.approx(
            max(envelope(order, fpr) for order in (steps._pmf_remove, steps._pmf_add)), rel=1e-4
        )
        assert 0 <= tpr - (1 - float(riskcal.analysis.get_beta_from_pld(steps, fpr))) <= 1e-3 * tpr
        assert tpr - fpr <= found.advantage
    assert found.adjacency.startswith("zero-out")
    assert "with sensitivity clip_norm" in found.theorem


@in_one_test(
    ("sigma", "rate", "count", "advantage", "epsilon"),
    [(0.8, 0.01, 500, 0.162964, 2.39952), (1.0, 0.3, 5, 0.271107, 5.19571), (2.0, 0.05, 200, 0.148007, 1.56077)],
)
def test_poisson_batches_have_the_figures_of_opake(
    sigma: float, rate: float, count: int, advantage: float, epsilon: float
) -> None:
    """opake-accounting 0.16.1 on a grid of 1e-4; it rounds another way, so the last digits differ."""
    run = run_of("gaussian", sigma, count, rate, adjacency="zero-out")
    assert membership_bound(run, [0.01]).advantage == pytest.approx(advantage, rel=2e-3)
    assert guarantee(run).epsilon == pytest.approx(epsilon, rel=1e-3)


def test_the_noise_for_an_advantage_is_opakes() -> None:
    noise = calibrate_membership(0.1, run_of("gaussian", 1.0, 1000, 0.01, adjacency="zero-out"))
    assert noise == pytest.approx(1.42501, rel=2e-3)


@in_one_test(
    ("sigma", "steps", "passes", "epsilon"), [(0.7, 20, 3, 5.38681), (1.0, 50, 1, 0.973897), (0.5, 100, 2, 6.59074)]
)
def test_balls_in_bins_have_the_epsilon_of_opakes_random_allocation(
    sigma: float, steps: int, passes: int, epsilon: float
) -> None:
    run = run_of("gaussian", sigma, passes, 1 / steps, adjacency="zero-out", sampling="balls-in-bins")
    assert guarantee(run).epsilon == pytest.approx(epsilon, rel=3e-3)


@in_one_test(("sigma", "steps", "passes"), [(0.7, 20, 3), (2.0, 10, 8)])
def test_balls_in_bins_have_the_advantage_of_the_best_test(sigma: float, steps: int, passes: int) -> None:
    """Drawn: the ratio of a pass is the mean of its steps'. Five standard errors: one false alarm in a million."""
    noise = np.random.default_rng(3).standard_normal((40_000, passes, steps))
    ratios = np.exp((noise - 1 / (2 * sigma)) / sigma).mean(axis=2).prod(axis=1)
    gains = np.maximum(1 - ratios, 0)
    run = run_of("gaussian", sigma, passes, 1 / steps, adjacency="zero-out", sampling="balls-in-bins")
    found = membership_bound(run)
    assert "balls in bins" in found.theorem
    assert abs(found.advantage - gains.mean()) < 5 * gains.std() / math.sqrt(len(gains)) + 1e-3


def envelope(order: Any, fpr: float) -> float:
    bound = lambda epsilon: math.exp(epsilon) * fpr + order.get_delta_for_epsilon(epsilon)  # noqa: E731
    return float(optimize.minimize_scalar(bound, bounds=(-4, 4), method="bounded").fun)


@in_one_test(("sigma", "rate", "fpr"), [(0.8, 0.1, 0.01), (2.0, 0.3, 0.3), (1.0, 0.2, 1e-8)])
def test_one_poisson_step_is_a_closed_form(sigma: float, rate: float, fpr: float) -> None:
    """Where the example goes, the best test is a threshold, of which the law without it exceeds the rate."""
    """Above what a test reaches at every rate, which riskcal's bound is not: findings/riskcal-small-fpr.sh."""
    exact = (1 - rate) * fpr + rate * stats.norm.sf(stats.norm.isf(fpr) - 1 / sigma)
    found = membership_bound(run_of("gaussian", sigma, 1, rate, adjacency="zero-out"), [fpr])
    assert exact * (1 - 1e-9) <= found.rates[0][1] <= exact * (1 + 1e-5)


@in_one_test("mechanism", ["gaussian", "hgm"])
@in_one_test(("sigma", "count"), [(3.0, 1), (40.0, 1000)])
def test_normal_noise_is_a_closed_form(mechanism: str, sigma: float, count: int) -> None:
    mu, normal = 2 * math.sqrt(count) / sigma, stats.norm
    found = membership_bound(run_of(mechanism, sigma, count), [1e-3])
    assert found.advantage == pytest.approx(riskcal.analysis.get_advantage_from_gdp(mu), rel=1e-9)
    assert found.rates == ((1e-3, pytest.approx(normal.cdf(normal.ppf(1e-3) + mu), rel=1e-9)),)
    noise = calibrate_membership(0.1, run_of(mechanism, 1.0, count))
    exact = 2 * math.sqrt(count) / (2 * normal.ppf(0.55))
    assert exact <= noise <= exact * 1.001


@in_one_test("scale", [0.5, 2.0, 30.0])
def test_one_laplace_release_is_a_closed_form(scale: float) -> None:
    """Two densities on the line, 2 / scale scales apart: the best test asks on which side of a threshold a value is."""
    shift = 2 / scale
    found = membership_bound(run_of("laplace", scale), [0.01])
    assert found.advantage == pytest.approx(1 - math.exp(-shift / 2), rel=1e-6)
    threshold = -math.log(2 * 0.01)  # of which the second law exceeds 0.01
    assert found.rates[0][1] == pytest.approx(stats.laplace.sf(threshold - shift), rel=1e-5)


@in_one_test(("kappa", "dimension"), [(0.7, 1), (2.0, 3), (9.0, 50)])
def test_one_directional_draw_by_mpmath(kappa: float, dimension: int) -> None:
    """The best test asks whether the cosine with one of two opposite directions is above a threshold."""
    found = membership_bound(run_of("vmf", kappa, dimensions=(dimension,)))
    if dimension == 1:
        assert found.advantage == pytest.approx(math.tanh(kappa), rel=1e-9)
        return
    density = lambda t: (1 - t * t) ** mpmath.mpf((dimension - 3) / 2) * mpmath.exp(kappa * t)  # noqa: E731
    ahead, behind = mpmath.quad(density, [0, 0.5, 1]), mpmath.quad(density, [-1, -0.5, 0])
    assert found.advantage == pytest.approx(float((ahead - behind) / (ahead + behind)), rel=1e-5)


@in_one_test(
    ("mechanism", "sampling", "fpr"),
    [
        *(("gaussian", "full", 0.01), ("gaussian", "fixed", None), ("gaussian", "poisson", 0.01)),
        *(("laplace", "full", None), ("laplace", "fixed", 0.01), ("laplace", "poisson", None)),
        *(("vmf", "full", 0.01), ("vmf", "fixed", None), ("vmf", "poisson", 0.01), ("hgm", "full", None)),
    ],
)
def test_noise_for_a_test_of_membership(mechanism: str, sampling: SamplingName, fpr: float | None) -> None:
    run = run_of(mechanism, 1.0, 30, 1.0 if sampling == "full" else 0.1, sampling=sampling, dimensions=(40, 9))
    noise = calibrate_membership(0.15, run, fpr)

    def power(noise: float) -> float:
        found = membership_bound(replace(run, noise=noise), () if fpr is None else [fpr])
        return found.advantage if fpr is None else found.rates[0][1]

    less = noise * (1.01 if mechanism == "vmf" else 0.99)
    assert 0.149 < power(noise) <= 0.15 < power(less)


def test_what_no_test_of_membership_is_known_for() -> None:
    for mechanism in ("distributed", "none"):
        unit = {"unit": "update"} if mechanism == "distributed" else {}
        with pytest.raises(
            InputError, match=r"no pair of laws is known .* allowed: central, correlated, gaussian, hgm, laplace, vmf"
        ):
            membership_bound(run_of(mechanism, 3.0, **unit))
    with pytest.raises(InputError, match="fpr = 1: allowed is between 0 and 1"):
        membership_bound(run_of("gaussian", 1.0), [1.0])
    for target, fpr, words in (
        (0.0, None, "advantage = 0: allowed is above 0"),
        (0.01, 0.01, "tpr = 0.01: .* above 0.01"),
    ):
        with pytest.raises(InputError, match=words):
            calibrate_membership(target, run_of("gaussian", 1.0), fpr)
    assert membership_bound(run_of("gaussian", 1.0, 0), [0.2]).rates == ((0.2, 0.2),)
