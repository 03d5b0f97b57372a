"""Attribute inference: a hidden value of a record, from its other values, its label and the model's answers.

Fredrikson et al. (2014, 2015) and Yeom, Giacomelli, Fredrikson and Jha (2018): of all values the one with the largest
prior(v) p(label | record with v). What works as well on records that nobody trained with is a fact about people, which
any good model learns; what it tells of members beyond that is a leak.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpriv.accounting.ceiling import membership_advantage
from fedpriv.attacks.intervals import rate_interval
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.attacks.questions import Questions
from fedpriv.attacks.references import draw_game, pairs_within
from fedpriv.attacks.scene import ProbeReferee, ProbeScene, Public, probabilities
from fedpriv.attacks.settings import Access
from fedpriv.core.figure import Figure, Interval
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count

_SMALLEST = 1e-12


@dataclass(frozen=True)
class Attribute:
    """A feature that is hidden, with two values."""

    pixel: int  # its place in a flat image
    threshold: float  # above it the value is the higher one
    values: tuple[float, float]  # the two numbers that stand for them, ascending
    prior: float  # how often the higher one is met


def attributes(public: Public, count: int) -> tuple[Attribute, ...]:
    """Return the features that vary most among public records, each split at its median."""
    flat = public.images.flatten(1).numpy()
    order = np.argsort(-flat.var(axis=0), kind="stable")[:count]
    return tuple(_attribute(int(pixel), flat[:, pixel]) for pixel in order if flat[:, pixel].var() > 0)


def truth_of(attribute: Attribute, images: Tensor) -> NDArray[np.bool_]:
    """Return whether records (n, C, H, W) on [0, 1] have the higher value."""
    return images.flatten(1)[:, attribute.pixel].numpy() > attribute.threshold


def guessed_values(
    endpoint: Questions, attribute: Attribute, images: Tensor, labels: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return whether the higher value is the likelier one; two questions a record."""
    asked = images.double().flatten(1)
    weights = []
    for value, prior in zip(attribute.values, (1 - attribute.prior, attribute.prior), strict=True):
        changed = asked.clone()
        changed[:, attribute.pixel] = value
        shares = probabilities(endpoint.ask(changed.view(images.shape)), endpoint.classes)
        weights.append(prior * shares[torch.arange(len(labels)), labels].clip(_SMALLEST))
    return weights[1] > weights[0]


def _attribute(pixel: int, values: NDArray[np.float64]) -> Attribute:
    # Where half of all values are the largest one, the threshold is below it.
    threshold = float(np.median(values))
    threshold = threshold if (values > threshold).any() else float(values[values < threshold].max())
    above = values > threshold
    return Attribute(pixel, threshold, (float(values[~above].mean()), float(values[above].mean())), float(above.mean()))


@PROBES.register
class AttributeInference(ModelAttack):
    """The adversary has a record but for one feature, and public records for the prior; members beside others."""

    name: ClassVar[str] = "attribute-inference"
    title: ClassVar[str] = "Attribute inference"
    reference: ClassVar[str] = (
        "Fredrikson et al.: Privacy in Pharmacogenetics, 2014; Yeom, Giacomelli, Fredrikson and Jha: Privacy Risk in "
        "Machine Learning, 2018"
    )
    needs: ClassVar[tuple[Access, ...]] = (Access.ANSWERS, Access.PUBLIC_DATA)

    features: Count = Field(8, description="that are hidden, one at a time: those that vary most")
    pairs: Count = Field(200, description="of a member and a non-member, at most")

    @override
    def run(self, scene: ProbeScene, referee: ProbeReferee) -> tuple[ProbeOutcome, ...]:
        endpoint, hidden = scene.open(), attributes(scene.known_public(), self.features)
        count = pairs_within(scene.budget, self.pairs, 2 * len(hidden))
        game = draw_game(scene.known_training(), count, scene.seed)
        images, labels = game.asked()
        truth = np.stack([truth_of(attribute, images) for attribute in hidden])
        right = np.stack([guessed_values(endpoint, attribute, images, labels) for attribute in hidden]) == truth
        prior = np.array([attribute.prior > 0.5 for attribute in hidden])[:, None] == truth
        member, total = game.candidates.truth, right[:, game.candidates.truth].size
        figures = [
            Figure(
                f"hidden features right, {who}",
                rate_interval(int(right[:, which].sum()), total),
                float(prior[:, which].mean()),
                theorem="the prior alone is the guess; features follow from one another, which no epsilon bounds",
            )
            for who, which in (("members", member), ("others", ~member))
        ]
        # Features of one record are not independent: the interval is over records.
        each = right.mean(axis=0)
        difference = float(each[member].mean() - each[~member].mean())
        reach = 1.96 * float(np.sqrt((each[member].var(ddof=1) + each[~member].var(ddof=1)) / count))
        proven = scene.proven
        ceiling = (
            None if proven is None or proven.epsilon is None else membership_advantage(proven.epsilon, proven.delta)
        )
        advantage = Figure(
            "members' advantage over others",
            Interval(difference, difference - reach, difference + reach),
            0.0,
            ceiling=ceiling,
            theorem="no epsilon under replace-one is proven"
            if ceiling is None
            else "Yeom et al. 2018, total variation",
        )
        sentence = (
            f"{endpoint.asked} questions: for members {figures[0].measured.value:.1%} of the hidden features are "
            f"right, for others {figures[1].measured.value:.1%}; the prior alone has {figures[0].guess:.1%}."
        )
        return (self.outcome(endpoint.asked, (*figures, advantage), sentence),)
