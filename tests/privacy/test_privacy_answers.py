"""A distinguishing game on neighbours, for every answer policy that claims an epsilon.

Two neighbouring heads answer one question; the adversary knows both and has to tell from one answer which it was. Right
noise is never refuted, half of it always is. Each game is wrong with probability 0.001 at most.
"""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special

from fedpriv.attacks.epsilon import gaussian_epsilon, trials_epsilon
from fedpriv.attacks.questions import Answers
from fedpriv.core.records import Guarantee, Ledger, LedgerLine
from fedpriv.models.machinery.convex import Objective, minimised
from fedpriv.service.policies import POLICIES, Draws, Facts, HeadPolicy, NoisyPolicy, Scores
from fedpriv.service.proof import head_sensitivity
from tests.service.named import named_policy

CONFIDENCE = 0.999
DELTA = 1e-5
TRIALS = 2000  # of each neighbour
CLASSES = 10
LEDGER = Ledger.of("example", "none", {}, [LedgerLine.of(0, 1, Guarantee("", "", 1, None, None, None, DELTA, {}, ()))])
PROVEN = sorted(name for name, kind in POLICIES.items() if issubclass(kind, HeadPolicy))
CASES = [(name, "gaussian") for name in PROVEN] + [("model", "laplace"), ("logits", "laplace")]


def policy_of(name: str, distribution: str, **keys: object) -> HeadPolicy:
    settings = {"distribution": distribution} if "distribution" in POLICIES[name].model_fields else {}
    policy = named_policy(name, {**settings, **keys})
    assert isinstance(policy, HeadPolicy)
    return policy


def answered(policy: HeadPolicy, weights: Scores, question: NDArray[np.float64], scale: float, side: int) -> Answers:
    """Independent answers, each with noise of its own also where one noisy model serves all."""
    streams = [np.random.default_rng([side, number]) for number in range(TRIALS)]
    if policy.once:
        released = (policy.released(weights, Draws(scale, [stream])) @ question for stream in streams)
        return policy.answer(np.stack(list(released)), Draws(scale))
    return policy.answer(np.tile(weights @ question, (TRIALS, 1)), Draws(scale, streams))


def scores_of(answers: Answers, one: Scores, other: Scores, scale: float) -> NDArray[np.float64]:
    """How much more an answer speaks for the other head; its log-likelihood ratio, but for noise on all logits."""
    rows, labels, shown = np.arange(TRIALS), answers.labels, answers.probabilities
    drawn = np.log(special.softmax(other / scale)) - np.log(special.softmax(one / scale))
    if shown is None:
        return np.asarray(drawn[labels])
    if np.isnan(shown).any():
        seen = special.logit(shown[rows, labels])
        far = np.abs(seen - odds(one)[labels]) - np.abs(seen - odds(other)[labels])
        return np.asarray(drawn[labels] + far / scale)
    shift = other - one
    return np.asarray(np.log(shown[:, int(shift.argmax())]) - np.log(shown[:, int(shift.argmin())]))


def odds(logits: Scores) -> NDArray[np.float64]:
    return np.asarray(special.logit(special.softmax(logits)))


def refuted(
    policy: HeadPolicy, facts: Facts, one: Scores, other: Scores, question: NDArray[np.float64], noise: float
) -> bool:
    """Whether the epsilon that is claimed of one answer is refuted, with so much of the noise."""
    delta = DELTA if policy.law == "gaussian" else 0.0
    claimed = policy.guarantee(facts, 1, delta, LEDGER).epsilon
    assert claimed is not None
    scale = noise * policy.scale(facts, 1, delta)
    logits = one @ question, other @ question
    both = [answered(policy, weights, question, scale, side) for side, weights in enumerate((one, other))]
    scores = np.concatenate([scores_of(answers, *logits, scale) for answers in both])
    # What is claimed of normal noise is a curve; far out in its tail, at this delta, no number of trials sees it.
    bound = gaussian_epsilon if policy.law == "gaussian" else trials_epsilon
    return bound(scores, np.repeat([False, True], TRIALS), delta, CONFIDENCE).epsilon > claimed


def worst_case() -> tuple[Facts, Scores, Scores]:
    """Heads that differ by all that is proven, on two classes with opposite signs."""
    facts = Facts(CLASSES, sensitivity=0.2, norm=1.0, features=2)
    one = np.zeros((CLASSES, 2))
    one[:2, 0] = 8.0  # all lies between the two classes that move
    other = one.copy()
    other[:2, 0] += 0.2 / math.sqrt(2) * np.array([1, -1])
    return facts, one, other


@pytest.mark.parametrize(("name", "distribution"), CASES)
def test_right_noise_is_not_refuted_and_half_of_it_is(name: str, distribution: str) -> None:
    facts, one, other = worst_case()
    if name in ("model", "logits") and distribution == "laplace":
        # All of the pure figure is reached far out along the direction of the change only: few dimensions.
        facts = Facts(2, sensitivity=0.2, norm=1.0, features=2)
        one, other = one[:2], other[:2]
    policy = policy_of(name, distribution, target_epsilon=2.0)
    question = np.array([1.0, 0.0])
    assert not refuted(policy, facts, one, other, question, noise=1.0)
    assert refuted(policy, facts, one, other, question, noise=0.5)


@pytest.mark.parametrize(("name", "distribution"), CASES)
def test_heads_of_neighbouring_data_are_not_told_apart_more_than_is_claimed(name: str, distribution: str) -> None:
    """An example turned round moves the head by two thirds of what is proven, and a quarter of the noise is refuted."""
    features = np.array([[1.0], [1.0]])
    turned = np.array([[-1.0], [1.0]])
    labels = np.array([0, 1])
    heads = [minimised(Objective(rows, labels, CLASSES, 50.0), 1.0, 1e-8).weights for rows in (features, turned)]
    facts = Facts(CLASSES, head_sensitivity(1.0, 50.0, 2, 1e-8), 1.0, 1)
    assert np.linalg.norm(heads[1] - heads[0]) == pytest.approx(0.67 * facts.sensitivity, rel=0.02)
    policy = policy_of(name, distribution, target_epsilon=2.0, regularisation=50.0)
    question = np.array([1.0])
    assert not refuted(policy, facts, *heads, question, noise=1.0)
    if policy.law == "gaussian":
        assert refuted(policy, facts, *heads, question, noise=0.25)


@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
def test_one_vote_is_not_told_more_than_is_claimed(distribution: str) -> None:
    """Two classes with all votes, of which one changes sides."""
    policy = named_policy("votes", {"target_epsilon": 2.0, "distribution": distribution})
    assert isinstance(policy, NoisyPolicy)
    facts = Facts(2, models=20)
    delta = DELTA if distribution == "gaussian" else 0.0
    claimed = policy.guarantee(facts, 1, delta, LEDGER).epsilon
    assert claimed == pytest.approx(2.0)
    for noise, told in ((1.0, False), (0.5, True)):
        scale = noise * policy.scale(facts, 1, delta)
        scores = []
        for side, counts in enumerate(([10.0, 10.0], [9.0, 11.0])):
            streams = [np.random.default_rng([side, number]) for number in range(TRIALS)]
            answers = policy.answer(np.tile(np.array(counts), (TRIALS, 1)), Draws(scale, streams))
            scores.append(answers.labels.astype(float))
        bound = gaussian_epsilon if distribution == "gaussian" else trials_epsilon
        found = bound(np.concatenate(scores), np.repeat([False, True], TRIALS), delta, CONFIDENCE)
        assert (found.epsilon > claimed) == told


def test_every_policy_that_claims_an_epsilon_plays() -> None:
    """Without noise of its own none claims any, but for the run's own: mechanisms play in test_privacy_mechanisms."""
    noisy = {name for name, kind in POLICIES.items() if issubclass(kind, NoisyPolicy)}
    assert noisy - {name for name, _ in CASES} == {"votes"}
    proven = Ledger.of("example", "x", {}, [LedgerLine.of(0, 1, Guarantee("", "", 1, None, 1.0, 1.0, DELTA, {}, ()))])
    others = {name: named_policy(name).guarantee(Facts(CLASSES), 1, DELTA, proven) for name in POLICIES.keys() - noisy}
    assert {name for name, found in others.items() if found.epsilon is not None} == {"post-processing"}
