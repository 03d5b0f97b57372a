"""Ceilings of exposure against sums over all ranks, randomised response and group privacy by hand."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import integrate

from fedpriv.accounting.memorisation import (
    Statement,
    among_others,
    exposure_ceiling,
    guessed_exposure,
    of_copies,
    rank_ceiling,
)
from fedpriv.core.errors import InputError
from tests.cases import in_one_test


@in_one_test("space", [2, 10, 1000])
def test_the_guess_is_the_mean_over_all_ranks(space: int) -> None:
    expected = np.mean([math.log2(space) - math.log2(rank) for rank in range(1, space + 1)])
    assert guessed_exposure(space) == pytest.approx(expected, rel=1e-9)


def test_the_guess_of_large_spaces_is_that_of_the_exponential_law() -> None:
    assert guessed_exposure(10**6) == pytest.approx(1 / math.log(2), abs=1e-4)
    assert guessed_exposure(10**80) == pytest.approx(1 / math.log(2), rel=1e-12)


@in_one_test(("epsilon", "delta"), [(0.0, 0.0), (0.5, 1e-5), (3.0, 1e-3), (6.0, 0.0)])
def test_the_ceiling_of_the_mean_is_the_integral_over_its_tail(epsilon: float, delta: float) -> None:
    space, statement = 10_000, Statement(epsilon, delta)
    most = math.log2(space)
    expected, _ = integrate.quad(lambda bits: min(1, math.exp(epsilon) * 2**-bits + delta), 0, most, limit=500)
    assert exposure_ceiling([statement], space) == pytest.approx(expected, rel=1e-6)
    assert rank_ceiling([statement], most, space) == pytest.approx(math.exp(epsilon) / space + delta)
    assert guessed_exposure(space) <= expected + 1e-12


@in_one_test("epsilon", [0.3, 1.0, 4.0])
def test_randomised_response_does_not_exceed_the_ceilings(epsilon: float) -> None:
    """The secret itself is told first with the most probability that epsilon allows, else another: exactly epsilon."""
    space = 64
    told = math.exp(epsilon) / (math.exp(epsilon) + space - 1)
    # Whoever is told ranks the told one first, all others in a fixed order.
    mean = told * math.log2(space) + (1 - told) * np.mean([math.log2(space / rank) for rank in range(2, space + 1)])
    statements = [Statement(epsilon, 0.0)]
    assert told <= rank_ceiling(statements, math.log2(space), space)
    ceiling = exposure_ceiling(statements, space)
    assert ceiling is not None
    assert mean <= ceiling


def test_of_several_statements_the_smallest_counts_and_without_any_nothing_is_proven() -> None:
    few: Sequence[Statement] = [Statement(20.0, 0.0), Statement(1.0, 1e-5)]
    assert exposure_ceiling(few, 1000) == exposure_ceiling(few[1:], 1000)
    assert exposure_ceiling([], 1000) is None
    assert exposure_ceiling([Statement(20.0, 0.0)], 1000) is None
    assert rank_ceiling([], 3.0, 1000) == 1.0
    assert rank_ceiling([Statement(1e9, 0.0)], 3.0, 1000) == 1.0
    assert rank_ceiling(few, 10.0, 1000) == 0.0  # 2^10 is more than there are


def test_a_secret_that_differs_from_others_is_drawn_from_fewer() -> None:
    """The law of its rank where a model without privacy for the others ranks them last: all that is left is uniform."""
    space, others = 12, 5
    statement = among_others(Statement(0.0, 0.0), space, others)
    ranks = np.arange(1, space - others + 1)
    exposures = np.log2(space / ranks)
    for bits in exposures:
        assert rank_ceiling([statement], bits, space) == pytest.approx(np.mean(exposures >= bits))
    ceiling = exposure_ceiling([statement], space)
    assert ceiling is not None
    assert guessed_exposure(space) < exposures.mean() <= ceiling


def test_copies_are_a_group() -> None:
    assert of_copies(Statement(0.7, 1e-6), 1) == pytest.approx((0.7, 1e-6))
    delta = 1e-6 * (1 + math.exp(0.7) + math.exp(1.4))
    assert of_copies(Statement(0.7, 1e-6), 3) == pytest.approx((2.1, delta))
    assert of_copies(Statement(50.0, 1e-6), 1000) == (50_000.0, 1.0)
    assert of_copies(Statement(2.0, 0.0), 4) == (8.0, 0.0)
    assert of_copies(Statement(0.0, 1e-6), 4) == pytest.approx((0.0, 4e-6))


@in_one_test("given", [(-1.0, 0.0, 1), (1.0, 2.0, 1), (1.0, 0.0, 0), (math.nan, 0.0, 1)])
def test_what_is_out_of_range_is_refused(given: tuple[float, float, int]) -> None:
    with pytest.raises(InputError, match="allowed is from"):
        of_copies(Statement(given[0], given[1]), given[2])
