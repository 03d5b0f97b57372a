"""Answers of the run's network: exact, by heuristics that prove nothing, or of a network that is private itself."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.core.errors import InputError
from fedpriv.core.settings import Integer
from fedpriv.service.policies import POLICIES, AnswerPolicy, Draws, Facts, Scores, softmax

if TYPE_CHECKING:
    from fedpriv.core.records import Guarantee, Ledger


@POLICIES.register
class Exact(AnswerPolicy):
    """Nothing is held back; what the answers leak is what attacks find."""

    name: ClassVar[str] = "none"
    title: ClassVar[str] = "exact probabilities"

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        return Answers(scores.argmax(axis=1), softmax(scores))


@POLICIES.register
class LabelOnly(AnswerPolicy):
    """The likeliest class and nothing else; attacks by labels alone are weaker, and not impossible."""

    name: ClassVar[str] = "label-only"
    title: ClassVar[str] = "exact labels"
    labels_only: ClassVar[bool] = True

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        return Answers(scores.argmax(axis=1))


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

        shown = softmax(scores)
        hidden = np.argsort(-shown, axis=1, kind="stable")[:, self.kept :]
        np.put_along_axis(shown, hidden, np.nan, axis=1)
        return Answers(scores.argmax(axis=1), shown)


@POLICIES.register
class PostProcessing(Exact):
    """What is proven about the answers, however many, is what the run's ledger proves about the network."""

    name: ClassVar[str] = "post-processing"
    title: ClassVar[str] = "answers of a privately trained network"
    reference: ClassVar[str] = "Dwork and Roth: The Algorithmic Foundations of Differential Privacy, 2014, Prop. 2.1"

    @override
    def check(self, ledger: "Ledger") -> None:
        if ledger.worst.epsilon is None:
            raise InputError(
                f"service.method = {self.name!r} needs a run that is private itself, and its ledger proves nothing: "
                f"{ledger.worst.theorem['epsilon']}"
            )

    @override
    def guarantee(self, facts: Facts, answers: int, delta: float, ledger: "Ledger") -> "Guarantee":
        return ledger.worst.guarantee
