"""What an endpoint answers from, before its noise is scaled: the network, the certified convex head, or votes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedpriv.accounting.convexified import ClaimedSensitivity
from fedpriv.core.errors import InputError
from fedpriv.core.world import World
from fedpriv.models.machinery.convex import ConvexModel, Objective, minimised
from fedpriv.service.features import Features
from fedpriv.service.policies import EXAMPLE, AnswerPolicy, Facts, HeadPolicy
from fedpriv.service.policies.votes import NoisyVotes
from fedpriv.service.proof import head_sensitivity
from fedpriv.service.records import HeadFacts, Service
from fedpriv.service.run_features import Learnt, head_features, learnt_network
from fedpriv.service.voters import CLIENT, Voters, refuse_unsolvable_head, shards_of, train_voters


@dataclass(frozen=True, eq=False)
class Head:
    """A certified convex head."""

    minimum: ConvexModel  # its weights
    about: HeadFacts  # its certificate
    features: Features  # that it was trained on
    learnt: Learnt | None  # the network that gives them; `None`: they are public


@dataclass(frozen=True, eq=False)
class AnswerSource:
    """What answers; without head and voters, the run's network."""

    facts: Facts  # public sizes
    head: Head | None = None  # the convex head; `None` without one
    voters: Voters | None = None  # that vote; `None` without votes


def made_source(place: Path, world: World, policy: AnswerPolicy, known: Service | None) -> AnswerSource:
    """Make what a policy answers from."""
    if world.experiment.data.overlaps and isinstance(policy, NoisyVotes | HeadPolicy):
        raise InputError(
            key="service.method",
            given=policy.name,
            allowed="what is proven of its answers takes each example to be there once, and under "
            "data.partition = 'overlapping' several clients hold copies",
        )
    if isinstance(policy, NoisyVotes):
        shards = shards_of(world, policy.shards)
        adjacency = EXAMPLE if policy.shards else CLIENT
        facts = Facts(world.dataset.classes, models=len(shards), adjacency=adjacency)
        return AnswerSource(facts, voters=train_voters(world, policy, shards))
    if isinstance(policy, HeadPolicy):
        return _head(world, policy, learnt_network(place, world, policy, known))
    return AnswerSource(network_facts(world, policy))


def _head(world: World, policy: HeadPolicy, learnt: Learnt | None) -> AnswerSource:
    get = head_features(world, policy, learnt)
    rows = np.sort(np.concatenate(world.partitions))
    features = get(world.dataset.x_train[torch.from_numpy(rows)])
    labels = world.dataset.y_train.numpy()[rows]
    refuse_unsolvable_head(policy, len(labels), features.shape[1], world.dataset.classes)
    objective = Objective(features, labels, world.dataset.classes, policy.regularisation)
    minimum = minimised(objective, policy.feature_norm, policy.tolerance)
    about = HeadFacts(
        regularisation=policy.regularisation,
        norm=policy.feature_norm,
        features=features.shape[1],
        examples=len(labels),
        tolerance=policy.tolerance,
        sensitivity=head_sensitivity(policy.feature_norm, policy.regularisation, len(labels), policy.tolerance),
    )
    before = None if learnt is None else learnt.facts.guarantee
    facts = Facts(world.dataset.classes, about.sensitivity, about.norm, about.features, learnt=before)
    return AnswerSource(facts, Head(minimum, about, get, learnt))


def network_facts(world: World, policy: AnswerPolicy) -> Facts:
    """Return sizes of the run's network, and what Lu et al. claim of it where their formulas cover it."""
    hidden: tuple[int, ...] = getattr(world.experiment.model, "hidden", ())
    regularisation = getattr(policy, "regularisation", None)
    if regularisation is None or len(hidden) != 1:
        return Facts(world.dataset.classes)
    inputs, examples = int(np.prod(world.dataset.shape)), sum(len(rows) for rows in world.partitions)
    claimed = ClaimedSensitivity(inputs, hidden[0], world.dataset.classes, examples, regularisation)
    return Facts(world.dataset.classes, claimed=claimed)


def service_facts(service: Service) -> Facts:
    """Return the public sizes that the guarantee of an endpoint rests on."""
    head, adjacency = service.head, service.guarantee.adjacency
    if head is None:
        return Facts(service.classes, adjacency=adjacency, models=service.models)
    before = None if service.learnt is None else service.learnt.guarantee
    return Facts(service.classes, head.sensitivity, head.norm, head.features, adjacency=adjacency, learnt=before)
