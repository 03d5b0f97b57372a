"""The label, drawn, and one noisy confidence, nothing else: what the two steps of Lu et al. 2022 can prove."""

import math
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.service.policies import POLICIES, DrawnPolicy, Draws, Facts, HeadPolicy, Scores, on_grid

if TYPE_CHECKING:
    from fedpriv.service.proof import Law


@POLICIES.register
class LabelConfidence(DrawnPolicy, HeadPolicy):
    """The confidence is the logistic of the class's log-odds with Laplace noise; of the others nothing is shown."""

    name: ClassVar[str] = "label-confidence"
    title: ClassVar[str] = "drawn labels with one noisy confidence"
    draws: ClassVar[bool] = True

    @property
    @override
    def law(self) -> "Law":
        return "range-laplace"

    @override
    def unit(self, facts: Facts) -> float:
        return 2 * math.sqrt(2) * facts.sensitivity * facts.norm

    @override
    def theorem(self) -> str:
        return "half for the exponential mechanism, half for Laplace noise on log-odds that move by sqrt(2) Delta R"

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        import numpy as np
        from scipy import special

        labels = draws.named(scores)
        rows = np.arange(len(labels))
        others = scores.copy()
        others[rows, labels] = -np.inf
        odds = scores[rows, labels] - special.logsumexp(others, axis=1)
        shown = np.full(scores.shape, np.nan)
        shown[rows, labels] = special.expit(on_grid(draws.laplace(odds), draws.scale))
        return Answers(labels, shown)
