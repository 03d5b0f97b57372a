"""The network's label and nothing else: a heuristic, since a label without noise proves nothing."""

from typing import ClassVar

from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.service.policies import POLICIES, AnswerPolicy, Draws, Scores


@POLICIES.register
class LabelOnly(AnswerPolicy):
    """The likeliest class; attacks by labels alone are weaker, and not impossible."""

    name: ClassVar[str] = "label-only"
    title: ClassVar[str] = "exact labels"
    labels_only: ClassVar[bool] = True

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        return Answers(scores.argmax(axis=1))
