"""What policies draw, against the laws that their guarantees rest on."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import special, stats

from fedpriv.accounting.convex_models import ClaimedSensitivity
from fedpriv.attacks.scene import exact_logits
from fedpriv.core.errors import InputError
from fedpriv.core.records import Guarantee, Ledger, LedgerLine
from fedpriv.mechanisms.model_noise import spread_noise
from fedpriv.service.policies import Draws, Facts, HeadPolicy, NoisyPolicy, Scores
from fedpriv.service.proof import calibrated_level
from tests.service.named import named_policy

FACTS = Facts(classes=4, sensitivity=0.1, norm=1.0, features=20)
DELTA = 1e-5
ONE_IN_TEN_THOUSAND = 1e-4  # false alarms of each statistical test here
LEDGER = Ledger.of("example", "none", {}, [LedgerLine.of(0, 1, Guarantee("", "", 1, None, None, None, DELTA, {}, ()))])


def draws(count: int, scale: float, facts: Facts | None = None) -> Draws:
    return Draws(scale, [np.random.default_rng([7, number]) for number in range(count)], facts)


def repeated(row: list[float], count: int) -> Scores:
    return np.tile(np.array(row), (count, 1))


def test_drawn_labels_have_the_exponential_mechanisms_law() -> None:
    row = [0.3, -0.2, 1.1, 0.0]
    answers = named_policy("label", {"noise": 0.4}).answer(repeated(row, 20_000), draws(20_000, 0.4))
    expected = 20_000 * special.softmax(np.array(row) / 0.4)
    counts = np.bincount(answers.labels, minlength=4)
    assert stats.chisquare(counts, expected).pvalue > ONE_IN_TEN_THOUSAND
    assert answers.probabilities is None


def test_noise_of_pure_epsilon_has_a_gamma_length_and_any_direction() -> None:
    stream = np.random.default_rng(5)
    noise = np.stack([spread_noise("laplace", 0.3, (6,), stream) for _ in range(4000)])
    lengths = np.linalg.norm(noise, axis=1)
    assert stats.kstest(lengths, stats.gamma(6, scale=0.3).cdf).pvalue > ONE_IN_TEN_THOUSAND
    along = noise[:, 0] / lengths  # (1 + x) / 2 is Beta((d - 1) / 2, (d - 1) / 2)
    assert stats.kstest((1 + along) / 2, stats.beta(2.5, 2.5).cdf).pvalue > ONE_IN_TEN_THOUSAND
    normal = np.concatenate([spread_noise("gaussian", 0.3, (6,), stream) for _ in range(4000)])
    assert stats.kstest(normal, stats.norm(0, 0.3).cdf).pvalue > ONE_IN_TEN_THOUSAND


def test_one_confidence_is_shown_and_has_laplace_noise() -> None:
    row = np.array([0.3, -0.2, 1.1, 0.0])
    answers = named_policy("label-confidence", {"noise": 0.5}).answer(repeated(row.tolist(), 8000), draws(8000, 0.5))
    shown = answers.probabilities
    assert shown is not None and (np.isfinite(shown).sum(axis=1) == 1).all()
    assert (np.nanargmax(shown, axis=1) == answers.labels).all()
    odds = special.logit(special.softmax(row))
    noise = special.logit(np.nanmax(shown, axis=1)) - odds[answers.labels]
    assert stats.kstest(noise, stats.laplace(scale=0.5).cdf).pvalue > ONE_IN_TEN_THOUSAND


def test_noisy_logits_scatter_as_said() -> None:
    answers = named_policy("logits", {"noise": 0.2}).answer(repeated([1.0, 0.0, 0.0, 0.0], 4000), draws(4000, 0.2))
    assert answers.probabilities is not None
    difference = np.log(answers.probabilities[:, 0]) - np.log(answers.probabilities[:, 1])
    assert stats.kstest(difference, stats.norm(1, 0.2 * math.sqrt(2)).cdf).pvalue > ONE_IN_TEN_THOUSAND
    assert (answers.probabilities.argmax(axis=1) == answers.labels).all()


@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
def test_the_last_bits_of_noise_leave_nothing_of_what_it_was_added_to(distribution: str) -> None:
    """Sums in float64 lie on the grid of the larger number, which tells 5 from 0; rounded ones are alike."""
    scale, step = 0.05, 2.0**-25
    noise = {"noise": scale, "distribution": distribution}

    def coarse(values: Scores) -> float:
        return float((np.mod(values[np.abs(values) < 8] * 2.0**51, 1) == 0).mean())

    low = np.stack([spread_noise(distribution, scale, (4,), each) for each in draws(500, 1).generators])
    assert coarse(5 + low) == 1 > 0.2 > coarse(low)
    released = [named_policy("model", noise).released(np.full((4, 4), at), draws(1, scale))
                for at in (0.0, 5.0)]  # fmt: skip
    assert [coarse(weights) for weights in released] == [1, 1]
    assert (np.mod(np.stack(released) / step, 1) == 0).all()
    assert np.abs(released[1] - released[0] - 5).max() <= step
    shown = named_policy("logits", noise).answer(repeated([0.5, 0.0, 0.0, 0.0], 500), draws(500, scale)).probabilities
    assert shown is not None
    apart = (np.log(shown[:, 0]) - np.log(shown[:, 1])) / step
    assert np.abs(apart - apart.round()).max() < 1e-5
    drawn = named_policy("label-confidence", {"noise": scale}).answer(repeated([0.1, 0.0], 500), draws(500, scale))
    assert drawn.probabilities is not None
    odds = special.logit(np.nanmax(drawn.probabilities, axis=1)) / step
    assert np.abs(odds - odds.round()).max() < 1e-5


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_no_two_logits_differ_in_a_labels_law_by_more_than_is_claimed(epsilon: float) -> None:
    """Random changes of length Delta R, and the worst one, which puts it on two logits with opposite signs."""
    policy = named_policy("label", {"noise": FACTS.sensitivity * math.sqrt(2) / epsilon})
    temperature = policy.scale(FACTS, 1, DELTA)
    stream, largest = np.random.default_rng(3), 0.0
    changes = stream.normal(size=(500, 4))
    changes[0] = [1, -1, 0, 0]
    for change in 0.1 * changes / np.linalg.norm(changes, axis=1, keepdims=True):
        row = 3 * stream.normal(size=4)
        ratio = special.log_softmax((row + change) / temperature) - special.log_softmax(row / temperature)
        assert np.abs(ratio).max() <= epsilon + 1e-9
        # Bounded range, which composition rests on, is stronger.
        largest = max(largest, float(np.ptp(ratio)))
    assert epsilon * 0.999 < largest <= epsilon + 1e-9


@pytest.mark.parametrize("name", ["model", "logits", "label", "label-confidence"])
@pytest.mark.parametrize("target", [0.5, 3.0])
def test_noise_is_calibrated_to_what_is_claimed(name: str, target: float) -> None:
    policy = named_policy(name, {"target_epsilon": target})
    assert isinstance(policy, HeadPolicy) and policy.source == "head"
    found = policy.guarantee(FACTS, 50, DELTA, LEDGER)
    assert found.epsilon is not None and 0.999 * target < found.epsilon <= target * (1 + 1e-9)
    again = named_policy(name, {"noise": policy.scale(FACTS, 50, DELTA)}).guarantee(FACTS, 50, DELTA, LEDGER)
    assert again.epsilon == pytest.approx(found.epsilon)
    assert found.adjacency == FACTS.adjacency and found.nominal_epsilon is None


def test_one_noisy_model_serves_any_number_and_dominates_noisy_logits() -> None:
    """Weights with noise of 0.5 give each logit noise of 0.5 R, which is what one answer's logits get here."""
    facts = replace(FACTS, norm=2.0)
    model, logits = named_policy("model", {"noise": 0.5}), named_policy("logits", {"noise": 0.5 * facts.norm})
    once, many = (model.guarantee(facts, count, DELTA, LEDGER) for count in (1, 10_000))
    assert once == many
    each = logits.guarantee(facts, 100, DELTA, LEDGER)
    assert once.epsilon is not None and each.epsilon is not None and each.epsilon > 5 * once.epsilon
    said = f"weights with as much noise on each logit (method = model) prove epsilon {once.epsilon:.4g} for any number"
    assert each.notes == (f"{said} of answers",)
    pure = named_policy("logits", {"noise": 0.5, "distribution": "laplace"}).guarantee(FACTS, 100, 0.0, LEDGER)
    assert pure.pure_epsilon == pure.epsilon == pytest.approx(100 * 0.1 / 0.5)
    assert pure.notes[0].startswith("from 4.0 answers on")


def test_heuristics_prove_nothing() -> None:
    for text in ("none", "rounded:2", "top:1", "label-only"):
        found = named_policy(text).guarantee(FACTS, 10, DELTA, LEDGER)
        assert (found.nominal_epsilon, found.pure_epsilon, found.epsilon) == (None, None, None)
        assert set(found.theorem.values()) == {"no theorem stands for this heuristic"}


def test_rounded_answers_are_no_differential_privacy() -> None:
    """Models as near as one likes give answers of which each gives one alone: no epsilon is finite."""
    draws = Draws()
    below, above = (np.log([[0.125 + step, 0.875 - step]]) for step in (-1e-9, 1e-9))
    one, two = (named_policy("rounded:2").answer(scores, draws).probabilities for scores in (below, above))
    assert one is not None and two is not None
    assert one[0, 0] == 0.12 and two[0, 0] == 0.13


CLAIMED = Facts(classes=30, claimed=ClaimedSensitivity(446, 128, 30, 1200, 0.0005))


@pytest.mark.parametrize(("distribution", "share"), [("gaussian", 11), ("laplace", 61)])
@pytest.mark.parametrize("epsilon", [0.01, 1.0])
def test_two_answers_of_the_paper_give_the_exact_vector(epsilon: float, distribution: str, share: int) -> None:
    """Unless both answers drew the same class, so for 1 - 1/C of the questions, however much noise one score has."""
    policy = named_policy("paper", {"epsilon_each": epsilon, "distribution": distribution})
    logits = 3 * np.random.default_rng(0).normal(size=(1000, 30))
    scale = policy.scale(CLAIMED, 1, DELTA)
    assert scale == pytest.approx(3.1190 * share / epsilon, rel=1e-4)
    shown = []
    for answer in range(2):
        generators = [np.random.default_rng([8, answer, number]) for number in range(1000)]
        shown.append(policy.answer(logits, Draws(scale, generators, CLAIMED)).log_probabilities)
    found = np.stack([exact_logits(one, two) for one, two in zip(*shown, strict=True)])
    errors = found - logits
    right = np.abs(errors - np.median(errors, axis=1, keepdims=True)).max(axis=1) < 1e-6
    assert right.mean() >= 0.95
    # At most as often as two draws differ, within 4 deviations.
    assert right.mean() < 29 / 30 + 4 * math.sqrt(29 / 900 / 1000)


def test_group_privacy_refutes_the_papers_claim_from_half_of_the_answers() -> None:
    """However small epsilon is, half of a right model's answers are right, and hardly any of one with shifted labels.

    If all n labels change, n epsilon bounds the logarithm of the ratio. Half, within 4 deviations: (1 - 1/C) / 2 where
    another class was drawn and its noise is negative, 1 / (2 C) where the right one was and its noise is positive.
    """
    epsilon, answers, classes = 1e-6, 1500, 30
    policy = named_policy("paper", {"epsilon_each": epsilon})
    scale, truth = policy.scale(CLAIMED, 1, DELTA), np.random.default_rng(1).integers(0, classes, answers)
    shares = []
    for shift in (0, 1):
        logits = 8.0 * np.eye(classes)[(truth + shift) % classes]
        generators = [np.random.default_rng([9, shift, number]) for number in range(answers)]
        right = (policy.answer(logits, Draws(scale, generators, CLAIMED)).labels == truth).mean()
        shares.append(float(right))
    assert abs(shares[0] - 0.5) < 4 * math.sqrt(0.25 / answers) and shares[1] < 0.05
    assert math.log(shares[0] / shares[1]) > 1200 * epsilon + 2


def test_the_papers_figure_is_nominal_and_its_formulas_are_for_one_hidden_layer() -> None:
    found = named_policy("paper", {"epsilon_each": 0.1}).guarantee(CLAIMED, 7, DELTA, LEDGER)
    assert (found.nominal_epsilon, found.pure_epsilon, found.epsilon) == (0.1, None, None)
    assert "all but one score leave without noise" in found.theorem["epsilon"]
    with pytest.raises(InputError, match="formulas are for networks with one hidden layer"):
        named_policy("paper").scale(FACTS, 1, DELTA)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("label", {}, "needs either target_epsilon or noise"),
        ("label", {"noise": 1, "target_epsilon": 1}, "needs either target_epsilon or noise"),
        ("model", {"noise": 1, "delta": 0}, "normal noise proves nothing at delta = 0"),
        ("paper", {"target_epsilon": 1}, "target_epsilon"),
        ("model", {"noise": 1, "features": "run"}, "features"),
        ("model", {"noise": 1, "regularisation": 0}, "regularisation = 0: allowed is above 0"),
    ],
)
def test_settings_that_prove_nothing_are_refused(name: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        named_policy(name, settings)


def test_calibration_is_the_accountings() -> None:
    policy = named_policy("label", {"target_epsilon": 1.0})
    assert isinstance(policy, NoisyPolicy)
    level = calibrated_level(policy.release(FACTS, 30, DELTA, 0.0), 1.0)
    assert policy.scale(FACTS, 30, DELTA) == policy.unit(FACTS) / level
