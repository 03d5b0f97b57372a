"""Noise on the sum of updates: central noise with clients that a secret draws, and distributed noise at its extremes.

The draws are the real ones, and so is the noise that they lead to; given those, the adversary's best event is known in
closed form, so that its probability need not be sampled. False alarms: each limit fails with probability ``ALARM`` at
most, and there are fewer than 40.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import linalg, stats

from fedpriv.accounting import gaussian_epsilon, proven_epsilon
from fedpriv.accounting.skellam import LEVELS, SHARED_SIGMA
from fedpriv.core.config import Experiment
from fedpriv.core.plan import Plan, Plans, Schedule, participants, plan_client
from fedpriv.core.randomness import Secret
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.world import build_world
from fedpriv.mechanisms import NoisySettings
from fedpriv.mechanisms.machinery.quantisation import encoded
from fedpriv.mechanisms.machinery.redistribution import uniform_shares
from fedpriv.server.aggregation import CentralNoise
from tests.noise import stream
from tests.privacy.bounds import ALARM

DELTA = 1e-5

# ---- central noise: two clients, of whom each is in a round with probability 1/2, and two rounds --------------------

CENTRAL = {
    "federation": {"clients": 2, "clients_per_round": 1, "client_sampling": "poisson", "rounds": 2},
    "mechanism": {"name": "central", "target_epsilon": 3.0},
    "adversary": {"attacks": []},
}
RUNS = 1500


def central(seed: int = 1) -> Experiment:
    tree = {**CENTRAL, "seed": seed, "federation": {**CENTRAL["federation"], "algorithm": "fedavg"}}
    return Experiment.model_validate(tree)


def planned(experiment: Experiment, secret: Secret) -> Plan:
    return Plans(experiment, np.array([50, 50]), (12, 3), secret=secret)[0]


def lower_delta(plan: Plan, times: np.ndarray, noise: float) -> float:
    """What delta is at least, at the amplified epsilon that is printed for this sigma.

    The victim's update points one way or the opposite way, and two noisy sums are seen, with ``noise`` times sigma. The
    event is the one with the largest delta if the victim is in each round with probability 1/2 by itself.

    Args:
        plan: with the sigma that everybody sees.
        times: (n,), in how many rounds of n runs with that sigma the victim was.
        noise: a factor.
    """
    release = replace(plan.accounted([1, 2]), sampling="poisson", rate=0.5)
    epsilon, sigma = proven_epsilon(release), noise * plan.config.noise
    grid = np.linspace(-9 - 1 / sigma, 9 + 1 / sigma, 1001)
    area = (grid[1] - grid[0]) ** 2
    there = {sign: stats.norm.pdf(grid, sign / sigma) for sign in (1, 0, -1)}

    def density(sign: int, *chances: float) -> np.ndarray:
        """Of both sums, where the victim is in the first and in the second with these probabilities."""
        return np.multiply.outer(*(each * there[sign] + (1 - each) * there[0] for each in chances))

    event = density(1, 0.5, 0.5) > math.exp(epsilon) * density(-1, 0.5, 0.5)
    total = 0.0
    for number, chances in enumerate(((0, 0), (1, 0), (1, 1))):
        excess = area * (density(1, *chances) - math.exp(epsilon) * density(-1, *chances))[event].sum()
        hits, misses = (times == number).sum(), (times != number).sum()
        least = stats.beta.ppf(ALARM, hits, misses + 1) if hits else 0.0
        most = stats.beta.isf(ALARM, hits + 1, misses) if misses else 1.0
        total += float(excess * (least if excess > 0 else most))
    return total


def worst_delta(noise: float = 1.0) -> float:
    """The largest lower limit on delta, given any sigma that some of many secrets lead to."""
    experiment, seen = central(), defaultdict(list)
    plans = {}
    for number in range(RUNS):
        secret = Secret.of_seed(number)
        plan = planned(experiment, secret)
        plans[plan.config.noise] = plan
        seen[plan.config.noise].append(sum(0 in participants(experiment, each, None, secret) for each in (1, 2)))
    return max(lower_delta(plans[sigma], np.array(times), noise) for sigma, times in seen.items())


def drawn_by(secret: Secret | None, experiment: Experiment) -> Schedule:
    """The rounds for which noise was calibrated once: those that the secret drew."""
    drawn: dict[int, list[int]] = {}
    for number in (1, 2):
        for client in participants(experiment, number, None, secret):
            drawn.setdefault(client, []).append(number)
    return Schedule(range(1, 3), {client: tuple(rounds) for client, rounds in drawn.items()})


def test_central_noise_tells_no_more_than_the_amplified_line() -> None:
    assert worst_delta() < DELTA


def test_half_of_the_central_noise_is_found_out() -> None:
    assert worst_delta(noise=0.5) > 10 * DELTA


def test_noise_that_follows_from_the_draw_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plans, "_schedule", property(lambda plans: drawn_by(plans.secret, plans.experiment)))
    assert worst_delta() > 1.5 * DELTA


def test_central_noise_is_the_same_for_all_secrets_and_seeds() -> None:
    noise = {planned(central(seed), Secret.of_seed(seed)).config.noise for seed in range(6)}
    assert len(noise) == 1


@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if issubclass(kind, NoisySettings)])
def test_no_noise_follows_from_a_secret(name: str) -> None:
    """Of no mechanism, though clients are drawn for each round: everybody learns the noise."""
    tree = {
        "federation": {"clients": 9, "clients_per_round": 4, "rounds": 6, "algorithm": "fedavg"},
        "mechanism": {"name": name, "target_epsilon": 8.0, "unit": "update"},
        "adversary": {"attacks": []},
    }
    experiment, sizes = Experiment.model_validate(tree), np.full(9, 50)
    shares = uniform_shares({"a": torch.zeros(12), "b": torch.zeros(3)}) if name == "hgm" else None
    noise = [
        [plan.config.noise for plan in Plans(experiment, sizes, (12, 3), shares, Secret.of_seed(k))] for k in (1, 2)
    ]
    assert noise[0] == noise[1]
    if experiment.hides_participants:
        planned = Plans(experiment, sizes, (12, 3), secret=Secret.of_seed(1))[0].guarantee(range(1, 7)).epsilon
        assert planned == pytest.approx(8.0, rel=1e-3)


# ---- correlated noise: what all rounds of a client tell together ----------------------------------------------------

TURNS = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [64]},
    "federation": {"clients": 4, "clients_per_round": 2, "rounds": 7, "algorithm": "fedavg"},
    "adversary": {"attacks": []},
}


def attained_by_turns(noise: float, band: int | None = None) -> tuple[float, float]:
    """The epsilon that is printed for sigma 3, and what the rounds 1, 3, 5 and 7 of a client attain.

    Each coordinate of the noise that the server draws is a game of its own, of a client whose updates have one number:
    the best test weighs the releases of all rounds by the inverse of their covariance.

    Args:
        noise: a factor of sigma, which the claim does not know of.
        band: of the claim; None: that of the noise.
    """
    mechanism = {"name": "correlated", "sigma": 3.0, "clip_norm": 0.5, "band": 3}
    world = build_world(Experiment.model_validate({**TURNS, "mechanism": {**mechanism, "sigma": 3.0 * noise}}))
    claimed = Experiment.model_validate({**TURNS, "mechanism": {**mechanism, "band": band or 3}})
    printed = plan_client(claimed, 0, 100, (1,)).guarantee(range(1, 8)).epsilon
    server, rounds = CentralNoise(world), []
    for number in range(1, 8):
        released = server.mean(number, ())
        rounds.append(torch.cat([value.flatten() for value in released.parameters.values()]).double().numpy())
    inverse = np.linalg.inv(np.tril(linalg.toeplitz([1.0, -0.5, -0.125, 0, 0, 0, 0])))
    moved = inverse[:, ::2].sum(1)  # C x of one who sends 1 in the rounds 1, 3, 5 and 7
    scores = moved @ (inverse @ np.stack(rounds)) / np.linalg.norm(moved)
    deviation = math.sqrt(float(np.square(scores).sum()) / float(stats.chi2.ppf(ALARM, scores.size)))
    assert printed is not None
    return printed, gaussian_epsilon(DELTA, 2 * 0.5 / 2 * float(np.linalg.norm(moved)) / deviation)


def test_correlated_noise_tells_no_more_than_the_ledger_says() -> None:
    printed, attained = attained_by_turns(1.0)
    assert 0.85 * printed < attained < printed


def test_half_of_the_correlated_noise_is_found_out() -> None:
    printed, attained = attained_by_turns(0.5)
    assert attained > 1.5 * printed


def test_correlated_noise_that_is_accounted_for_as_independent_is_found_out() -> None:
    printed, attained = attained_by_turns(1.0, band=1)
    assert attained > 1.2 * printed


# ---- distributed noise with two clients, the fewest ------------------------------------------------------------------

COORDINATES = 1 << 18


def distributed(sigma: float) -> Plan:
    tree = {
        "federation": {"clients": 2, "algorithm": "fedavg"},
        "mechanism": {"name": "distributed", "sigma": sigma},
        "adversary": {"attacks": []},
    }
    return plan_client(Experiment.model_validate(tree), 0, 100, (1,))


def most_variance(plan: Plan, noise: float) -> float:
    """What the variance of the noise on a sum of two is at most, in squared levels, with ``noise`` times the noise."""
    share, generator = plan.share_of_noise, stream().numpy()
    signs, nothing = np.random.default_rng(0), torch.zeros(COORDINATES)
    words = [encoded(nothing, noise**2 * share.variance, signs, generator).view(np.int32) for _ in range(2)]
    squares = float(np.square(np.sum(words, axis=0, dtype=np.float64)).sum())
    return squares / float(stats.chi2.ppf(ALARM, COORDINATES))


def attained_by_many(variance: float, rounds: int) -> float:
    """Epsilon of the sum of all rounds, to which the central limit theorem applies."""
    return gaussian_epsilon(DELTA, 2 * LEVELS * math.sqrt(rounds / variance))


def attained_by_one(variance: float, rounds: int) -> float:
    """Epsilon of one round, from the event that a sum is above the update: of Q by Chernoff's bound."""
    far = 2 * LEVELS
    exponent = far * math.asinh(far / variance) - math.hypot(far, variance) + variance
    return rounds * (math.log(0.5 - DELTA) + exponent)


EXTREMES: list[tuple[float, int, Callable[[float, int], float]]] = [
    (SHARED_SIGMA.most, 300_000, attained_by_many),
    (1023.0, 300_000, attained_by_many),
    (SHARED_SIGMA.floor, 1, attained_by_one),
]


@pytest.mark.parametrize(("sigma", "rounds", "attained"), EXTREMES, ids=["most", "nearly most", "least"])
def test_distributed_noise_tells_no_more_than_the_ledger_says(
    sigma: float, rounds: int, attained: Callable[[float, int], float]
) -> None:
    plan = distributed(sigma)
    printed = plan.guarantee(range(1, rounds + 1)).epsilon
    assert printed is not None
    assert attained(most_variance(plan, 1.0), rounds) < printed
    assert attained(most_variance(plan, 0.5), rounds) > 1.5 * printed


def test_a_sampler_that_loses_variance_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's own, whose logarithms of probabilities cancel where there is this much noise."""

    def cancelling(variance: float, shape: tuple[int, ...], noise: np.random.Generator) -> np.ndarray:
        return noise.poisson(variance / 2, shape) - noise.poisson(variance / 2, shape)

    monkeypatch.setattr("fedpriv.mechanisms.machinery.quantisation.skellam", cancelling)
    plan = distributed(1023.0)
    printed = plan.guarantee(range(1, 300_001)).epsilon
    assert printed is not None
    assert attained_by_many(most_variance(plan, 1.0), 300_000) > printed
