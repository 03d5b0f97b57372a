"""Noise on the convex model, once: any number of answers cost no more (Chaudhuri et al. 2011; Wu et al. 2017)."""

from typing import ClassVar

from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.service.policies import POLICIES, Draws, Facts, Scores, VectorPolicy, on_grid, softmax


@POLICIES.register
class NoisyModel(VectorPolicy):
    """The model itself could be handed out: its answers are post-processing of it."""

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
