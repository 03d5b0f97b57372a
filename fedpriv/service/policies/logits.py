"""Noise on the logits of each answer of the convex model."""

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.service.policies import POLICIES, Draws, Facts, Scores, VectorPolicy, on_grid, softmax

if TYPE_CHECKING:
    from fedpriv.core.records import Guarantee, Ledger


@POLICIES.register
class NoisyLogits(VectorPolicy):
    """Under normal noise, weights with as much noise on each logit would do for all answers; a note says so."""

    name: ClassVar[str] = "logits"
    title: ClassVar[str] = "noise on the logits of each answer"
    reference: ClassVar[str] = "van der Maaten and Hannun: The Trade-Offs of Private Prediction, 2020"
    draws: ClassVar[bool] = True

    @override
    def unit(self, facts: Facts) -> float:
        return facts.sensitivity * facts.norm

    @override
    def theorem(self) -> str:
        return "noise on logits that move by at most Delta R in length, of a strongly convex model"

    @override
    def guarantee(self, facts: Facts, answers: int, delta: float, ledger: "Ledger") -> "Guarantee":
        from fedpriv.core.records import shown_epsilon
        from fedpriv.service.proof import answer_guarantee, model_break_even

        proven = super().guarantee(facts, answers, delta, ledger)
        if self.law == "pure":
            known = model_break_even(facts.classes, facts.features)
            note = f"from {known:.1f} answers on, noise on the model is smaller for the same pure epsilon"
            return replace(proven, notes=(note,))
        level = self.unit(facts) / self.scale(facts, answers, delta)
        once = answer_guarantee(self.release(facts, 1, delta, level)).epsilon
        shown = "nothing" if once is None else f"epsilon {shown_epsilon(once)}"
        note = f"weights with as much noise on each logit (method = model) prove {shown} for any number of answers"
        return replace(proven, notes=(note,))

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        noisy = on_grid(draws.spread(self.distribution, scores), draws.scale)
        return Answers(noisy.argmax(axis=1), softmax(noisy))
