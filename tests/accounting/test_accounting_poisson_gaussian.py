"""Poisson batches under replace-one: the pair against integrals, mpmath and random neighbours."""

import itertools
import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest

from fedpriv.accounting import (
    ORDERS,
    amplified_rdp,
    calibrate,
    gaussian_epsilon,
    gaussian_rdp,
    guarantee,
    proven_epsilon,
    rdp_to_epsilon,
    release_with,
    running_epsilon,
)
from fedpriv.accounting.numerical import composed_epsilon
from fedpriv.accounting.pairs import (
    GaussianPair,
    PoissonGaussianPair,
    PoissonGroupPair,
    SampledPair,
    poisson_replaced_rdp,
)
from tests.cases import in_one_test

SIGMAS, RATES = (0.3, 1.0, 20.0), (1e-4, 0.01, 0.5, 1 - 1e-6)


def release(sigma, rate, steps, delta=1e-5, sampling="poisson", adjacency="replace-one"):
    run = {"mechanism": "gaussian", "sampling": sampling, "rate": rate, "participations": steps}
    return release_with(sigma, delta, **run, adjacency=adjacency)


def hockey_stick(p, q, epsilon):
    return float(np.sum(np.maximum(0.0, p - math.exp(epsilon) * q)))


# ---- the pair -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "rate"), list(itertools.product(SIGMAS, RATES)))
def test_deltas_are_integrals_of_the_mixtures(sigma, rate):
    """Where they are small or cancel, against 40 digits of the tails beyond the cut, found by bisection."""
    pair = PoissonGaussianPair(sigma, rate)
    x, step = np.linspace(-1 - 12 * sigma, 1 + 12 * sigma, 400_001, retstep=True)
    normal = lambda mean: step * np.exp(-(((x - mean) / sigma) ** 2) / 2) / sigma / math.sqrt(2 * math.pi)  # noqa: E731
    p, q = ((1 - rate) * normal(0) + rate * normal(mean) for mean in (1, -1))
    epsilons = np.array([0.0, 0.01, 0.1, 0.3, 0.6, 0.9]) * pair.largest
    claimed = pair.deltas(epsilons)
    for epsilon, delta in zip(epsilons, claimed, strict=True):
        assert delta == pytest.approx(hockey_stick(p, q, epsilon), rel=1e-6, abs=1e-13)
        assert delta == pytest.approx(exact_delta(epsilon, sigma, rate), rel=1e-11)


def exact_delta(epsilon, sigma, rate):
    with mpmath.workdps(40):
        sigma, rate, b = mpmath.mpf(sigma), mpmath.mpf(rate), mpmath.exp(mpmath.mpf(float(epsilon)))
        tail = lambda cut, mean: (1 - rate) * mpmath.ncdf(-cut / sigma) + rate * mpmath.ncdf((mean - cut) / sigma)  # noqa: E731
        density = lambda x, mean: 1 - rate + rate * mpmath.exp((mean * x - 0.5) / sigma**2)  # noqa: E731
        low, high = mpmath.mpf(0), 2 + 20 * sigma
        for _ in range(130):
            middle = (low + high) / 2
            low, high = (middle, high) if density(middle, 1) < b * density(middle, -1) else (low, middle)
        return float(tail(low, 1) - b * tail(low, -1))


@in_one_test(("sigma", "rate"), list(itertools.product([0.5, 1.5], [0.05, 0.6])))
def test_no_neighbours_in_the_plane_exceed_the_claim(sigma, rate):
    """Own, other and further gradients anywhere in the disc, each in the batch or not; epsilons of either sign."""
    pair = PoissonGaussianPair(sigma, rate)
    points, step = np.linspace(-2 - 7 * sigma, 2 + 7 * sigma, 181, retstep=True)
    x, y = np.meshgrid(points, points)

    def law(mean):
        return step**2 * np.exp(-((x - mean[0]) ** 2 + (y - mean[1]) ** 2) / 2 / sigma**2) / 2 / math.pi / sigma**2

    def released(own, other):
        drawn = [(1 - rate, np.zeros(2)), (rate, other)]
        return sum(w * ((1 - rate) * law(c) + rate * law(c + own)) for w, c in drawn)

    rng = np.random.default_rng(7)
    angles, lengths = rng.uniform(0, 2 * math.pi, (8, 3)), np.sqrt(rng.uniform(0, 1, (8, 3)))
    random = np.stack([lengths * np.cos(angles), lengths * np.sin(angles)], -1)
    unit, across, none = np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.zeros(2)
    worst_case = (unit, -unit, none)
    cases = [worst_case, (unit, across, none), (unit, none, unit), (unit, -unit, unit), (unit, -0.9 * unit, none)]
    positive = np.linspace(0.0, 0.31 * pair.largest, 5)
    above = pair.deltas(positive)
    below = -np.expm1(-positive) + np.exp(-positive) * above
    for own, another, other in [*cases, *random]:
        p, q = released(own, other), released(another, other)
        for epsilon, claimed, opposite in zip(positive, above, below, strict=True):
            for first, second in ((p, q), (q, p)):
                assert hockey_stick(first, second, epsilon) <= claimed + 4e-4
                assert hockey_stick(first, second, -epsilon) <= opposite + 4e-4
    reached = [hockey_stick(released(unit, none), released(-unit, none), epsilon) for epsilon in positive]
    np.testing.assert_allclose(reached, above, atol=4e-4)


@pytest.mark.parametrize(
    ("sigma", "rate", "order"),
    [
        *[(0.3, 1e-9, 7.25), (0.3, 0.7, 2.0), (1.0, 1e-9, 1.0101), (1.0, 0.01, 1.0101), (1.0, 0.01, 30.0)],
        *[(1.0, 0.7, 7.25), (20.0, 1e-9, 2.0), (20.0, 0.01, 400.0), (1e6, 1e-6, 1e5), (1e6, 0.7, 1.0101)],
    ],
)
def test_the_renyi_divergence_agrees_with_mpmath_and_is_not_below(sigma, rate, order):
    claimed = float(poisson_replaced_rdp(order, sigma, rate))
    with mpmath.workdps(45):
        s, q, a = mpmath.mpf(sigma), mpmath.mpf(rate), mpmath.mpf(order)

        def excess(z):
            up, down = ((1 - q) + q * mpmath.exp((sign * z - 1 / (2 * s)) / s) for sign in (1, -1))
            return mpmath.npdf(z) * (up**a * down ** (1 - a) - down - a * (up - down))

        ends = sorted({mpmath.mpf(-12) - 2 / s, mpmath.mpf(0), 3 + 1 / s, a / s, 12 + max(a, 2) / s})
        exact = float(mpmath.log1p(mpmath.quad(excess, ends, maxdegree=5)) / (a - 1))
    assert exact <= claimed <= exact * (1 + 1.1e-9)


def test_orders_that_tell_nothing_are_left_out():
    """From about 2 sigma^2 log(1 / q) on the divergence is that of no sampling, 2 a / sigma^2, but for a constant."""
    assert poisson_replaced_rdp(60.0, 0.3, 0.01) == math.inf
    assert poisson_replaced_rdp(2.0, 0.09, 0.01) == math.inf


@in_one_test(("sigma", "rate"), list(itertools.product([0.5, 1.0, 5.0], [0.01, 0.3])))
def test_replacing_costs_less_in_a_poisson_batch_than_in_one_of_a_fixed_size(sigma, rate):
    poisson, fixed = PoissonGaussianPair(sigma, rate), SampledPair(GaussianPair(2 / sigma), rate)
    epsilons = np.linspace(0.0, poisson.largest, 60)
    assert np.all(poisson.deltas(epsilons) <= fixed.deltas(epsilons) * (1 + 1e-9) + 1e-18)
    orders = ORDERS[ORDERS < 30]
    bound = amplified_rdp(orders, lambda some: gaussian_rdp(some, sigma / 2), math.inf, rate)
    exact = poisson_replaced_rdp(orders, sigma, rate)
    known = np.isfinite(exact)
    assert np.count_nonzero(known) > 60
    assert np.all(exact[known] <= bound[known] * (1 + 2e-9))


@in_one_test("order", [1.0, 0.5, -3.0, math.nan])
def test_orders_must_be_above_one(order):
    with pytest.raises(ValueError, match="above 1"):
        poisson_replaced_rdp([2.0, order], 1.0, 0.1)


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_the_check_value_of_the_documentation():
    """docs/mechanisms.md: the same run on the two scales, and with batches of a fixed size."""
    run = release(1.0, 0.01, 1000)
    assert proven_epsilon(run) == pytest.approx(2.846, abs=5e-4)
    assert running_epsilon(run) == pytest.approx(3.111, abs=5e-4)
    assert proven_epsilon(replace(run, adjacency="zero-out")) == pytest.approx(1.8291, abs=5e-5)
    assert proven_epsilon(replace(run, sampling="fixed")) == pytest.approx(14.82, abs=5e-3)


@in_one_test(("sigma", "rate"), list(itertools.product([0.3, 1.0, 10.0], [1e-3, 0.1, 0.9])))
@in_one_test("delta", [1e-3, 1e-7])
def test_one_step_is_exact(sigma, rate, delta):
    """By bisection on the delta of the pair, which is exact."""
    pair = PoissonGaussianPair(sigma, rate)
    low, high = 0.0, pair.largest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if pair.deltas(np.array([middle]))[0] > delta else (low, middle)
    found = proven_epsilon(release(sigma, rate, 1, delta))
    assert high * (1 - 1e-9) - 1e-15 <= found <= 1.01 * high + 0.2 * rate * min(2 / sigma, 1.0)


@in_one_test(
    ("sigma", "rate", "steps"),
    [
        *itertools.product([0.5, 30.0], [1e-3, 0.2, 1.0], [1, 100]),
        *[(0.3, 0.01, 100), (1.0, 1e-3, 10**6), (1e6, 1.0, 10**6), (1e6, 1e-6, 10**6)],
    ],
)
def test_figures_lie_where_they_must(sigma, rate, steps):
    """Replace-one <= a fixed size <= no sampling; never above the running figure; equal at rate 1."""
    run = release(sigma, rate, steps)
    found, unsampled = proven_epsilon(run), gaussian_epsilon(1e-5, 2 * math.sqrt(steps) / sigma)
    assert 0 <= found <= running_epsilon(run) <= unsampled
    assert found <= proven_epsilon(replace(run, sampling="fixed")) * (1 + 1e-3) + 1e-12
    assert (found == unsampled) == (rate == 1 or unsampled == 0)


@in_one_test(("sigma", "rate", "steps"), [(0.5, 0.2, 10), (1.0, 1e-3, 1000), (30.0, 0.9, 10_000)])
@pytest.mark.parametrize("delta", [1e-5, 1e-12])
def test_zero_out_costs_less(sigma, rate, steps, delta):
    """Also where Renyi accounting gives both figures."""
    run = release(sigma, rate, steps, delta)
    assert proven_epsilon(replace(run, adjacency="zero-out")) < proven_epsilon(run)


@pytest.mark.parametrize("sigma", [1.0, 30.0])
def test_nothing_is_left_as_the_rate_goes_to_zero(sigma):
    rates = (1e-1, 1e-3, 1e-6, 1e-12)
    for figure in (proven_epsilon, running_epsilon):
        figures = [figure(release(sigma, rate, 100)) for rate in rates]
        assert np.all(np.diff(figures) <= 0)
        assert figures[-1] == 0 or figure is running_epsilon


@pytest.mark.parametrize("delta", [1e-5, 1e-12])
def test_more_of_anything_costs_more(delta):
    for change in ({"sigma": 0.9}, {"rate": 0.012}, {"steps": 120}, {"delta": delta / 2}):
        usual = {"sigma": 1.0, "rate": 0.01, "steps": 100, "delta": delta}
        for figure in (proven_epsilon, running_epsilon):
            assert figure(release(**usual)) < figure(release(**{**usual, **change}))


def test_the_running_figure_is_renyi_accounting_of_the_exact_divergence():
    renyi = rdp_to_epsilon(ORDERS, 1000 * poisson_replaced_rdp(ORDERS, 1.0, 0.01), 1e-5)
    assert running_epsilon(release(1.0, 0.01, 1000)) == renyi
    small = guarantee(release(1.0, 0.01, 1000, delta=1e-21))
    assert small.theorem["epsilon"].startswith("Poisson-sampled") and "Renyi accounting" in small.theorem["epsilon"]


def test_hardly_any_noise_falls_back_to_the_bound_for_a_fixed_size():
    run = release(0.05, 1e-3, 1000)
    assert (
        running_epsilon(run)
        == running_epsilon(replace(run, sampling="fixed"))
        < 0.2 * running_epsilon(replace(run, sampling="full", rate=1.0))
    )


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.0, 0.02, 300), (0.5, 0.1, 40)])
def test_a_finer_grid_changes_little_and_lowers(sigma, rate, steps, monkeypatch):
    parts = ((PoissonGaussianPair(sigma, rate), steps),)
    known = running_epsilon(release(sigma, rate, steps))
    rough = composed_epsilon(parts, 1e-5, known)
    monkeypatch.setattr("fedpriv.accounting.numerical._SHARE_OF_SPREAD", 0.02)
    fine = composed_epsilon(parts, 1e-5, known)
    assert fine * (1 - 1e-6) <= rough <= 1.005 * fine


@in_one_test("adjacency", ["replace-one", "zero-out"])
@pytest.mark.parametrize(("target", "rate", "steps"), [(0.3, 0.01, 300), (3.0, 0.1, 10), (3.0, 1.0, 4)])
def test_sigma_reaches_the_target_from_below(target, rate, steps, adjacency):
    sigma = calibrate(target, release(1.0, rate, steps, adjacency=adjacency))
    assert target * (1 - 1e-3) <= proven_epsilon(release(sigma, rate, steps, adjacency=adjacency)) <= target


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.01), (1e4, 1e-8), (0.05, 1e-3)])
def test_a_group_of_one_is_one_unit(sigma, rate):
    """From a table, so a little more, and never less; also where losses are tiny."""
    one, group = PoissonGaussianPair(sigma, rate), PoissonGroupPair(sigma, ((0, 1 - rate), (1, rate)))
    epsilons = np.linspace(0, one.largest / 2, 50)
    known, found = one.deltas(epsilons), group.deltas(epsilons)
    assert np.all(found >= known * (1 - 1e-8))
    np.testing.assert_allclose(found, known, rtol=1e-3)
