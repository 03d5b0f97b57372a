"""The largest probabilities only: a heuristic."""

from typing import Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.core.settings import Integer
from fedpriv.service.policies import POLICIES, AnswerPolicy, Draws, Scores, softmax


@POLICIES.register
class Top(AnswerPolicy):
    """Those of the likeliest classes, exactly; of the others nothing is shown (NaN)."""

    name: ClassVar[str] = "top"
    title: ClassVar[str] = "the largest probabilities"
    argument: ClassVar[str] = "kept"

    kept: Annotated[Integer, Field(ge=1, le=10_000)] = Field(1, description="top: how many probabilities are shown")

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        import numpy as np

        labels = scores.argmax(axis=1)
        if self.kept >= scores.shape[1]:
            return Answers(labels, softmax(scores))
        shown = softmax(scores)
        hidden = np.argsort(-shown, axis=1, kind="stable")[:, self.kept :]
        np.put_along_axis(shown, hidden, np.nan, axis=1)
        return Answers(labels, shown)
