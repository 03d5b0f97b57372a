"""Amplification by sampling against 60-digit evaluations, dp-accounting, Opacus and the exact truth."""

import itertools

import mpmath
import numpy as np
import pytest
from scipy import integrate

from fedpriv.accounting import (
    ORDERS,
    amplified_pure,
    amplified_rdp,
    gaussian_delta,
    gaussian_rdp,
    laplace_rdp,
    pure_rdp,
    vmf_rdp,
)
from fedpriv.accounting.amplification import dominated_rdp, poisson_gaussian_rdp
from tests.cases import in_one_test


@in_one_test("epsilon", [0.0, 1e-12, 1e-3, 0.999, 1.0, 1.001, 5.0, 40.0, 800.0, 1e7])
@in_one_test("rate", [1e-6, 0.01, 0.5, 0.999, 1.0])
def test_amplified_pure_agrees_with_mpmath(epsilon, rate):
    with mpmath.workdps(60):
        expected = mpmath.log1p(mpmath.mpf(rate) * mpmath.expm1(mpmath.mpf(epsilon)))
    assert amplified_pure(epsilon, rate) == pytest.approx(float(expected), rel=1e-13, abs=0)
    assert amplified_pure(epsilon, rate) <= epsilon


def theorem_9(order, base, pure, rate):
    """Wang, Balle and Kasiviswanathan 2019, Theorem 9, as printed, with 60 digits."""
    with mpmath.workdps(60):
        q, exp = mpmath.mpf(rate), mpmath.exp
        odds = mpmath.inf if np.isinf(pure) else mpmath.expm1(mpmath.mpf(pure))
        r = {j: mpmath.mpf(float(base(np.array([float(j)]))[0])) for j in range(2, order + 1)}
        total = 1 + q**2 * mpmath.binomial(order, 2) * min(4 * mpmath.expm1(r[2]), exp(r[2]) * min(2, odds**2))
        for j in range(3, order + 1):
            total += q**j * mpmath.binomial(order, j) * exp((j - 1) * r[j]) * min(2, odds**j)
        return float(mpmath.log(total) / (order - 1))


MECHANISMS = {
    "gaussian 5": (lambda orders: gaussian_rdp(orders, 5.0), np.inf),
    "gaussian 0.4": (lambda orders: gaussian_rdp(orders, 0.4), np.inf),
    "vmf K=1000 kappa=3": (lambda orders: vmf_rdp(orders, 1000, 3.0), 6.0),
    "vmf K=3 kappa=0.05": (lambda orders: vmf_rdp(orders, 3, 0.05), 0.1),
    "vmf K=1 kappa=0.2": (lambda orders: vmf_rdp(orders, 1, 0.2), 0.4),
    "vmf K=61706 kappa=1e7": (lambda orders: vmf_rdp(orders, 61706, 1e7), 2e7),
}


@in_one_test("name", MECHANISMS)
@pytest.mark.parametrize("rate", [1e-4, 0.02, 0.5])
def test_no_figure_is_above_theorem_9_for_any_mechanism(name, rate):
    base, pure = MECHANISMS[name]
    orders = [2, 3, 4, 17, 64]
    claimed = amplified_rdp(orders, base, pure, rate)
    assert np.all(claimed <= [theorem_9(order, base, pure, rate) * (1 + 1e-10) for order in orders])


@pytest.mark.parametrize(("noise", "rate"), list(itertools.product([0.5, 2.0, 20.0], [0.001, 0.05, 0.3])))
def test_no_figure_is_above_dp_accountings_of_theorem_9(noise, rate):
    """Beyond order 256 and at order 2; between these dp-accounting has a sharper one for the Gaussian mechanism."""
    dp = pytest.importorskip("dp_accounting")
    orders = np.array([2, 257, 300, 500])
    event = dp.SampledWithoutReplacementDpEvent(1000, round(1000 * rate), dp.GaussianDpEvent(noise))
    accountant = dp.rdp.RdpAccountant(orders, dp.NeighboringRelation.REPLACE_ONE).compose(event)
    claimed = amplified_rdp(orders, lambda values: gaussian_rdp(values, noise), np.inf, rate)
    assert np.all(claimed <= accountant.rdp * (1 + 1e-9))


def divergence(p, q, order):
    return np.log(np.sum(p**order * q ** (1 - order))) / (order - 1)


@in_one_test(("kappa", "rate"), list(itertools.product([0.05, 0.5, 3.0], [0.01, 0.25, 0.9])))
def test_never_below_the_truth_for_a_random_sign(kappa, rate):
    """One sign of n is drawn and randomised: the exact divergence between neighbours, whatever the other signs."""
    keep = 1 / (1 + np.exp(-2 * kappa))
    plus, minus = np.array([keep, 1 - keep]), np.array([1 - keep, keep])
    orders = np.array([1.05, 1.5, 2, 3, 4.5, 10, 60])
    claimed = amplified_rdp(orders, lambda values: vmf_rdp(values, 1, kappa), 2 * kappa, rate)
    pure = amplified_pure(2 * kappa, rate)
    for others, order in itertools.product((plus, minus), range(orders.size)):
        p, q = (1 - rate) * others + rate * plus, (1 - rate) * others + rate * minus
        truth = max(divergence(p, q, orders[order]), divergence(q, p, orders[order]))
        assert truth <= claimed[order] * (1 + 1e-9)
        assert max(np.max(np.log(p / q)), np.max(np.log(q / p))) <= pure * (1 + 1e-12)


@in_one_test(("noise", "rate"), list(itertools.product([0.7, 2.0], [0.02, 0.4])))
@in_one_test("order", [1.3, 2.0, 5.0, 8.5])
def test_never_below_the_truth_for_a_gaussian(noise, rate, order):
    """One of n numbers in [-1/2, 1/2] is drawn and noised; neighbours differ by 1, the others sit anywhere between."""
    claimed = float(amplified_rdp([order], lambda values: gaussian_rdp(values, noise), np.inf, rate)[0])

    x = np.linspace(-15 * noise - 2, order + 15 * noise, 40001)

    def log_density(own, others):
        parts = [np.log(1 - rate) - (x - others) ** 2 / (2 * noise**2), np.log(rate) - (x - own) ** 2 / (2 * noise**2)]
        return np.logaddexp(*parts) - np.log(noise * np.sqrt(2 * np.pi))

    for own, others in itertools.product((0.5, -0.5), (-0.5, 0.0, 0.5)):
        exponent = order * log_density(own, others) + (1 - order) * log_density(-own, others)
        moment = np.sum(np.exp(exponent)) * (x[1] - x[0])
        assert 0 < np.log(moment) / (order - 1) <= claimed * (1 + 1e-9)


def moments_bound(order, base, rate):
    """The bound by the moments of a dominating pair, as printed, with 60 digits."""
    with mpmath.workdps(60):
        q = mpmath.mpf(rate)
        moment = lambda j: mpmath.exp((j - 1) * mpmath.mpf(float(base(np.array([float(j)]))[0])))  # noqa: E731
        s2, s35 = (moment(2) - 1) / 2, (moment(3.5) - 1) / mpmath.mpf("8.75")
        integral = min(s2, s2 / 2 + mpmath.sqrt(s2 * max(s35 - s2, 0) / 6))
        quadratic = order * (order - 1) * q**2 * integral
        total = 1 + min(quadratic, (order - 1) * q) + (1 - q) ** (order - 2) * quadratic
        for j in range(3, order + 1):
            total += mpmath.binomial(order, j) * (1 - q) ** (order - j) * q**j * (moment(j) - 1)
        return float(mpmath.log(total) / (order - 1))


@in_one_test("name", MECHANISMS)
@pytest.mark.parametrize("rate", [1e-4, 0.02, 0.5])
def test_the_moments_of_a_dominating_pair_agree_with_mpmath(name, rate):
    base, _ = MECHANISMS[name]
    orders = [2, 3, 4, 17, 64]
    expected = [moments_bound(order, base, rate) for order in orders]
    np.testing.assert_allclose(dominated_rdp(orders, base, rate), expected, rtol=1e-6)


PROFILES = {  # delta at epsilon > 0 and the Renyi divergence of a symmetric pair, and an epsilon with hardly a delta
    "gaussian 0.7": (lambda epsilon: gaussian_delta(epsilon, 1 / 0.7), lambda orders: gaussian_rdp(orders, 0.7), 35.0),
    "gaussian 5": (lambda epsilon: gaussian_delta(epsilon, 0.2), lambda orders: gaussian_rdp(orders, 5.0), 4.0),
    "laplace 0.5": (lambda epsilon: -np.expm1((epsilon - 0.5) / 2), lambda orders: laplace_rdp(orders, 0.5), 0.5),
    "laplace 3": (lambda epsilon: -np.expm1((epsilon - 3.0) / 2), lambda orders: laplace_rdp(orders, 3.0), 3.0),
}


@in_one_test("name", PROFILES)
@in_one_test(("order", "rate"), list(itertools.product([1.05, 1.5, 2, 3, 6], [1e-3, 0.1, 0.6, 1 - 1e-9])))
def test_the_moments_bound_the_integral_over_the_amplified_profile(name, order, rate):
    """The integral from which the bound is derived; and without sampling the integral is the divergence itself."""
    profile, base, largest = PROFILES[name]

    def integrand(epsilon):
        v = 1 - rate + rate * np.exp(epsilon)
        return (v ** (order - 2) + v ** (-order - 1)) * profile(epsilon) * np.exp(epsilon)

    integral = integrate.quad(integrand, 0, largest, epsabs=0, epsrel=1e-10, limit=500)[0]
    exact = np.log1p(order * (order - 1) * rate**2 * integral) / (order - 1)
    claimed = float(dominated_rdp([order], base, rate)[0])
    assert exact <= claimed * (1 + 1e-9)
    if rate > 0.99:
        assert exact == pytest.approx(float(base(np.array([float(order)]))[0]), rel=1e-6)
    if rate < 0.01 and order >= 2:
        assert claimed <= 2 * exact


@in_one_test(("kappa", "rate"), list(itertools.product([0.3, 2.0], [0.02, 0.3])))
@in_one_test("order", [1.3, 2.0, 5.0, 8.5])
def test_never_below_the_truth_for_directions_in_the_plane(kappa, rate, order):
    """One of n directions is drawn and replaced by a VMF draw on the circle; others, own and replaced ones anywhere."""
    claimed = float(amplified_rdp([order], lambda orders: vmf_rdp(orders, 2, kappa), 2 * kappa, rate)[0])
    t = np.linspace(0, 2 * np.pi, 2001)[:-1]

    def law(angle):
        density = np.exp(kappa * np.cos(t - angle))
        return density / density.sum()

    for own, others in itertools.product(np.linspace(0, np.pi, 5), np.linspace(0, 2 * np.pi, 9)):
        p, q = rate * law(0.0) + (1 - rate) * law(others), rate * law(own) + (1 - rate) * law(others)
        assert divergence(p, q, order) <= claimed * (1 + 1e-9)


@in_one_test("name", MECHANISMS)
@pytest.mark.parametrize("rate", [1e-6, 0.02, 0.5, 1.0])
def test_sampling_never_costs(name, rate):
    base, pure = MECHANISMS[name]
    amplified = amplified_rdp(ORDERS, base, pure, rate)
    assert np.all(np.isfinite(amplified)) and np.all(amplified >= 0)
    assert np.all(amplified <= base(ORDERS))
    assert np.all(amplified <= pure_rdp(ORDERS, amplified_pure(pure, rate)))
    assert np.all(amplified <= amplified_rdp(ORDERS, base, pure, min(1.0, 2 * rate)) * (1 + 1e-12))


def test_without_noise_to_speak_of_sampling_helps():
    """At a small rate and a small divergence the cost falls with q^2."""
    base = lambda orders: vmf_rdp(orders, 10**6, 1.0)  # noqa: E731
    amplified = amplified_rdp([2.0], base, 2.0, 1e-3)
    assert float(amplified[0]) == pytest.approx(1e-6 * float(base(np.array([2.0]))[0]), rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "rate"), list(itertools.product([0.6, 1.0, 5.0], [0.001, 0.05, 0.5])))
def test_poisson_gaussian_agrees_with_opacus(sigma, rate):
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp")
    orders = [2, 3, 8, 33, 63]
    expected = rdp.compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=orders)
    np.testing.assert_allclose(poisson_gaussian_rdp(orders, sigma, rate), expected, rtol=1e-6, atol=1e-13)


@in_one_test(("sigma", "rate"), list(itertools.product([0.6, 5.0, 1e3, 1e9], [1e-6, 0.05, 0.9])))
def test_poisson_gaussian_agrees_with_mpmath_and_never_cancels(sigma, rate):
    def exact(order):
        with mpmath.workdps(80):
            q, s = mpmath.mpf(rate), mpmath.mpf(sigma)
            terms = [
                mpmath.binomial(order, j) * (1 - q) ** (order - j) * q**j * mpmath.exp((j * j - j) / (2 * s**2))
                for j in range(order + 1)
            ]
            return float(mpmath.log(mpmath.fsum(terms)) / (order - 1))

    orders = [2, 3, 10, 100]
    np.testing.assert_allclose(
        poisson_gaussian_rdp(orders, sigma, rate), [exact(order) for order in orders], rtol=1e-10
    )


@pytest.mark.parametrize("order", [1.3, 2.5, 6.7])
def test_poisson_gaussian_between_integers_is_an_upper_bound(order):
    dp = pytest.importorskip("dp_accounting")
    event = dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(1.0))
    exact = float(dp.rdp.RdpAccountant([order]).compose(event).rdp[0])
    assert exact <= float(poisson_gaussian_rdp([order], 1.0, 0.05)[0]) <= 3 * exact


@in_one_test("order", [1.0, 0.5, 4097.0])
def test_refuses_orders_it_has_no_bound_for(order):
    with pytest.raises(ValueError, match="orders after sampling"):
        poisson_gaussian_rdp([2.0, order], 1.0, 0.1)
    with pytest.raises(ValueError, match="orders after sampling"):
        dominated_rdp([2.0, order], lambda orders: gaussian_rdp(orders, 1.0), 0.1)
