"""Exact probabilities from two noisy answers to one question, where only one score of an answer has noise."""

from typing import ClassVar

import numpy as np
from pydantic import Field
from scipy.special import softmax
from typing_extensions import override

from fedpriv.attacks.intervals import rate_interval
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.attacks.scene import ProbeReferee, ProbeScene, exact_logits
from fedpriv.core.errors import InputError
from fedpriv.core.figure import Figure
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count

# Of probabilities that come from numbers in float64.
EXACT = 1e-6


@PROBES.register
class TwoAnswers(ModelAttack):
    """Asks everything twice; against noise on every score it finds nothing."""

    name: ClassVar[str] = "two-answers"
    title: ClassVar[str] = "Unmasking by two answers"
    reference: ClassVar[str] = "against Algorithm 1 of Lu et al. 2022, which adds noise to one score of an answer"

    images: Count = Field(500, description="that are asked about twice, at most")

    @override
    def refusal(self, scene: ProbeScene) -> str | None:
        if scene.labels_only or not scene.known_training().rule.draws:
            return f"{self.name} takes noise off probabilities, and this policy draws none or names labels only"
        if scene.classes < 3:
            return f"{self.name} needs three classes, two of which have no noise"
        return None

    @override
    def run(self, scene: ProbeScene, referee: ProbeReferee) -> tuple[ProbeOutcome, ...]:
        endpoint, public = scene.open(), scene.known_public()
        asked = public.images[: min(self.images, scene.budget // 2)]
        if not len(asked):
            raise InputError(f"{self.name} asks everything twice, and {scene.budget} question is answered")
        first, second = endpoint.ask(asked).log_probabilities, endpoint.ask(asked).log_probabilities
        if first is None or second is None or np.isnan(first).any():
            raise InputError(f"{self.name} needs every probability, and this policy withholds some")
        inferred = softmax(np.stack([exact_logits(*pair) for pair in zip(first, second, strict=True)]), axis=1)
        truth = referee.scores(asked).softmax(dim=1).numpy()
        hits, once = ((np.abs(shown - truth).max(axis=1) < EXACT).sum() for shown in (inferred, np.exp(first)))
        figure = Figure(
            "raw vectors recovered",
            rate_interval(int(hits), len(asked)),
            float(once) / len(asked),
            theorem="with C classes two answers draw different ones, and tell all, with probability 1 - 1/C at least",
        )
        sentence = (
            f"Two answers to one question give the exact probabilities for {figure.measured.value:.1%} of images."
        )
        return (self.outcome(endpoint.asked, (figure,), sentence),)
