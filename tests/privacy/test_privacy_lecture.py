"""Formulas of a lecture on differential privacy that need correcting: each shown to break, with what is right beside.

The distinguishing games are those of tests/privacy/bounds.py: each raises a false alarm with probability 1e-8 at most.
"""

import math

import numpy as np
import pytest
from scipy import optimize

from fedpriv.accounting.composition import pure_composition_epsilon
from fedpriv.accounting.convex_models import Problem, output_scale
from fedpriv.accounting.gaussian import analytic_sigma, classic_sigma, gaussian_delta, gaussian_epsilon
from fedpriv.core.errors import InputError
from fedpriv.models.machinery.convex import Objective, minimised
from tests.privacy.bounds import Scores, play

DELTA = 1e-5


def advanced(epsilon: float, count: int, slack: float) -> float:
    """Advanced composition with the slack of the composed claim."""
    return count * epsilon * math.expm1(epsilon) + epsilon * math.sqrt(2 * count * math.log(1 / slack))


def test_advanced_composition_takes_the_slack_of_the_composed_claim() -> None:
    """With the releases' own delta it is infinite for pure ones; with the slack it holds; near 1 the sum is less."""
    with pytest.raises(ZeroDivisionError):
        advanced(0.1, 100, 0.0)
    for epsilon, count in ((0.05, 400), (0.1, 100), (1.0, 10), (2.0, 5)):
        exact = pure_composition_epsilon(epsilon, count, DELTA)
        assert exact <= min(advanced(epsilon, count, DELTA), count * epsilon) * (1 + 1e-9)
    assert advanced(0.05, 400, DELTA) < 400 * 0.05
    assert advanced(1.0, 10, DELTA) > 2 * 10 * 1.0


def test_the_classic_formula_is_for_epsilon_up_to_one() -> None:
    assert math.sqrt(2 * math.log(1.25 / DELTA)) == pytest.approx(4.8448, abs=5e-5)
    assert classic_sigma(1.0, DELTA) == pytest.approx(4.8448, abs=5e-5)
    assert analytic_sigma(1.0, DELTA) == pytest.approx(3.7306, abs=5e-5)
    with pytest.raises(InputError, match="epsilon <= 1 only"):
        classic_sigma(1.5, DELTA)
    # What it would print for a large epsilon is no longer (epsilon, delta)-private.
    sigma = math.sqrt(2 * math.log(1.25 / DELTA)) / 20
    assert gaussian_delta(20.0, 1 / sigma) > 5 * DELTA


def neighbours(examples: int, regularisation: float) -> tuple[float, float]:
    """Logistic regression on one feature: all have label 1 or, in the neighbour, all but one."""
    pairs = []
    for wrong in (0, 1):
        labels = np.repeat([0, 1], [wrong, examples - wrong])
        objective = Objective(np.ones((examples, 1)), labels, 2, 2 * regularisation)
        weights = minimised(objective, 1.0, 1e-9).weights
        pairs.append(float((weights[1] - weights[0])[0]))
    return pairs[0], pairs[1]


def game(sigma: float, apart: float, epsilon: float, delta: float) -> bool:
    """Whether a game on two models that lie so far apart refutes the claim about noise of this deviation."""
    draws = np.random.default_rng(3)

    def draw(side: str, runs: int) -> Scores:
        return {"weight": draws.normal(apart if side == "right" else 0.0, sigma, runs)}

    return play(draw, {delta: epsilon}, 20_000).violation


@pytest.mark.essential
def test_output_perturbation_without_lambda_in_it_is_refuted() -> None:
    """n = 10,000, lambda = 0.01: the lecture's deviation leaves lambda out and is a hundred times too small."""
    count, regularisation, epsilon = 10_000, 0.01, 1.0
    lecture = math.sqrt(8 * math.log(1.25 / DELTA)) / (count * epsilon)
    problem = Problem(count, 1, 2, regularisation)
    right = output_scale(problem, epsilon, "gaussian", DELTA)
    assert lecture == pytest.approx(0.000969, abs=5e-7)
    assert right == pytest.approx(0.0746, abs=5e-5)
    assert problem.sensitivity * classic_sigma(epsilon, DELTA) == pytest.approx(100 * lecture)
    # Without regularisation at all there is no bound: each label's minimum lies at infinity.
    assert Problem(count, 1, 2, 1.0).sensitivity * classic_sigma(epsilon, DELTA) == pytest.approx(lecture)
    one, other = neighbours(count, regularisation)
    assert 0 < abs(other - one) <= problem.sensitivity
    assert game(lecture, other - one, epsilon, DELTA)
    assert not game(right, other - one, epsilon, DELTA)
    # The worst pair that the theorem allows is not refuted either, and half of its noise is.
    tight = gaussian_epsilon(0.1, problem.sensitivity / right)
    assert not game(right, problem.sensitivity, tight, 0.1)
    assert game(right / 2, problem.sensitivity, tight, 0.1)


def test_a_minimum_without_regularisation_has_no_sensitivity() -> None:
    """Separable examples: the smaller lambda, the further one label moves the minimum, without an end."""
    moved = []
    for regularisation in (1e-2, 1e-4, 1e-6):
        one, other = neighbours(2, regularisation)
        moved.append(abs(one - other))
    assert moved[0] < moved[1] < moved[2]
    assert moved[2] > 3 * moved[0]


def test_the_formula_for_steps_needs_many_of_them() -> None:
    """DP-SGD by advanced composition of amplified steps: each step's own epsilon has to be 1 at most."""
    count, epsilon = 10_000, 1.0

    def sigma(steps: float) -> float:
        factor = math.log(2 / DELTA) * math.log(2.5 * steps / (DELTA * count))
        return math.sqrt(256 * steps * factor) / (count * epsilon)

    def own(steps: float) -> float:
        return count * epsilon / (4 * math.sqrt(2 * steps * math.log(2 / DELTA)))

    least = optimize.brentq(lambda steps: own(steps) - 1, 1, 1e9)
    assert least == pytest.approx(256_020, abs=0.5)
    assert sigma(count) == pytest.approx(1.97, abs=5e-3)
    assert own(count) == pytest.approx(5.06, abs=5e-3)
    # Both theorems below it end at 1: normal noise by the classic formula, and amplification by sampling, whose exact
    # log(1 + q (e^epsilon - 1)) is taken for at most 2 q epsilon.
    with pytest.raises(InputError, match="epsilon <= 1 only"):
        classic_sigma(own(count), DELTA)
    rate = 1 / count
    assert math.log1p(rate * math.expm1(1.0)) <= 2 * rate * 1.0
    assert math.log1p(rate * math.expm1(own(count))) > 15 * 2 * rate * own(count)
