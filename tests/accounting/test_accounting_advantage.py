"""Ceilings of membership inference: against the best test of a mechanism that reaches them."""

import math

import numpy as np
import pytest

from fedpriv.accounting.ceiling import membership_advantage, membership_auc
from fedpriv.core.errors import InputError
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
