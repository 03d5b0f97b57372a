"""Answers of the certified convex head with noise: on its weights once, on each answer, or in what is drawn."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.service.policies import (
    POLICIES,
    DrawnPolicy,
    Draws,
    Facts,
    HeadPolicy,
    Scores,
    VectorPolicy,
    on_grid,
    softmax,
)

if TYPE_CHECKING:
    from fedpriv.core.records import Guarantee, Ledger
    from fedpriv.service.proof import Law


@POLICIES.register
class NoisyModel(VectorPolicy):
    """The model itself could be handed out (Wu et al. 2017): any number of its answers cost no more than it."""

    name: ClassVar[str] = "model"
    title: ClassVar[str] = "a convex model with noise on its weights"
    reference: ClassVar[str] = (
        "Chaudhuri, Monteleoni and Sarwate: Differentially Private Empirical Risk Minimization, JMLR 2011"
    )
    once: ClassVar[bool] = True

    @override
    def unit(self, facts: Facts) -> float:
        return facts.sensitivity

    @override
    def theorem(self) -> str:
        return "noise on the weights of a strongly convex model (Chaudhuri et al. 2011), answers are post-processing"

    @override
    def released(self, weights: Scores, draws: Draws) -> Scores:
        return on_grid(draws.spread(self.distribution, weights[None])[0], draws.scale)

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        return Answers(scores.argmax(axis=1), softmax(scores))


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


@POLICIES.register
class DrawnLabel(DrawnPolicy, HeadPolicy):
    """Class v with probability proportional to exp(z_v / temperature).

    With d the change of the logits, |d| <= Delta R, the log ratio of two probabilities ranges over at most
    (max d - min d) / temperature <= sqrt(2) Delta R / temperature.
    """

    name: ClassVar[str] = "label"
    title: ClassVar[str] = "labels drawn by the exponential mechanism"
    reference: ClassVar[str] = "McSherry and Talwar: Mechanism Design via Differential Privacy, FOCS 2007"
    draws: ClassVar[bool] = True
    labels_only: ClassVar[bool] = True

    @property
    @override
    def law(self) -> "Law":
        return "range"

    @override
    def unit(self, facts: Facts) -> float:
        return math.sqrt(2) * facts.sensitivity * facts.norm

    @override
    def theorem(self) -> str:
        return "exponential mechanism on logits whose differences move by at most sqrt(2) Delta R"

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        return Answers(draws.named(scores))


@POLICIES.register
class LabelConfidence(DrawnPolicy, HeadPolicy):
    """What the two steps of Lu et al. 2022 can prove: the label, drawn, and its confidence; nothing of other classes.

    The confidence is the logistic of the class's log-odds with Laplace noise.
    """

    name: ClassVar[str] = "label-confidence"
    title: ClassVar[str] = "drawn labels with one noisy confidence"
    draws: ClassVar[bool] = True

    @property
    @override
    def law(self) -> "Law":
        return "range-laplace"

    @override
    def unit(self, facts: Facts) -> float:
        return 2 * math.sqrt(2) * facts.sensitivity * facts.norm

    @override
    def theorem(self) -> str:
        return "half for the exponential mechanism, half for Laplace noise on log-odds that move by sqrt(2) Delta R"

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        import numpy as np
        from scipy import special

        labels = draws.named(scores)
        rows = np.arange(len(labels))
        others = scores.copy()
        others[rows, labels] = -np.inf
        odds = scores[rows, labels] - special.logsumexp(others, axis=1)
        shown = np.full(scores.shape, np.nan)
        shown[rows, labels] = special.expit(on_grid(draws.laplace(odds), draws.scale))
        return Answers(labels, shown)
