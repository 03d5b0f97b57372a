"""Algorithm 1 of Lu et al. 2022 as published. It proves nothing: all scores but one leave without noise."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.core.errors import InputError
from fedpriv.core.settings import Epsilon, Positive
from fedpriv.service.policies import (
    DISTRIBUTION,
    POLICIES,
    REGULARISATION,
    AnswerPolicy,
    Distribution,
    Draws,
    Facts,
    Scores,
    one_a_row,
    softmax,
)

if TYPE_CHECKING:
    import numpy as np

    from fedpriv.accounting.convex_models import ClaimedSensitivity
    from fedpriv.core.records import Guarantee, Ledger


@POLICIES.register
class AsPublished(AnswerPolicy):
    """One class is drawn, noise is added to its logit alone, and the softmax of all logits goes out.

    The ratio of two other probabilities is exact, so neighbouring data sets can be told apart with certainty, whatever
    epsilon is claimed; two answers to one question mostly give the whole exact vector.
    """

    name: ClassVar[str] = "paper"
    title: ClassVar[str] = "convexified loss and one noisy neuron, as published"
    reference: ClassVar[str] = (
        "Lu, Asghar, Kaafar, Webb and Dickinson: A Differentially Private Framework for Deep Learning with Convexified "
        "Loss Functions, IEEE TIFS 2022"
    )
    draws: ClassVar[bool] = True

    epsilon_each: Epsilon = Field(1.0, description="paper: the epsilon that is claimed for an answer, and not proven")
    distribution: Distribution = DISTRIBUTION
    regularisation: Positive = REGULARISATION

    @override
    def scale(self, facts: Facts, answers: int, delta: float) -> float:
        return self._claimed(facts).logit / self._share(facts.classes)

    @override
    def guarantee(self, facts: Facts, answers: int, delta: float, ledger: "Ledger") -> "Guarantee":
        nothing = super().guarantee(facts, answers, delta, ledger)
        return replace(
            nothing,
            nominal_epsilon=self.epsilon_each,
            theorem={
                **dict.fromkeys(nothing.theorem, "with C classes all but one score leave without noise"),
                "nominal_epsilon": "claimed by the paper for one answer (Theorem 6), and refuted",
            },
            notes=(
                "the claimed sensitivities are a formula of public sizes, and no bounds",
                "the ratio of two scores without noise is exact: for three classes or more delta is 1 at any epsilon",
            ),
        )

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        import numpy as np
        from scipy.special import log_softmax

        if draws.facts is None:
            raise ValueError("Algorithm 1 needs the claimed sensitivities")
        change = self._claimed(draws.facts).probability
        preferred = self._share(scores.shape[1]) * softmax(scores) / (2 * change)
        chosen = one_a_row(softmax(preferred), draws.generators)
        noisy = scores.copy()
        noisy[np.arange(len(chosen)), chosen] += [self._noise(draws.scale, each) for each in draws.generators]
        return Answers(noisy.argmax(axis=1), softmax(noisy), log_softmax(noisy, axis=1))

    def _share(self, classes: int) -> float:
        """What each of the two steps gets of the claimed epsilon."""
        return self.epsilon_each / (2 * classes + 1 if self.distribution == "laplace" else math.sqrt(4 * classes + 1))

    def _noise(self, scale: float, generator: "np.random.Generator") -> float:
        return generator.laplace(scale=scale) if self.distribution == "laplace" else scale * generator.standard_normal()

    def _claimed(self, facts: Facts) -> "ClaimedSensitivity":
        if facts.claimed is None:
            raise InputError(
                f"service.method = {self.name!r}: the paper's formulas are for networks with one hidden layer "
                "(model.name = 'mlp' with one number in hidden)"
            )
        return facts.claimed
