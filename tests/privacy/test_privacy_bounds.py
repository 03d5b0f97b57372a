"""The limits against scipy's own, and games whose epsilon is known: randomised response (Warner 1965)."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.cases import in_one_test
from tests.privacy.bounds import ALARM, Draw, Scores, lower_limit, play

EPSILON = 1.0


def test_limits_are_those_of_clopper_and_pearson() -> None:
    for draws, hits, false_hits in ((48, 48, 0), (48, 30, 5), (700, 500, 100), (40_000, 21_000, 19_000)):
        p, q = (
            binomtest(each, draws).proportion_ci(confidence_level=1 - 2 * ALARM, method="exact")
            for each in (hits, false_hits)
        )
        for delta in (0.0, 1e-2):
            expected = math.log((p.low - delta) / q.high)
            found = float(lower_limit(np.array(hits), np.array(false_hits), draws, delta))
            assert found == pytest.approx(expected, rel=1e-6)


def response(seed: int, epsilon: float) -> Draw:
    """Says truly which data set it is with probability exp(epsilon) / (1 + exp(epsilon)); beside it, a coin."""
    rng = np.random.default_rng(seed)

    def draw(side: str, runs: int) -> Scores:
        says_so = rng.random(runs) < 1 / (1 + math.exp(-epsilon))
        return {"coin": rng.random(runs), "response": np.where(says_so, side == "left", side == "right").astype(float)}

    return draw


@in_one_test("seed", range(20))
def test_the_true_epsilon_is_never_exceeded_and_a_smaller_one_is_found_out(seed: int) -> None:
    assert not play(response(seed, EPSILON), {0.0: EPSILON}, 2000).violation
    verdict = play(response(seed, EPSILON), {0.0: 0.5 * EPSILON, 1e-5: 0.5 * EPSILON}, 2000)
    assert verdict.violation
    assert verdict.event.statistic == "response"
    assert verdict.bound < EPSILON


def test_answers_that_are_all_alike_tell_nothing() -> None:
    verdict = play(lambda side, runs: {"failures": np.zeros(runs)}, {1e-5: 0.0}, 48)
    assert not verdict.violation


def test_a_number_that_is_never_the_same_is_found_by_its_threshold() -> None:
    rng = np.random.default_rng(0)
    verdict = play(lambda side, runs: {"length": rng.random(runs) + 1.5 * (side == "left")}, {1e-1: 0.0}, 48)
    assert verdict.violation
    assert verdict.event.threshold == pytest.approx(1.25, abs=0.25)
