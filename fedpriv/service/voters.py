"""Models on disjoint shares of the data, which vote: convex heads, or networks like the run's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.accounting.convex_models import Problem, refuse_unsolvable
from fedpriv.attacks.references import mapped_network, trained_network
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.federated import stack_objective
from fedpriv.core.names import Adjacency
from fedpriv.core.optimizers import make_optimizer
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.world import World
from fedpriv.models.machinery.convex import Objective, minimised
from fedpriv.service.features import public_features
from fedpriv.service.policies import HeadKeys, Scores
from fedpriv.service.policies.votes import NoisyVotes

CLIENT = Adjacency.REPLACE_ONE.worded("all data of one client are others; their number is public")

_AT_ONCE = 256  # images
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
    weights, features = [], public_features(policy.pooled, policy.feature_norm)
    for rows in shards:
        images = world.dataset.x_train[torch.from_numpy(rows)]
        labels = world.dataset.y_train.numpy()[rows]
        objective = Objective(features(images), labels, world.dataset.classes, policy.regularisation)
        refuse_unsolvable_head(policy, len(labels), objective.features.shape[1], world.dataset.classes)
        weights.append(minimised(objective, policy.feature_norm, policy.tolerance).weights)
    return Voters({_WEIGHTS: np.stack(weights)})


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
