"""Every probability, as the network computes it."""

from typing import ClassVar

from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.service.policies import POLICIES, AnswerPolicy, Draws, Scores, softmax


@POLICIES.register
class Exact(AnswerPolicy):
    """Nothing is held back; what the answers leak is what attacks find."""

    name: ClassVar[str] = "none"
    title: ClassVar[str] = "exact probabilities"

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        return Answers(scores.argmax(axis=1), softmax(scores))
