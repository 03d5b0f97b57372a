"""What an endpoint answers from, before its noise is scaled: the network, the certified convex head, or votes.

What is proven of the convex head takes features to be a fixed function of the image, of length R at most, and asks no
more of them: with R fixed, the sensitivity is the same for any such function. So features may come out of another
finished run: what its network computes before its last linear layer, frozen. The network is part of what that run
released, and its ledger says what is proven of it. Both figures are added (fedpriv.service.proof.with_run), which takes
that both are about one example of the same data that becomes another one, and that the example is there once. The
endpoint keeps the network, so that the run's folder is needed once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedpriv.accounting.convex_models import ClaimedSensitivity, Problem, refuse_unsolvable
from fedpriv.attacks.references import mapped_network, trained_network
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, RunFailedError, one_line
from fedpriv.core.federated import stack_objective
from fedpriv.core.finished import completed_summary, final_state, finished_world
from fedpriv.core.names import Adjacency
from fedpriv.core.optimizers import make_optimizer
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import Guarantee, Ledger
from fedpriv.core.runs import RunFolder
from fedpriv.core.sections import forward_noise
from fedpriv.core.world import World, network_of, precision_of
from fedpriv.data.datasets import Dataset, load_dataset
from fedpriv.gradients.calls import until_the_end
from fedpriv.models import model_settings, recorded_model
from fedpriv.models.machinery.build import build_model
from fedpriv.models.machinery.convex import ConvexModel, Objective, minimised
from fedpriv.service.policies import EXAMPLE, AnswerPolicy, Facts, HeadKeys, HeadPolicy, Scores
from fedpriv.service.policies.votes import NoisyVotes
from fedpriv.service.proof import REPRODUCIBLE, head_sensitivity
from fedpriv.service.records import HeadFacts, LearntFacts, Service

_AT_ONCE = 256  # images
_TRIED = 5  # random images that are shown twice
_TRIAL = 20261125  # their seed; it decides nothing else

Array = NDArray[np.float64]

Features = Callable[[Tensor], Array]
"""Images (n, C, H, W), bytes or on [0, 1] -> features (n, d) float64, of length R, or 0."""


def pixels(images: Tensor) -> Array:
    """Return images (n, C, H, W), bytes or on [0, 1], as float64 on [0, 1]: one array for one picture."""
    values: Array = images.double().cpu().numpy()
    return values / 255 if images.dtype == torch.uint8 else values


def public_features(size: int | None, norm: float) -> Features:
    """Return :func:`pooled_features` of images as a data set or a question has them."""
    return lambda images: pooled_features(pixels(images), size, norm)


def pooled_features(images: Array, size: int | None, norm: float) -> Array:
    """Return public features (n, d) of images: pixels, averaged over squares, scaled to one length."""
    count, channels, height, width = images.shape
    if size is not None:
        if height % size or width % size:
            raise InputError(
                key="service.features",
                given=f"pooled:{size}",
                allowed=f"images of {height} x {width} are no multiple of it",
            )
        squares = images.reshape(count, channels, size, height // size, size, width // size)
        images = squares.mean(axis=(3, 5))
    return _scaled(images.reshape(count, -1), norm)


def learnt_features(network: nn.Module, dataset: Dataset, norm: float, *, at_once: int = _AT_ONCE) -> Features:
    """Return the input of a network's last linear layer, flat, of one length; zeros if not finite."""

    def features(images: Tensor) -> Array:
        flat = np.concatenate([_heard(network, dataset, part) for part in images.split(at_once)])
        return _scaled(np.where(np.isfinite(flat).all(axis=1, keepdims=True), flat, 0), norm)

    return features


def check_fixed(network: nn.Module, dataset: Dataset) -> None:
    """Refuse a network whose features are no fixed function of an image, as far as random images show it."""
    images, _ = dataset.random(_TRIED, torch.Generator().manual_seed(_TRIAL))
    there = [_heard(network, dataset, image) for image in images.split(1)]
    back = [_heard(network, dataset, image) for image in reversed(images.split(1))]
    if any(not np.array_equal(one, other, equal_nan=True) for one, other in zip(there, reversed(back), strict=True)):
        raise InputError(
            "its network gives other features each time, also in evaluation mode: noise in the forward pass, or "
            "something that it keeps; features have to be a fixed function of the image"
        )


def _heard(network: nn.Module, dataset: Dataset, images: Tensor) -> Array:
    """What the last linear layer that gives (n, classes) is fed, (n, d)."""
    first = next(network.parameters())
    fed: list[Tensor] = []

    def hear(layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        if output.shape == (len(images), dataset.classes):
            fed.append(given[0])

    hooks = [each.register_forward_hook(hear) for each in network.modules() if isinstance(each, nn.Linear)]
    with until_the_end(hooks), torch.no_grad():
        network(dataset.normalise(images.to(first.device), first.dtype))
    if not fed:
        raise InputError("its network has no linear layer that gives the logits, and so no features before one")
    return fed[-1].flatten(1).double().cpu().numpy()


def _scaled(flat: Array, norm: float) -> Array:
    """Rows (n, d) scaled to one length; those of length 0 stay."""
    lengths = np.sqrt((flat**2).sum(axis=1, keepdims=True))
    return norm * flat / np.where(lengths > 0, lengths, 1)


CLIENT = Adjacency.REPLACE_ONE.worded("all data of one client are others; their number is public")

_WEIGHTS = "weights"


@dataclass(frozen=True, eq=False)
class Voters:
    """M models."""

    # name -> (M, *shape): a network's parameters, or the heads' weights. They are as private as the data.
    stack: Mapping[str, NDArray[np.float64] | NDArray[np.float32]]


def shards_of(world: World, count: int) -> tuple[NDArray[np.int64], ...]:
    """Return the training rows of each model; who is in which does not depend on the data."""
    if count == 0:
        shards = [np.asarray(rows, dtype=np.int64) for rows in world.partitions]
    else:
        rows = np.sort(np.concatenate(world.partitions))
        if count > len(rows):
            raise InputError(key="service.shards", given=count, allowed=f"there are {len(rows)} training examples")
        shards = np.array_split(rows[numpy_stream(world.experiment.seed, "voters").permutation(len(rows))], count)
    if len(shards) < 2:
        raise InputError("votes need two models or more: more clients, or service.shards")
    return tuple(shards)


def train_voters(world: World, policy: NoisyVotes, shards: Sequence[NDArray[np.int64]]) -> Voters:
    """Train a model on each share."""
    return _networks(world, policy, shards) if policy.voters == "network" else _heads(world, policy, shards)


def vote_counts(world: World, policy: NoisyVotes, voters: Voters) -> Callable[[Tensor], Scores]:
    """Return how images (n, C, H, W) get counts of votes (n, classes), float64."""
    classes = world.dataset.classes
    if policy.voters == "head":
        weights, features = voters.stack[_WEIGHTS], public_features(policy.pooled, policy.feature_norm)

        def votes(images: Tensor) -> NDArray[np.int64]:
            return (features(images) @ weights.transpose(0, 2, 1)).argmax(axis=2)
    else:
        network = mapped_network(world.model)
        stack = {name: torch.from_numpy(np.asarray(value)).to(world.device) for name, value in voters.stack.items()}
        first = next(iter(stack.values()))

        def votes(images: Tensor) -> NDArray[np.int64]:
            inputs = world.dataset.normalise(images.to(first.device), first.dtype)
            return network.outputs(stack, inputs).argmax(dim=2).cpu().numpy()

    def counts(images: Tensor) -> Scores:
        named = np.concatenate([votes(batch) for batch in images.split(_AT_ONCE)], axis=1)
        return np.stack([(named == number).sum(axis=0) for number in range(classes)], axis=1).astype(np.float64)

    return counts


def _heads(world: World, policy: NoisyVotes, shards: Sequence[NDArray[np.int64]]) -> Voters:
    features = public_features(policy.pooled, policy.feature_norm)
    return Voters({_WEIGHTS: np.stack([_head_on(world, policy, features, rows).weights for rows in shards])})


def _head_on(world: World, policy: HeadKeys, features: Features, rows: NDArray[np.int64]) -> ConvexModel:
    """Train a convex head on some training examples."""
    found, labels = features(world.dataset.x_train[torch.from_numpy(rows)]), world.dataset.y_train.numpy()[rows]
    refuse_unsolvable_head(policy, len(labels), found.shape[1], world.dataset.classes)
    return trained_head(policy, found, labels, world.dataset.classes)


def trained_head(policy: HeadKeys, features: Array, labels: NDArray[np.int64], classes: int) -> ConvexModel:
    """Train a convex head on features (n, d) and labels (n,)."""
    objective = Objective(features, labels, classes, policy.regularisation)
    return minimised(objective, policy.feature_norm, policy.tolerance)


def refuse_unsolvable_head(policy: HeadKeys, examples: int, features: int, classes: int) -> None:
    """Refuse public sizes with which the solver of a convex head might not reach its tolerance."""

    def of_length_one(problem: Problem) -> tuple[Problem, float]:
        # The weights times R are those of features of length 1, with a regularisation of lambda / R^2.
        norm = policy.feature_norm
        shorter = problem.tolerance / norm
        return replace(problem, regularisation=problem.regularisation / norm**2, tolerance=shorter), 0.0

    problem = Problem(examples, features, classes, policy.regularisation, policy.tolerance)
    about = f"a convex head on {examples} examples with service.feature_norm = {policy.feature_norm:g}"
    refuse_unsolvable(problem, "service", about, of_length_one)


def _networks(world: World, policy: NoisyVotes, shards: Sequence[NDArray[np.int64]]) -> Voters:
    """All at once, from the run's initial numbers; a shorter share is filled up with examples of weight 0."""
    training = world.experiment.training
    network = trained_network(world.model)
    stack = {
        name: value.to(world.device).expand(len(shards), *value.shape).clone()
        for name, value in world.initial.parameters.items()
    }
    longest = max(map(len, shards))
    rows = np.stack([np.resize(shard, longest) for shard in shards])
    counted = np.arange(longest) < np.array([len(shard) for shard in shards])[:, None]
    optimizer = make_optimizer(training.optimizer, training.learning_rate, training.momentum)
    size = min(training.batch_size, longest)
    for epoch in range(policy.voter_epochs):
        order = numpy_stream(world.experiment.seed, "voter-batches", epoch).permutation(longest)
        for places in np.array_split(order, max(1, longest // size)):
            x, y, weights = _batch(world, rows[:, places], counted[:, places])
            gradient = network.gradients(stack, x, y, partial(stack_objective, weights, training.tilt, None))
            if training.weight_decay:
                gradient = {name: value + training.weight_decay * stack[name] for name, value in gradient.items()}
            optimizer.step(stack, gradient)
    if not all(bool(torch.isfinite(value).all()) for value in stack.values()):
        raise RunFailedError("a model that is to vote diverged: choose a smaller training.learning_rate")
    return Voters({name: value.cpu().numpy() for name, value in stack.items()})


def _batch(world: World, rows: NDArray[np.int64], counted: NDArray[np.bool_]) -> tuple[Tensor, Tensor, Tensor]:
    """Images (M, B, ...), labels (M, B), weights (M, B) that sum to 1 for each model with an example in the batch."""
    flat = torch.from_numpy(rows.reshape(-1))
    x = world.network_input(world.dataset.x_train[flat])
    y = world.dataset.y_train[flat].to(world.device).view(rows.shape)
    shares = counted / np.maximum(counted.sum(axis=1, keepdims=True), 1)
    return x.view(*rows.shape, *x.shape[1:]), y, torch.from_numpy(shares).to(x)


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
    minimum = _head_on(world, policy, get, rows)
    about = HeadFacts(
        regularisation=policy.regularisation,
        norm=policy.feature_norm,
        features=minimum.weights.shape[1],
        examples=len(rows),
        tolerance=policy.tolerance,
        sensitivity=head_sensitivity(policy.feature_norm, policy.regularisation, len(rows), policy.tolerance),
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
