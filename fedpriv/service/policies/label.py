"""The label of the convex model, drawn by the exponential mechanism (McSherry and Talwar 2007)."""

import math
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.service.policies import POLICIES, DrawnPolicy, Draws, Facts, HeadPolicy, Scores

if TYPE_CHECKING:
    from fedpriv.service.proof import Law


@POLICIES.register
class DrawnLabel(DrawnPolicy, HeadPolicy):
    """Class v with probability proportional to exp(z_v / temperature).

    With d the change of the logits, |d| <= Delta R, the log ratio of two probabilities ranges over at most
    (max d - min d) / temperature <= sqrt(2) Delta R / temperature.
    """

    name: ClassVar[str] = "label"
    title: ClassVar[str] = "labels drawn by the exponential mechanism"
    reference: ClassVar[str] = "McSherry and Talwar: Mechanism Design via Differential Privacy, FOCS 2007"
    draws: ClassVar[bool] = True
    labels_only: ClassVar[bool] = True

    @property
    @override
    def law(self) -> "Law":
        return "range"

    @override
    def unit(self, facts: Facts) -> float:
        return math.sqrt(2) * facts.sensitivity * facts.norm

    @override
    def theorem(self) -> str:
        return "exponential mechanism on logits whose differences move by at most sqrt(2) Delta R"

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        return Answers(draws.named(scores))
