"""Optimal composition of pure releases against the binomial sum with 60 digits, its normal limit and dp-accounting."""

import itertools
import math

import mpmath
import pytest

from fedpriv.accounting import amplified_pure, gaussian_epsilon
from fedpriv.accounting.composition import LARGEST_COUNT, pure_composition_epsilon
from tests.cases import in_one_test


def exact_delta(epsilon, count, total):
    """Delta of `count` randomised responses at `total`, term by term."""
    with mpmath.workdps(60):
        epsilon, total = mpmath.mpf(epsilon), mpmath.mpf(total)
        terms = []
        for lies in range(count + 1):
            loss = (count - 2 * lies) * epsilon
            if loss > total:
                chance = mpmath.binomial(count, lies) * mpmath.exp((count - lies) * epsilon)
                terms.append(chance / (1 + mpmath.exp(epsilon)) ** count * -mpmath.expm1(total - loss))
        return mpmath.fsum(terms)


@in_one_test("epsilon", [1e-9, 1e-4, 0.01, 0.1, 1.0, 5.0, 50.0, 1000.0])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 600])
@pytest.mark.parametrize("delta", [0.9, 0.3, 1e-3, 1e-5, 1e-12, 1e-40])
def test_the_smallest_epsilon_that_holds(epsilon, count, delta):
    found = pure_composition_epsilon(epsilon, count, delta)
    assert 0 <= found <= count * epsilon
    assert exact_delta(epsilon, count, found * (1 + 1e-14)) <= delta
    if found > 0:
        assert exact_delta(epsilon, count, found * (1 - 1e-6) - 1e-9) > delta * (1 - 1e-9)


@in_one_test(("epsilon", "count"), [(1e-4, 10**7), (0.01, 10**6), (0.1, 10**5), (1e-7, 10**7)])
@in_one_test("delta", [1e-3, 1e-9])
def test_many_releases_are_nearly_one_gaussian(epsilon, count, delta):
    """Its loss has nearly the variance T epsilon^2 and half of that as its mean (central limit theorem)."""
    found = pure_composition_epsilon(epsilon, count, delta)
    assert found == pytest.approx(gaussian_epsilon(delta, epsilon * math.sqrt(count)), rel=5e-3)


@in_one_test(("epsilon", "count"), list(itertools.product([0.05, 0.7], [1, 40])))
def test_more_costs_more(epsilon, count):
    found = pure_composition_epsilon(epsilon, count, 1e-5)
    assert found < pure_composition_epsilon(1.01 * epsilon, count, 1e-5)
    assert found < pure_composition_epsilon(epsilon, count + 1, 1e-5)
    assert found < pure_composition_epsilon(epsilon, count, 1e-6)


def test_of_one_answer():
    """delta = p - exp(epsilon') (1 - p)."""
    keep = 1 / (1 + math.exp(-0.5))
    expected = math.log((keep - 1e-3) / (1 - keep))
    assert pure_composition_epsilon(0.5, 1, 1e-3) == pytest.approx(expected, abs=1e-9)


def test_nothing_costs_nothing_and_too_much_is_not_claimed():
    assert pure_composition_epsilon(0.0, 100, 1e-5) == 0.0
    assert pure_composition_epsilon(3.0, 0, 1e-5) == 0.0
    assert pure_composition_epsilon(1e-3, LARGEST_COUNT + 1, 1e-5) == math.inf


def test_dp_accountings_privacy_loss_distribution_of_randomised_response():
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    epsilon, count = amplified_pure(2.0, 0.05), 200
    cell = epsilon / 1000  # each loss is rounded up by at most that
    single = pld.from_randomized_response(2 / (1 + math.exp(epsilon)), 2, value_discretization_interval=cell)
    above = single.self_compose(count).get_epsilon_for_delta(1e-6)
    assert above - count * cell <= pure_composition_epsilon(epsilon, count, 1e-6) <= above
