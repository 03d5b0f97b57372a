"""Membership by labels alone: how much noise on an image its right label withstands."""

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.membership.probes.answers import membership_figures, told_words
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.attacks.references import draw_game, pairs_within
from fedpriv.attacks.scene import ProbeReferee, ProbeScene
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count, Positive


@PROBES.register
class MembershipByLabels(ModelAttack):
    """Members lie farther from the boundary; no reference model, no probability, no other example is used."""

    name: ClassVar[str] = "membership-labels"
    title: ClassVar[str] = "Membership by labels alone"
    reference: ClassVar[str] = (
        "Choquette-Choo, Tramer, Carlini and Papernot: Label-Only Membership Inference Attacks, ICML 2021 (random "
        "noise); Yeom et al. 2018 (the gap)"
    )

    pairs: Count = Field(500, description="of a member and a non-member, at most")
    noisy: Count = Field(20, description="noisy images that are queried for each candidate, besides itself")
    deviation: Positive = Field(0.3, description="of their noise, pixels from 0 to 1")

    @override
    def run(self, scene: ProbeScene, referee: ProbeReferee) -> tuple[ProbeOutcome, ...]:
        endpoint, each = scene.open(), 1 + self.noisy
        game = draw_game(scene.known_training(), pairs_within(scene.budget, self.pairs, each), scene.seed)
        images, labels = game.asked()
        draws = numpy_stream(scene.seed, "probe-noisy-images")
        gap = (endpoint.ask(images).labels == labels).astype(np.float64)
        right = gap.copy()
        for _ in range(self.noisy):
            noise = torch.from_numpy(draws.normal(scale=self.deviation, size=tuple(images.shape)))
            right += endpoint.ask((images + noise).clamp(0, 1)).labels == labels
        scores = {"tolerance to noise": right, "the gap (right label)": gap}
        figures = membership_figures(scores, game.candidates.truth, scene.proven, scene.seed)
        sentence = f"{endpoint.asked} labels: {told_words(len(game.candidates.members), figures[0])}"
        return (self.outcome(endpoint.asked, figures, sentence),)
