"""Probabilities rounded to a few decimals: a heuristic (Tramer et al. 2016, section 7)."""

from typing import Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.core.settings import Integer
from fedpriv.service.policies import POLICIES, AnswerPolicy, Draws, Scores, softmax


@POLICIES.register
class Rounded(AnswerPolicy):
    """The label is that of the largest rounded probability, the first of equals: it says nothing that they do not."""

    name: ClassVar[str] = "rounded"
    title: ClassVar[str] = "rounded probabilities"
    reference: ClassVar[str] = "Tramer, Zhang, Juels, Reiter and Ristenpart: Stealing Machine Learning Models, 2016"
    argument: ClassVar[str] = "decimals"

    decimals: Annotated[Integer, Field(ge=0, le=15)] = Field(2, description="rounded: decimals of each probability")

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        shown = softmax(scores).round(self.decimals)
        return Answers(shown.argmax(axis=1), shown)
