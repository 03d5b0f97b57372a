"""Noisy votes: what is decided, and what it costs, against figures and exact laws of others."""

import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from fedpriv.accounting.aggregators import Aggregator, ConfidentMax, LaplaceMax, NoisyMax, most_answers
from fedpriv.core.errors import InputError
from tests.cases import in_one_test
from tests.noise import stream

DELTA = 1e-5

# Answers at one epsilon, noise of 0.16 of the voters: 1, 3 and 8.
ANSWERS = {3.2: (0, 2, 14), 8.0: (2, 16, 88), 16.0: (9, 66, 355), 40.0: (57, 413, 2220)}

AGGREGATORS: list[Aggregator] = [NoisyMax(3.0), ConfidentMax(5.0, 6.0, 3.0), LaplaceMax(4.0)]


@in_one_test(("sigma", "expected"), ANSWERS.items())
def test_answers_at_one_epsilon(sigma: float, expected: tuple[int, ...]) -> None:
    assert tuple(most_answers(NoisyMax(sigma), epsilon, DELTA) for epsilon in (1.0, 3.0, 8.0)) == expected


def exact_delta(epsilon: float, mu: float) -> mpmath.mpf:
    with mpmath.workdps(30):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@in_one_test(
    ("aggregator", "asked", "answered", "printed"),
    [
        (NoisyMax(40), 286, 286, 2.435),
        (NoisyMax(40), 640, 640, 3.849),
        (NoisyMax(40), 1000, 1000, 4.983),
        (ConfidentMax(200, 150, 40), 640, 286, 2.543),
        (ConfidentMax(200, 150, 40), 640, 640, 3.927),
    ],
)
def test_exact_figures(aggregator: NoisyMax | ConfidentMax, asked: int, answered: int, printed: float) -> None:
    epsilon = aggregator.claim(asked, answered, DELTA).epsilon
    assert epsilon == pytest.approx(printed, abs=5e-4)
    assert float(exact_delta(epsilon, aggregator.spent(asked, answered))) == pytest.approx(DELTA, rel=1e-8)


def test_laplace_answers_are_pure_and_compose() -> None:
    assert LaplaceMax(20).spent(100, 100) == pytest.approx(10.0)
    # 1,000 answers at scale 20, 0.1 each: the specification's figure.
    assert LaplaceMax(20).claim(1000, 1000, DELTA).epsilon == pytest.approx(17.8, abs=0.05)
    assert LaplaceMax(20).claim(1, 1, DELTA).epsilon <= 0.1


def test_whoever_has_several_votes_is_as_much_worse_off() -> None:
    one, three = NoisyMax(10), NoisyMax(30)
    assert three.claim(5, 5, DELTA, votes=3).epsilon == pytest.approx(one.claim(5, 5, DELTA).epsilon, rel=1e-12)
    assert LaplaceMax(60).claim(5, 5, DELTA, 3).epsilon == pytest.approx(LaplaceMax(20).claim(5, 5, DELTA).epsilon)


# ---- decisions ------------------------------------------------------------------------------------------------------


def shares(aggregator: Aggregator, counts: tuple[int, ...], draws: int) -> list[float]:
    """How often each class, and at last no class, was the answer."""
    generator = stream().numpy()
    answers = [aggregator.decide(counts, generator) for _ in range(draws)]
    return [answers.count(each) / draws for each in (*range(len(counts)), None)]


def test_decisions_follow_their_law() -> None:
    """Each of the five shares is within 5.5 deviations: a false alarm in about one of 5 million runs of this test."""
    draws, sigma, sigma1, threshold, scale = 4000, 2.0, 3.0, 8.0, 2.0
    normal = stats.norm.sf(-2 / (math.sqrt(2) * sigma))
    passed = stats.norm.sf((threshold - 7) / sigma1)
    gap = 2 / scale  # the difference of two Laplace numbers is above x scales with probability (2 + x) exp(-x) / 4
    expected = {
        NoisyMax(sigma): (normal, 1 - normal),
        ConfidentMax(threshold, sigma1, sigma): (passed * normal, passed * (1 - normal)),
        LaplaceMax(scale): (1 - (2 + gap) * math.exp(-gap) / 4,),
    }
    for aggregator, chances in expected.items():
        found = shares(aggregator, (7, 5), draws)
        for share, chance in zip(found, chances, strict=False):
            assert abs(share - chance) < 5.5 * math.sqrt(chance * (1 - chance) / draws)


@in_one_test("aggregator", AGGREGATORS)
def test_a_decision_repeats_with_its_random_numbers(aggregator: Aggregator) -> None:
    first, second = ([aggregator.decide((4, 5, 3), stream(seed).numpy()) for seed in range(30)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 1


def test_only_confident_answers_are_left_out() -> None:
    assert ConfidentMax(8, 1e-6, 1e-6).decide((7, 5), stream().numpy()) is None
    assert ConfidentMax(6, 1e-6, 1e-6).decide((7, 5), stream().numpy()) == 0


# ---- bad input ------------------------------------------------------------------------------------------------------


@in_one_test("value", [0.0, -1.0, math.inf, math.nan])
def test_noise_is_above_zero(value: float) -> None:
    for make in (
        NoisyMax,
        LaplaceMax,
        lambda noise: ConfidentMax(1, noise, 1),
        lambda noise: ConfidentMax(1, 1, noise),
    ):
        with pytest.raises(InputError, match="allowed is from 1e-09 to"):
            make(value)
    with pytest.raises(InputError, match="threshold"):
        ConfidentMax(math.nan, 1, 1)


@in_one_test("counts", [(5,), ((1, 2), (3, 4)), (1, math.nan)])
def test_counts_are_of_two_classes_or_more(counts: object) -> None:
    for aggregator in AGGREGATORS:
        with pytest.raises(ValueError, match="expected finite votes"):
            aggregator.decide(counts, np.random.default_rng(0))  # type: ignore[arg-type]


def test_no_more_answers_than_questions() -> None:
    for aggregator in AGGREGATORS:
        with pytest.raises(ValueError, match="expected 0 <= answered <= asked"):
            aggregator.spent(3, 4)
        with pytest.raises(ValueError, match="expected 0 <= answered <= asked"):
            aggregator.claim(3, 4, DELTA)


def test_no_budget_no_answers() -> None:
    with pytest.raises(InputError):
        most_answers(NoisyMax(40), math.nan, DELTA)
