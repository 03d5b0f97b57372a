"""The distinguishing game on trained models at the largest tolerance: the noise covers whatever the solver may do.

The solver of these games keeps to its tolerance and no more: it errs as far as it may, in a direction that the data
choose. Where noise does not cover that, the game finds it. A game raises a false alarm with probability 2e-9 at most
(``bounds.ALARM`` a limit).
"""

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from fedpriv.accounting import gaussian_epsilon
from fedpriv.accounting.convex_models import Problem, objective_terms
from fedpriv.accounting.gaussian import analytic_sigma
from fedpriv.algorithms.erm.settings import ErmConfig
from fedpriv.mechanisms import mechanism_settings
from fedpriv.mechanisms.model_noise import Fit, ModelNoiseSettings, Weights, spread_noise
from tests.noise import stream
from tests.privacy.bounds import DELTAS, Claims, Draw, Scores, play

RUNS = 8_000
TOLERANCE = 1.0
# Many examples, so that most of the noise is there for the solver's error.
PROBLEM = Problem(examples=100, features=1, classes=2, regularisation=0.1, tolerance=TOLERANCE)

MECHANISMS: dict[str, dict[str, object]] = {
    "objective": {"name": "objective", "target_epsilon": 1.0},
    "output, pure": {"name": "output", "distribution": "laplace", "target_epsilon": 1.0},
    "output, normal": {"name": "output", "distribution": "gaussian", "target_epsilon": 4.0},
}


def careless(side: str) -> Fit:
    """A solver on examples without any feature, one of which has another label on the other side.

    The objective is log 2 + lambda/2 w^2 + <v, w>, and its gradient has the length of the tolerance where this stops.
    """
    error = TOLERANCE if side == "left" else -TOLERANCE

    def fit(regularisation: float, offset: Weights | None) -> Weights:
        return (error - (np.zeros((1, 1)) if offset is None else offset)) / regularisation

    return fit


def draw(config: ModelNoiseSettings) -> Draw:
    generators = {side: stream(seed).numpy() for seed, side in enumerate(("left", "right"))}

    def weights(side: str, runs: int) -> Scores:
        fit = careless(side)
        return {"weight": np.array([config.released(PROBLEM, fit, generators[side])[0, 0] for _ in range(runs)])}

    return weights


def settings(name: str) -> ModelNoiseSettings:
    found = mechanism_settings(MECHANISMS[name])
    assert isinstance(found, ModelNoiseSettings)
    return found


def claims(config: ModelNoiseSettings) -> Claims:
    if config.law != "gaussian":
        return {0.0: config.target_epsilon}
    mu = 1 / analytic_sigma(config.target_epsilon, config.delta)
    return {delta: gaussian_epsilon(delta, mu) for delta in DELTAS}


def test_no_larger_tolerance_is_accepted() -> None:
    assert ErmConfig(tolerance=TOLERANCE).tolerance == TOLERANCE
    with pytest.raises(ValidationError):
        ErmConfig(tolerance=TOLERANCE * 1.001)


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_right_noise_is_not_refuted_and_halved_noise_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(name)
    verdict = play(draw(config), claims(config), RUNS)
    assert not verdict.violation, str(verdict)
    monkeypatch.setattr("fedpriv.mechanisms.model_noise.spread_noise", lambda *given: spread_noise(*given) / 2)
    assert play(draw(config), claims(config), RUNS).violation


@pytest.mark.parametrize("part", [0.5, 0.0])
def test_noise_in_the_objective_alone_does_not_cover_the_solver(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def weaker(problem: Problem, epsilon: float) -> object:
        terms = objective_terms(problem, epsilon)
        return replace(terms, cover=part * terms.cover)

    monkeypatch.setattr("fedpriv.accounting.convex_models.objective_terms", weaker)
    config = settings("objective")
    assert play(draw(config), claims(config), RUNS).violation
