"""Answers against OpenDP, an implementation of others: what its maps prove, what it draws, answers with its noise."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import special, stats

from fedpriv.core.errors import InputError
from fedpriv.service.policies import Draws, ExactDraws, Facts, HeadPolicy, NoisyPolicy
from fedpriv.service.proof import AnswerRelease, answer_guarantee
from tests.service.named import named_policy
from tests.service.test_policies import LEDGER
from tests.service.zcdp import zcdp_epsilon

FACTS = Facts(classes=10, sensitivity=0.2, norm=1.5, features=4, models=50)
CHANGE = FACTS.sensitivity * FACTS.norm  # of the logits, in length
ONE_IN_TEN_THOUSAND = 1e-4  # false alarms

pytestmark = pytest.mark.slow  # importing OpenDP takes six seconds


@pytest.fixture(scope="module")
def dp() -> Any:
    opendp = pytest.importorskip("opendp.prelude", reason="OpenDP is in the extra 'oracles'")
    opendp.enable_features("contrib", "idealized-numerics")
    return opendp


def level(name: str, scale: float, **keys: object) -> float:
    """Of one release with noise of this scale, as the policy accounts for it."""
    policy = named_policy(name, {"noise": scale, **keys})
    assert isinstance(policy, NoisyPolicy)
    return policy.unit(FACTS) / scale


def scores(dp: Any, metric: Any) -> tuple[Any, Any]:
    return dp.vector_domain(dp.atom_domain(T=float, nan=False)), metric


@pytest.mark.parametrize("scale", [0.3, 3.5])
@pytest.mark.parametrize(("name", "moves"), [("model", FACTS.sensitivity), ("logits", CHANGE), ("votes", math.sqrt(2))])
def test_normal_noise_has_opendps_zcdp(dp: Any, name: str, moves: float, scale: float) -> None:
    """mu-GDP is mu^2 / 2-zCDP. OpenDP rounds up; its epsilon from zCDP is above the exact one."""
    rho = dp.m.make_gaussian(*scores(dp, dp.l2_distance(T=float)), scale=scale).map(moves)
    mu = level(name, scale)
    assert rho == pytest.approx(mu**2 / 2, rel=1e-9)
    exact = answer_guarantee(AnswerRelease("gaussian", mu, 20, 1e-5)).epsilon
    assert exact is not None and exact <= zcdp_epsilon(20 * rho, 1e-5)


@pytest.mark.parametrize("scale", [0.3, 3.5])
@pytest.mark.parametrize(
    ("name", "keys", "moves"), [("label", {}, CHANGE / math.sqrt(2)), ("votes", {"distribution": "laplace"}, 1.0)]
)
def test_the_exponential_mechanism_has_opendps_figures(
    dp: Any, name: str, keys: dict[str, object], moves: float, scale: float
) -> None:
    """Logits whose differences move by sqrt(2) Delta R are, up to a shift, logits that move by half of that each."""
    space = scores(dp, dp.linf_distance(T=float))
    epsilon = level(name, scale, **keys)
    assert dp.m.make_noisy_max(*space, dp.max_divergence(), scale=scale).map(moves) == pytest.approx(epsilon, rel=1e-9)
    rho = dp.m.make_noisy_max(*space, dp.zero_concentrated_divergence(), scale=scale).map(moves)
    assert rho == pytest.approx(epsilon**2 / 8, rel=1e-9)
    ours = answer_guarantee(AnswerRelease("range", epsilon, 100, 1e-5)).epsilon
    assert ours is not None and ours <= zcdp_epsilon(100 * rho, 1e-5) * (1 + 1e-9)


def test_a_noisy_confidence_has_opendps_epsilon(dp: Any) -> None:
    """Half of an answer of a label and its confidence is Laplace noise on log-odds."""
    change = math.sqrt(2) * CHANGE
    noise = dp.m.make_laplace(dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float), scale=0.7)
    assert 2 * noise.map(change) == pytest.approx(level("label-confidence", 0.7), rel=1e-9)


def test_drawn_labels_are_like_opendps_noisy_maximum(dp: Any) -> None:
    """Gumbel noise on scores is the exponential mechanism; two samples of one law, chi-squared."""
    row, scale, count = [0.3, -0.2, 1.1, 0.0], 0.8, 4000
    measured = dp.m.make_noisy_max(
        *scores(dp, dp.linf_distance(T=float)), dp.zero_concentrated_divergence(), scale=scale
    )
    theirs = np.bincount([measured(row) for _ in range(count)], minlength=4)
    streams = [np.random.default_rng([3, number]) for number in range(count)]
    answers = named_policy("label", {"noise": scale}).answer(np.tile(row, (count, 1)), Draws(scale, streams))
    ours = np.bincount(answers.labels, minlength=4)
    assert stats.chi2_contingency([theirs, ours]).pvalue > ONE_IN_TEN_THOUSAND


@pytest.mark.usefixtures("dp")
@pytest.mark.parametrize("scale", [0.3, 40.0])
def test_exact_noise_has_the_laws_that_are_accounted_for(scale: float) -> None:
    """Each number by Kolmogorov and Smirnov's test, against scipy; the same number twice has other noise."""
    draws, count = ExactDraws(scale, facts=FACTS), 1500
    normal = draws.spread("gaussian", np.full((count, 2, 2), 5.0)) - 5.0
    assert stats.kstest(normal.ravel(), stats.norm(0, scale).cdf).pvalue > ONE_IN_TEN_THOUSAND
    laplace = draws.laplace(np.full(count, -1.0)) + 1.0
    assert stats.kstest(laplace, stats.laplace(scale=scale).cdf).pvalue > ONE_IN_TEN_THOUSAND
    row = np.array([0.3, -0.2, 1.1, 0.0]) * scale
    counts = np.bincount(draws.named(np.tile(row, (4000, 1))), minlength=4)
    assert stats.chisquare(counts, 4000 * special.softmax(row / scale)).pvalue > ONE_IN_TEN_THOUSAND
    assert len(np.unique(normal)) == normal.size and len(np.unique(laplace)) == count


@pytest.mark.usefixtures("dp")
@pytest.mark.parametrize(
    ("name", "keys"),
    [("model", {}), ("logits", {}), ("label", {}), ("label-confidence", {}), ("votes", {}),
     ("votes", {"distribution": "laplace"})],
)  # fmt: skip
def test_who_draws_the_noise_changes_no_figure_and_no_law(name: str, keys: dict[str, object]) -> None:
    """Labels of two policies that differ in who draws, chi-squared; what is proven is the same to the last bit."""
    seeded, exact = (named_policy(name, {"noise": 0.8, "randomness": by, **keys}) for by in ("seeded", "opendp"))
    assert (seeded.repeats_noise, exact.repeats_noise) == (True, False)
    assert seeded.guarantee(FACTS, 20, 1e-5, LEDGER) == exact.guarantee(FACTS, 20, 1e-5, LEDGER)
    row = np.array([0.9, 0.1, 1.3, 0.0])
    labels = []
    for policy in (seeded, exact):
        every = [policy.draws_of(0.8, [np.random.default_rng([4, number])], FACTS) for number in range(1000)]
        # Weights of one feature, which is 1, are logits.
        rows = (
            policy.released(row[:, None], each).T if isinstance(policy, HeadPolicy) else row[None] for each in every
        )
        answers = [policy.answer(rows, draws).labels for rows, draws in zip(rows, every, strict=True)]
        labels.append(np.bincount(np.concatenate(answers), minlength=4))
    assert stats.chi2_contingency(labels).pvalue > ONE_IN_TEN_THOUSAND


def test_opendp_is_asked_for_what_it_draws_only() -> None:
    for name in ("model", "logits"):
        with pytest.raises(InputError, match="density falls with a vector's length, which OpenDP does not draw"):
            named_policy(name, {"noise": 1.0, "distribution": "laplace", "randomness": "opendp"})
    with pytest.raises(InputError, match="randomness = 'openssl': allowed: seeded, opendp"):
        named_policy("label", {"noise": 1.0, "randomness": "openssl"})
