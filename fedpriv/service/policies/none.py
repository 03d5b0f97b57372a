"""Every probability, as the network computes it."""

from typing import ClassVar

from typing_extensions import override

from fedpriv.core.registry import POLICIES
from fedpriv.service.policies import AnswerPolicy, Draws, Scores, softmax
from fedpriv.service.questions import Answers


@POLICIES.register
class Exact(AnswerPolicy):
    """Nothing is held back; what the answers leak is what attacks find."""

    name: ClassVar[str] = "none"
    title: ClassVar[str] = "exact probabilities"

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        return Answers(scores.argmax(axis=1), softmax(scores))
