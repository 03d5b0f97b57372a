"""The distinguishing game on a sanitised figure of two polls, and the exact law of the worst two neighbours.

Each game raises a false alarm with probability 2e-9 at most (``bounds.ALARM`` a limit).
"""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.special import log_ndtr

from fedpriv.accounting import votes as accounting_votes
from fedpriv.accounting.aggregators import NoisyMax
from fedpriv.accounting.renyi import ORDERS, rdp_to_epsilon
from fedpriv.accounting.votes import Sanitiser, gaussian_mu, gnss_rdp, is_smooth, smooth_sensitivity
from fedpriv.algorithms.pate.records import VotedAnswer
from fedpriv.algorithms.pate.server import data_dependent_cost
from tests.noise import stream
from tests.privacy.bounds import DELTAS, Claims, Draw, Scores, play

Array = NDArray[np.float64]

RUNS = 8_000

# ---- the game -------------------------------------------------------------------------------------------------------

# One voter moves the cost of an answer from next to nothing to that of any votes: it jumps there.
POLLS = {"left": (1, 5), "right": (2, 4)}
VOTERS, SIGMA = 6, 0.3
SANITISER = Sanitiser(order=1.5, beta=0.02, noise=1.0)


def draw(noise: float) -> Draw:
    """The figure that is shown of one answer, by what a run computes it with."""
    assert is_smooth(SIGMA, SANITISER.order, 2)
    answers = [VotedAnswer(0, True, 1)]
    generators = {side: stream(seed).numpy() for seed, side in enumerate(POLLS)}
    known = {
        side: data_dependent_cost(NoisyMax(SIGMA), SANITISER.order, np.array([counts], np.float64), answers, VOTERS)
        for side, counts in POLLS.items()
    }

    def figures(side: str, runs: int) -> Scores:
        cost, local = known[side]
        sensitivity = smooth_sensitivity(local, SANITISER.beta)
        normals = noise * generators[side].standard_normal(runs)
        return {"figure": np.array([SANITISER.epsilon(cost, sensitivity, 1e-5, each) for each in normals])}

    return figures


def claims() -> Claims:
    rdp = gnss_rdp(ORDERS, SANITISER.beta, SANITISER.noise)
    return {delta: rdp_to_epsilon(ORDERS, rdp, delta) for delta in DELTAS}


def test_the_right_noise_is_not_refuted_and_halved_noise_is() -> None:
    verdict = play(draw(1.0), claims(), RUNS)
    assert not verdict.violation, str(verdict)
    assert play(draw(0.5), claims(), RUNS).violation


def test_a_sensitivity_without_the_jump_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(counts: tuple[int, ...], voters: int, sigma: float, order: float) -> Array:
        below = np.array(accounting_votes._log_q1(sigma, order, len(counts)))
        return np.full(voters, float(accounting_votes._step(below, sigma, order, len(counts))))

    monkeypatch.setattr("fedpriv.algorithms.pate.server.noisy_max_local_sensitivity", without)
    assert play(draw(1.0), claims(), RUNS).violation


# ---- the exact law --------------------------------------------------------------------------------------------------


def exact_delta(epsilon: float, mu: float, sanitiser: Sanitiser) -> float:
    """The delta of answers and figure together for the worst neighbours that the smooth sensitivity allows.

    Of the figure N(0, noise^2) against N(m, (r noise)^2), integrated over its values; of the answers, Gaussian
    differential privacy of mu, in closed form at the epsilon that each value leaves (Balle and Wang 2018, Theorem 8).
    """
    noise, worst = sanitiser.noise, 0.0
    x = np.linspace(-60 * noise, 60 * noise, 40_001)
    one = stats.norm.logpdf(x, 0, noise)
    for r in np.exp(np.linspace(-sanitiser.beta, sanitiser.beta, 5)):
        for m in (min(1, r), -min(1, r)):
            left = epsilon - one + stats.norm.logpdf(x, m, r * noise)
            second = np.exp(np.minimum(left + log_ndtr(-mu / 2 - left / mu), 50))
            gap = np.maximum(stats.norm.cdf(mu / 2 - left / mu) - second, 0)
            worst = max(worst, float(np.sum(np.exp(one) * gap) * (x[1] - x[0])))
    return worst


def published(order: Array, beta: float, noise: float) -> Array:
    """Theorem 23 of Papernot et al. 2018, which states less than the divergence."""
    cost = order * np.exp(2 * beta) / noise**2
    cost += (beta * order - 0.5 * np.log1p(-2 * order * beta)) / (order - 1)
    return np.asarray(cost)


@pytest.mark.parametrize(("budget", "delta"), [(1.0, 1e-5), (1.0, 1e-10), (1.0, 1e-12), (3.0, 1e-12)])
def test_answers_and_figure_are_as_private_as_the_ledger_says(budget: float, delta: float) -> None:
    sanitiser, mu = Sanitiser(15.0, 0.02, 6.0), gaussian_mu(budget, delta)
    assert exact_delta(sanitiser.shown_with(mu, delta).epsilon, mu, sanitiser) <= delta


@pytest.mark.parametrize("delta", [1e-10, 1e-12])
def test_the_published_cost_of_a_figure_is_too_small(delta: float) -> None:
    sanitiser, mu = Sanitiser(15.0, 0.02, 6.0), gaussian_mu(1.0, delta)
    orders = ORDERS[2 * sanitiser.beta * ORDERS < 1]
    rdp = orders * mu**2 / 2 + published(orders, sanitiser.beta, sanitiser.noise)
    assert exact_delta(rdp_to_epsilon(orders, rdp, delta), mu, sanitiser) > delta
