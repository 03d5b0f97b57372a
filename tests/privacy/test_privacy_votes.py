"""The distinguishing game on neighbouring votes: halved noise is found, the right noise is not refuted.

Each game raises a false alarm with probability 2e-9 at most (``bounds.ALARM`` a limit).
"""

from dataclasses import dataclass

import numpy as np
import pytest

from fedpriv.accounting import gaussian_epsilon
from fedpriv.accounting.aggregators import Aggregator, ConfidentMax, LaplaceMax, NoisyMax
from tests.noise import stream
from tests.privacy.bounds import DELTAS, Claims, Draw, Scores, play

RUNS = 8_000


@dataclass(frozen=True)
class Poll:
    """One question about two polls that differ in one vote, and noise that is claimed and half of it."""

    right: Aggregator
    halved: Aggregator
    left_counts: tuple[int, ...]
    right_counts: tuple[int, ...]

    def draw(self, aggregator: Aggregator) -> Draw:
        generators = {side: stream(seed).numpy() for seed, side in enumerate(("left", "right"))}
        counts = {"left": self.left_counts, "right": self.right_counts}

        def answers(side: str, runs: int) -> Scores:
            found = [aggregator.decide(counts[side], generators[side]) for _ in range(runs)]
            return {
                "first class": np.array([answer == 0 for answer in found], np.float64),
                "an answer": np.array([answer is not None for answer in found], np.float64),
            }

        return answers

    @property
    def claims(self) -> Claims:
        """What is proven for the right noise of one question, answered or not."""
        spent = self.right.spent(1, 1)
        if isinstance(self.right, LaplaceMax):
            return {0.0: spent}
        return {delta: gaussian_epsilon(delta, spent) for delta in DELTAS}


POLLS = {
    "noisy maximum": Poll(NoisyMax(1.5), NoisyMax(0.75), (5, 4), (4, 5)),
    "noisy maximum of three": Poll(NoisyMax(1.5), NoisyMax(0.75), (5, 4, 0), (4, 5, 0)),
    # Far from the threshold nothing but the comparison with it tells.
    "confident, the threshold": Poll(ConfidentMax(10, 1.0, 50.0), ConfidentMax(10, 0.5, 50.0), (10, 0), (9, 1)),
    "confident, the maximum": Poll(ConfidentMax(-99, 50.0, 1.5), ConfidentMax(-99, 50.0, 0.75), (5, 4), (4, 5)),
    "Laplace": Poll(LaplaceMax(2.0), LaplaceMax(1.0), (4, 6), (3, 7)),
}


@pytest.mark.parametrize("poll", POLLS.values(), ids=POLLS)
def test_the_right_noise_is_not_refuted_and_halved_noise_is(poll: Poll) -> None:
    assert not play(poll.draw(poll.right), poll.claims, RUNS).violation
    assert play(poll.draw(poll.halved), poll.claims, RUNS).violation
