"""The network's label and nothing else: a heuristic, since a label without noise proves nothing."""

from typing import ClassVar

from typing_extensions import override

from fedpriv.core.registry import POLICIES
from fedpriv.service.policies import AnswerPolicy, Draws, Scores
from fedpriv.service.questions import Answers


@POLICIES.register
class LabelOnly(AnswerPolicy):
    """The likeliest class; attacks by labels alone are weaker, and not impossible."""

    name: ClassVar[str] = "label-only"
    title: ClassVar[str] = "exact labels"
    labels_only: ClassVar[bool] = True

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        return Answers(scores.argmax(axis=1))
