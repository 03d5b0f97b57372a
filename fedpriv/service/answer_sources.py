"""What an endpoint answers from, before its noise is scaled: the network, the certified convex head, or votes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedpriv.accounting.convex_models import ClaimedSensitivity
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, one_line
from fedpriv.core.finished import completed_summary, final_state, finished_world
from fedpriv.core.names import Adjacency
from fedpriv.core.records import Guarantee, Ledger
from fedpriv.core.runs import RunFolder
from fedpriv.core.sections import forward_noise
from fedpriv.core.world import World, network_of, precision_of
from fedpriv.data.datasets import Dataset, load_dataset
from fedpriv.models import model_settings, recorded_model
from fedpriv.models.machinery.build import build_model
from fedpriv.models.machinery.convex import ConvexModel, Objective, minimised
from fedpriv.service.features import Features, check_fixed, learnt_features, public_features
from fedpriv.service.policies import EXAMPLE, AnswerPolicy, Facts, HeadPolicy
from fedpriv.service.policies.votes import NoisyVotes
from fedpriv.service.proof import REPRODUCIBLE, head_sensitivity
from fedpriv.service.records import HeadFacts, LearntFacts, Service
from fedpriv.service.voters import CLIENT, Voters, refuse_unsolvable_head, shards_of, train_voters

# Features may come out of another finished run: what its network computes before its last linear layer, frozen. The
# network is part of what that run released, and its ledger says what is proven of it. For any one network the features
# are a fixed function of an image, and what is proven of the head is the same as of pixels. Both figures are added
# (fedpriv.service.proof.with_run), which takes that both are about one example of the same data that becomes another
# one, and that the example is there once. The endpoint keeps the network, so that the run's folder is needed once.

STORED = "features.safetensors"


@dataclass(frozen=True, eq=False)
class Learnt:
    """A frozen network."""

    facts: LearntFacts  # about it, for everybody
    content: bytes  # of the file with its numbers
    network: nn.Module  # in evaluation mode


def head_features(world: World, policy: HeadPolicy, learnt: Learnt | None) -> Features:
    """Return the features that a policy's convex head is trained on."""
    if learnt is None:
        return public_features(policy.pooled, policy.feature_norm)
    # Networks of this project are known to treat examples separately; others could mix those of a batch.
    separate = {"at_once": 1} if model_settings(learnt.facts.model).is_own else {}
    return learnt_features(learnt.network, world.dataset, policy.feature_norm, **separate)


def learnt_network(place: Path, world: World, policy: HeadPolicy, known: Service | None) -> Learnt | None:
    """Return the network that a policy's features come from; ``None``: they are public."""
    if not policy.learnt:
        return None
    if known is not None and known.settings.get("features") == policy.features:
        return stored_network(place, world, policy, known)
    try:
        return _read(policy.learnt, world)
    except InputError as error:
        raise InputError(key="service.features", given=policy.features, allowed=str(error)) from None


def stored_network(place: Path, world: World, policy: HeadPolicy, service: Service) -> Learnt | None:
    """Return the network that an endpoint keeps; ``None``: its features are public."""
    if not policy.learnt:
        return None
    facts, path, dataset = service.learnt, place / STORED, world.dataset
    if facts is None:
        raise InputError(f"{place / 'service.json'} is damaged: it does not say which network gives the features")
    network = build_model(recorded_model(facts.model), dataset.shape, dataset.classes, facts.seed, dataset.columns)
    try:
        content = path.read_bytes()
        if sha256(content).hexdigest() != facts.digest:
            raise ValueError("it is not the network that this endpoint was made with")
        return Learnt(facts, content, _frozen(network, load(content), world))
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{path} is damaged: {getattr(error, 'strerror', None) or error}") from None
    except (KeyError, RuntimeError) as error:
        raise InputError(f"{path} is not of this network any more: {one_line(error)}") from None


def _read(run: str, world: World) -> Learnt:
    folder = RunFolder.open(Path(run))
    completed_summary(folder)
    experiment = folder.experiment()
    proven = _proven(experiment, folder.final_ledger())
    if forward_noise(experiment) is not None:
        raise InputError("its network has noise in its forward pass ([robustness]); features have to be fixed")
    other = finished_world(folder, experiment)
    _refuse_other_data(experiment, world)
    state = final_state(folder, other, "take features of")
    # A network of its own: the worlds' are shared by whoever builds the same experiment.
    network = network_of(experiment, world.dataset).to(precision_of(experiment))
    state.load_into(network)
    tensors = {name: value.detach().clone().contiguous() for name, value in network.state_dict().items()}
    content = save(tensors)
    facts = LearntFacts(
        run=run,
        model=experiment.model.model_dump(mode="json"),
        seed=experiment.seed,
        digest=sha256(content).hexdigest(),
        guarantee=proven,
    )
    frozen = _frozen(network, tensors, world)
    check_fixed(frozen, world.dataset)
    return Learnt(facts, content, frozen)


def _frozen(network: nn.Module, tensors: Mapping[str, Tensor], world: World) -> nn.Module:
    """The network with these numbers, on the world's device."""
    first = next(name for name, _ in network.named_parameters())
    network.to(world.device, tensors[first].dtype)
    network.load_state_dict(dict(tensors))
    return network.eval()


def _proven(experiment: Experiment, ledger: Ledger) -> Guarantee:
    """What the ledger proves of each example of all clients, if that can be added to what is proven of answers."""
    worst = ledger.worst
    if worst.epsilon is None:
        raise InputError(
            f"its ledger proves nothing ({worst.theorem['epsilon']}); name a run whose training is private, such as "
            "one with mechanism.name = 'gaussian' and mechanism.target_epsilon"
        )
    relations = {line.relation for line in ledger.clients}
    if ledger.unit != "example" or ledger.views or relations != {Adjacency.REPLACE_ONE}:
        raise InputError(
            f"its ledger is about another change of the data ({worst.adjacency}), and answers are about one example "
            "that becomes another one; train it with mechanism.unit = 'example' and mechanism.adjacency = 'replace-one'"
        )
    if experiment.data.overlaps:
        raise InputError(
            "its clients hold copies of examples (data.partition = 'overlapping'), and its ledger is about one copy; "
            "name a run with another partition"
        )
    pure = [line.pure_epsilon for line in ledger.clients if line.pure_epsilon is not None]
    return replace(
        worst.guarantee,
        # Lines are sorted by epsilon alone.
        pure_epsilon=max(pure) if len(pure) == len(ledger.clients) else None,
        participations=max(line.participations for line in ledger.clients),
        notes=(*worst.notes, *((REPRODUCIBLE,) if experiment.noise == "reproducible" else ())),
    )


def _refuse_other_data(experiment: Experiment, world: World) -> None:
    """Refuse a run of other data: nobody could say then how often one example is in both."""
    own = world.experiment
    theirs, ours = load_dataset(experiment.data, experiment.seed), load_dataset(own.data, own.seed)
    if _kept(theirs) != _kept(ours):
        raise InputError(
            f"its data are others ({theirs.source}) than this run's ({ours.source}), or other examples of them; name a "
            "run with the same data.name, data.root or data.path and data.groups, and with data.train_examples the "
            "same seed"
        )


def _kept(dataset: Dataset) -> tuple[object, ...]:
    return dataset.digest, dataset.class_names, dataset.mean, dataset.std, dataset.columns


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
