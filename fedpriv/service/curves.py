"""How often answers are right, under each policy that could answer from what was made, by the number of questions."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.figure import CurvePoint
from fedpriv.core.randomness import Secret
from fedpriv.service.policies import AnswerPolicy, Draws, Facts, NoisyPolicy, Scores, rivals
from fedpriv.service.records import AnswersCurve

_BUDGETS = 1, 10, 100, 1000
_LEAST, _MOST = 1e-9, 1e9  # of an epsilon that noise can be calibrated to


@dataclass(frozen=True, eq=False)
class KnownImages:
    """Images whose classes are known, and what answers to them are computed from."""

    facts: Facts  # public sizes
    delta: float  # of the statement
    scores: Scores  # (n, classes), without noise
    truth: NDArray[np.int64]  # (n,) classes
    # a policy and the scale of its noise -> scores (n, classes) of one release with that noise
    noisy: Callable[[NoisyPolicy, float], Scores]


def answer_curves(
    policy: AnswerPolicy, planned: int, epsilon: float | None, trial: KnownImages
) -> tuple[AnswersCurve, ...]:
    """Return the share of right answers by how many questions epsilon has to last for, under each rival policy."""
    if epsilon is None or not _LEAST <= epsilon <= _MOST or not isinstance(policy, NoisyPolicy):
        return ()
    budgets = sorted({*_BUDGETS, planned})
    generator = Secret.drawn().stream("curve").numpy()
    return tuple(
        AnswersCurve(
            policy=rival.name,
            points=tuple(CurvePoint(count, _right(rival, count, trial, generator)) for count in budgets),
        )
        for rival in rivals(policy, epsilon, trial.delta)
    )


def _right(policy: NoisyPolicy, count: int, trial: KnownImages, generator: np.random.Generator) -> float:
    scale = policy.scale(trial.facts, count, trial.delta)
    scores = trial.noisy(policy, scale) if policy.once else trial.scores
    answers = policy.answer(scores, Draws(scale, [generator] * len(scores), trial.facts))
    return float((answers.labels == trial.truth).mean())
