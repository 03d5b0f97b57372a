"""Every probability of a network whose training was private: the answers are post-processing of it."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.core.errors import InputError
from fedpriv.service.policies import POLICIES, AnswerPolicy, Draws, Facts, Scores, softmax

if TYPE_CHECKING:
    from fedpriv.core.records import Guarantee, Ledger


@POLICIES.register
class PostProcessing(AnswerPolicy):
    """What is proven about the answers, however many, is what the run's ledger proves about the network."""

    name: ClassVar[str] = "post-processing"
    title: ClassVar[str] = "answers of a privately trained network"
    reference: ClassVar[str] = "Dwork and Roth: The Algorithmic Foundations of Differential Privacy, 2014, Prop. 2.1"

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        return Answers(scores.argmax(axis=1), softmax(scores))

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
