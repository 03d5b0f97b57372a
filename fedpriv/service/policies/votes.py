"""Noisy votes of models that were trained on disjoint shards (Papernot et al. 2018; van der Maaten and Hannun 2020)."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from fedpriv.attacks.questions import Answers
from fedpriv.core.errors import InputError
from fedpriv.core.settings import Count, Integer
from fedpriv.service.policies import (
    DISTRIBUTION,
    POLICIES,
    Distribution,
    DrawnPolicy,
    Draws,
    Facts,
    HeadKeys,
    Scores,
)

if TYPE_CHECKING:
    from fedpriv.service.proof import Law


@POLICIES.register
class NoisyVotes(HeadKeys, DrawnPolicy):
    """Each model names a class; one example moves one vote: sensitivity sqrt(2), or a range of 2 / temperature."""

    name: ClassVar[str] = "votes"
    title: ClassVar[str] = "noisy votes of models on disjoint data"
    reference: ClassVar[str] = "Papernot, Song, Mironov et al.: Scalable Private Learning with PATE, ICLR 2018"
    source: ClassVar[Literal["network", "head", "votes"]] = "votes"
    draws: ClassVar[bool] = True
    labels_only: ClassVar[bool] = True

    shards: Annotated[Integer, Field(ge=0, le=10_000)] = Field(
        0,
        description="votes: models, each on an equal share of all data; 0: one a client, for whole clients",
    )
    voters: Literal["head", "network"] = Field(
        "head", description="votes: convex heads, or networks like the run's, trained by [training] on their share"
    )
    voter_epochs: Count = Field(50, description="votes: passes of a network over its share")
    distribution: Distribution = DISTRIBUTION

    @model_validator(mode="after")
    def _features_are_public(self) -> Self:
        if self.learnt:
            raise InputError(
                f"features = {self.features!r} are for the one convex head of all data (model, logits, "
                "label, label-confidence); voters take pixels or pooled:K, or are networks themselves (voters "
                "= 'network')"
            )
        return self

    @property
    @override
    def law(self) -> "Law":
        return "gaussian" if self.distribution == "gaussian" else "range"

    @override
    def unit(self, facts: Facts) -> float:
        from fedpriv.accounting.aggregators import SENSITIVITY  # with scipy, which reading settings need not wait for

        return SENSITIVITY if self.law == "gaussian" else 2.0

    @override
    def theorem(self) -> str:
        return "one vote moves two counts by one"

    @override
    def answer(self, scores: Scores, draws: Draws) -> Answers:
        if self.law == "range":
            return Answers(draws.named(scores))
        return Answers(draws.spread("gaussian", scores).argmax(axis=1))
