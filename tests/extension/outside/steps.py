"""An answer policy of somebody else: probabilities in equal steps."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from fedpriv.attacks.questions import Answers
from fedpriv.core.settings import Count
from fedpriv.service.policies import AnswerPolicy, Draws, Scores, softmax


class Steps(AnswerPolicy):
    """Shows how many whole steps a probability has."""

    name: ClassVar[str] = "steps"
    title: ClassVar[str] = "probabilities in steps"
    argument: ClassVar[str] = "count"

    count: Count = Field(4, description="steps: from 0 to 1")

    def answer(self, scores: Scores, draws: Draws) -> Answers:
        shown = np.floor(softmax(scores) * self.count) / self.count
        return Answers(shown.argmax(axis=1), shown)
