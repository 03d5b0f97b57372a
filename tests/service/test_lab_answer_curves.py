"""How often answers are right by how many there are: against each policy's own accounting, and exact answers."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.service.opening import KnownImages, answer_curves
from fedpriv.service.policies import Facts, NoisyPolicy, Scores
from tests.service.named import named_policy

FACTS = Facts(10, sensitivity=0.1, norm=1.0, features=16)
VOTES = Facts(10, models=50)


def trial(facts: Facts, scores: Scores, truth: NDArray[np.int64], delta: float = 1e-5) -> KnownImages:
    stream = np.random.default_rng(0)

    def noisy(policy: NoisyPolicy, scale: float) -> Scores:
        assert policy.once
        return np.asarray(scores + scale * stream.standard_normal(scores.shape))

    return KnownImages(facts, delta, scores, truth, noisy)


@pytest.mark.parametrize("delta", [1e-5, 0.0])
def test_all_policies_of_the_head_are_compared_at_one_epsilon(delta: float) -> None:
    """The noise of one model is the same for any number; the others end near chance. 1,000 images, 6 deviations."""
    truth = np.arange(1000) % 10
    scores = np.eye(10)[truth] * 4
    policy = named_policy("label", {"target_epsilon": 2.0, "delta": delta})
    found = answer_curves(policy, 100_000, 2.0, trial(FACTS, scores, truth, delta))
    assert [curve.policy for curve in found] == ["label", "label-confidence", "logits", "model"]
    for curve in found:
        assert [point.queries for point in curve.points] == [1, 10, 100, 1000, 100_000]
        first, last = curve.points[0].share, curve.points[-1].share
        assert first > 0.95
        # 0.1 is chance.
        assert last > 0.95 if curve.policy == "model" else last < 0.1 + 6 * 0.0095


def test_votes_are_compared_with_votes() -> None:
    truth = np.arange(400) % 10
    counts = np.eye(10)[truth] * 40
    policy = named_policy("votes", {"noise": 5.0, "shards": 50})
    (found,) = answer_curves(policy, 10, 2.0, trial(VOTES, counts, truth))
    assert found.policy == "votes" and [point.queries for point in found.points] == [1, 10, 100, 1000]
    assert found.points[0].share == 1 > found.points[-1].share


def test_where_nothing_is_proven_nothing_is_compared() -> None:
    some = trial(FACTS, np.eye(10), np.arange(10))
    assert answer_curves(named_policy("none"), 100, None, some) == ()
    assert answer_curves(named_policy("label", {"noise": 1.0}), 100, 0.0, some) == ()
