"""Reference models, the target's whole federation on other data, many at once; and pairs of members and others."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.attacks.scene import Rehearsal
from fedpriv.core.algorithm import ModelRelease, algorithm_of, preparation_of
from fedpriv.core.config import Experiment, FederationConfig
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.federated import (
    client_weights,
    example_losses,
    stack_objective,
    train_stack,
    upload_sign,
    weighted_sum,
)
from fedpriv.core.optimizers import make_optimizer
from fedpriv.core.plan import Plan, noise_divisor, participants
from fedpriv.core.progress import Progress, Silent
from fedpriv.core.randomness import NoiseStream, Secret, numpy_stream
from fedpriv.core.world import World, tracked_buffers
from fedpriv.data.datasets import unit_scale
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import coupled_layers, dropout_layers
from fedpriv.gradients.ghost import Entangled
from fedpriv.gradients.stacked import MappedModel, Objective, StackedModel, is_chain, stacked_model


def refuse_unaudited(experiment: Experiment) -> None:
    """Refuse settings with which training cannot be repeated without some of the examples."""
    if reason := algorithm_of(experiment).not_audited:
        raise InputError(reason)
    if experiment.data.overlaps:
        raise InputError(
            "audit asks whether an example was in the training data by leaving out the only client's that holds it, "
            "and under data.partition = 'overlapping' others hold copies"
        )
    _refuse_rule(experiment.federation)


def _refuse_rule(federation: FederationConfig) -> None:
    if federation.rule.needs_each:
        raise InputError(
            key="federation.aggregation",
            given=federation.aggregation,
            allowed="reference models average uploads by the mean only",
        )


def mapped_network(model: nn.Module) -> MappedModel:
    """Return a network for many models, unless it has layers with which models are not trained together."""
    for what, names in (
        ("mixes the examples of a batch", coupled_layers(model)),
        ("is random while training", dropout_layers(model)),
        ("keeps running numbers", tuple(tracked_buffers(model))),
    ):
        if names:
            raise InputError(
                f"reference models: {names[0]} of the network {what}, and such models are not trained together; "
                "allowed: networks without BatchNorm, dropout and noise"
            )
    return MappedModel(model)


def trained_network(model: nn.Module) -> StackedModel | MappedModel:
    """Return a network for models that are trained; one with Linear layers as a stack, which takes half the time."""
    mapped = mapped_network(model)
    stacked = stacked_model(model) if is_chain(model) else mapped
    return mapped if isinstance(stacked, Entangled) else stacked


# Parameters, gradients, a client's copy and the optimiser's state: what a model takes while it is trained, in copies.
COPIES = 6


@dataclass(frozen=True, eq=False)
class Pool:
    """The examples that references are trained on."""

    images: Tensor  # (N, C, H, W), normalised, in the network's numbers and on its device
    labels: Tensor  # (N,), int64, on the same


def build_pool(world: World) -> Pool:
    """Return training, then test data as the network is fed; outsiders change their labels as clients do."""
    images = torch.cat([world.dataset.x_train, world.dataset.x_test])
    labels = torch.cat([world.dataset.y_train, _outsiders_labels(world)])
    return Pool(world.network_input(images), labels.to(world.device))


def _outsiders_labels(world: World) -> Tensor:
    labels, preparation = world.dataset.y_test, preparation_of(world.experiment)
    if preparation is None:
        return labels
    return preparation.changed(world, labels, Secret.of_seed(world.experiment.seed).stream("labels of outsiders"))


@dataclass(frozen=True, eq=False)
class Reference:
    """What one reference model is trained with."""

    seed: int  # of its batches and its noise
    shares: Sequence[np.ndarray]  # each client's rows of the pool, as many as the target's client holds


def usual_schedule(experiment: Experiment) -> dict[int, tuple[int, ...]]:
    """Return round -> the clients whose uploads are averaged, if no client fails or stops."""
    return {number: participants(experiment, number) for number in range(1, experiment.federation.rounds + 1)}


def train_references(
    world: World,
    pool: Pool,
    references: Sequence[Reference],
    schedule: Mapping[int, Sequence[int]],
    keep: Collection[int],
    at_once: int | None = None,
    progress: Progress | None = None,
) -> dict[int, Vector]:
    """Train reference models from the target's initial numbers; return round -> the models, name -> (R, *shape)."""
    shown = progress or Silent()
    _check(world, references, schedule, keep)
    network = trained_network(world.model)
    together = at_once or _fitting(world, world.experiment.engine.gradient_bytes)
    starts = range(0, len(references), together)

    def advanced(part: int, rounds: int) -> None:
        shown.advanced("rounds of the reference models", part * len(schedule) + rounds, len(starts) * len(schedule))

    parts = [
        _Federation(world, pool, references[start : start + together], network).run(
            schedule, keep, partial(advanced, part)
        )
        for part, start in enumerate(starts)
    ]
    return {
        number: {name: torch.cat([part[number][name] for part in parts]) for name in parts[0][number]}
        for number in sorted(keep)
    }


class _Federation:
    """A stack of M federations in the same round."""

    def __init__(
        self, world: World, pool: Pool, references: Sequence[Reference], network: StackedModel | MappedModel
    ) -> None:
        self._world, self._experiment = world, world.experiment
        self._pool = pool
        self._references = references
        self._network = network
        self._plans = [[replace(plan, seed=reference.seed) for reference in references] for plan in world.plans]
        count, like = len(references), pool.images
        self._globals = {
            name: value.to(like.device).expand(count, *value.shape).clone()
            for name, value in world.initial.parameters.items()
        }
        federation = self._experiment.federation
        self._server = make_optimizer(
            federation.server_optimizer, self._experiment.server_learning_rate, federation.server_momentum
        )

    def run(
        self, schedule: Mapping[int, Sequence[int]], keep: Collection[int], advanced: Callable[[int], None]
    ) -> dict[int, Vector]:
        """Run all rounds; return the models after the requested ones."""
        kept = {}
        for over, number in enumerate(sorted(schedule), 1):
            self._round(number, schedule[number])
            advanced(over)
            if number in keep:
                kept[number] = {name: value.clone() for name, value in self._globals.items()}
        return kept

    def _round(self, number: int, clients: Sequence[int]) -> None:
        federation = self._experiment.federation
        examples = [self._plans[client][0].sampling.examples for client in clients]
        uploads = (self._upload(client, number) for client in clients)
        mean = weighted_sum(uploads, client_weights(examples, federation.weighting))
        self._add_later_noise(mean, number, len(clients))
        sign = upload_sign(federation.algorithm)
        self._server.step(self._globals, {name: sign * value for name, value in mean.items()})
        for value in self._globals.values():
            if not torch.isfinite(value).all():
                raise RunFailedError(f"reference models: one diverged in round {number}")

    def _add_later_noise(self, mean: Vector, number: int, clients: int) -> None:
        """Add to each mean the noise that clients leave to the sum; normal, whatever its law is in the run."""
        plan, asked = self._world.plans[0], self._experiment.federation.asked
        at_server = plan.config.noise_at == "server"
        divisor = noise_divisor(self._experiment, self._world.plans) if at_server else max(clients, 1)
        deviation = plan.config.noise_on_mean(clients, divisor)
        if at_server:
            # Central noise is on a sum that is divided by the public number of clients.
            for value in mean.values():
                value.mul_(clients / asked)
        if not deviation:
            return
        for index, reference in enumerate(self._references):
            for back, factor in enumerate(plan.noise_factors[:number]):
                stream = Secret.of_seed(reference.seed).stream("noise-on-sum", number - back).numpy()
                for value in mean.values():
                    noise = torch.from_numpy(stream.normal(0.0, deviation, tuple(value[index].shape)))
                    value[index] += factor * noise.to(value)

    def _upload(self, client: int, number: int) -> Vector:
        """What a client of each federation uploads, name -> (M, *shape), after the mechanism."""
        algorithm = algorithm_of(self._experiment)
        if isinstance(algorithm, ModelRelease):
            return self._models(algorithm, client, number)
        plans, rate = self._plans[client], self._experiment.training.learning_rate
        local = {name: value.clone() for name, value in self._globals.items()}

        def descend(step: int) -> None:
            x, y, objective, _ = self._batches(client, step)
            self._network.descend(local, x, y, objective, rate)

        return train_stack(
            self._experiment,
            plans,
            number,
            (self._globals, local),
            lambda step: self._gradient(client, step, local),
            descend,
            lambda row: _noise(plans[row], number),
        )

    def _models(self, algorithm: ModelRelease, client: int, number: int) -> Vector:
        """Where clients release models: each federation's own, minus what its clients were sent."""
        released = []
        for plan, reference in zip(self._plans[client], self._references, strict=True):
            rows = torch.from_numpy(reference.shares[client]).to(self._pool.images.device)
            noise = _noise(plan, number) if plan.config.protects else None
            examples = self._pool.images[rows], self._pool.labels[rows]
            released.append(algorithm.released_model(self._world, client, *examples, plan, noise))
        return {
            name: torch.stack([model[name] for model in released]).to(value) - value
            for name, value in self._globals.items()
        }

    def _gradient(self, client: int, step: int, parameters: Vector) -> Vector:
        """Each model's mean gradient of its own batch, after the mechanism where its unit is the example."""
        x, y, objective, sizes = self._batches(client, step)
        plans = self._plans[client]
        if not plans[0].config.protects_examples:
            return self._network.gradients(parameters, x, y, objective)
        released: Vector = {name: torch.empty_like(value) for name, value in parameters.items()}
        loss, memory = partial(example_losses, forward=self._world.corrected), self._experiment.engine.gradient_bytes
        operators = self._network.operators(parameters, x, y, loss, memory, sizes)
        for index, (plan, operator) in enumerate(zip(plans, operators, strict=True)):
            for name, value in plan.release_gradient(operator, _noise(plan, step)).items():
                released[name][index] = value
        return released

    def _batches(self, client: int, step: int) -> tuple[Tensor, Tensor, Objective, list[int]]:
        """Images (M, B, ...), labels (M, B), objective, sizes (M,); short batches are filled up with weight 0."""
        plans = self._plans[client]
        drawn = [plan.batch(step) for plan in plans]
        sizes = [len(batch) for batch in drawn]
        rows = np.zeros((len(plans), max(1, *sizes)), dtype=np.int64)
        for index, (reference, batch) in enumerate(zip(self._references, drawn, strict=True)):
            rows[index, : len(batch)] = reference.shares[client][batch]
        flat = torch.from_numpy(rows.reshape(-1)).to(self._pool.images.device)
        x = self._pool.images.index_select(0, flat).view(*rows.shape, *self._pool.images.shape[1:])
        y = self._pool.labels.index_select(0, flat).view(rows.shape)
        counted = np.arange(rows.shape[1]) < np.array(sizes)[:, None]
        weights = torch.from_numpy(counted / plans[0].sampling.batch_size).to(x)
        objective = partial(stack_objective, weights, self._experiment.training.tilt, self._world.corrected)
        return x, y, objective, sizes


def _noise(plan: Plan, index: int) -> NoiseStream:
    """The noise of a reference model follows from the model's seed: it protects no data."""
    return Secret.of_seed(plan.seed).stream("noise", plan.client, index)


def _fitting(world: World, memory: int) -> int:
    """How many models fit, at least one; networks with other layers than Linear write out per-example gradients."""
    numbers = sum(value.numel() for value in world.initial.parameters.values())
    size = next(iter(world.initial.parameters.values())).element_size()
    rows = world.experiment.training.batch_size if world.plans[0].config.protects_examples else 0
    return max(1, memory // ((COPIES + rows) * numbers * size))


def _check(
    world: World, references: Sequence[Reference], schedule: Mapping[int, Sequence[int]], keep: Collection[int]
) -> None:
    _refuse_rule(world.experiment.federation)
    if not references:
        raise InputError("expected at least one reference model")
    sizes = tuple(len(rows) for rows in world.partitions)
    for number, reference in enumerate(references):
        held = tuple(len(rows) for rows in reference.shares)
        if held != sizes:
            raise InputError(f"reference {number}: clients hold {held} examples; the target's hold {sizes}")
    if missing := sorted(set(keep) - set(schedule)):
        raise InputError(f"no client took part in round {missing[0]}, whose models are needed")


# Pairs of a member of the training data and an example that is none, for attacks that tell the two apart.


# Enough for RMIA's shares of the population to be told apart to a thousandth.
MOST_POPULATION = 2000


@dataclass(frozen=True, eq=False)
class MemberPairs:
    """Pairs of a member and a non-member, and examples that are nobody's."""

    members: NDArray[np.int64]  # (C,), rows of the pool that the target was trained with
    non_members: NDArray[np.int64]  # (C,), rows that it was not
    clients: NDArray[np.int64]  # (C,), whose data the member of a pair is part of
    positions: NDArray[np.int64]  # (C,), where in that client's data it stands
    population: NDArray[np.int64]  # (Z,), rows that neither target nor references are trained with

    @property
    def rows(self) -> NDArray[np.int64]:
        """(2 C,), all candidates: the members, then the non-members."""
        return np.concatenate([self.members, self.non_members])

    @property
    def truth(self) -> NDArray[np.bool_]:
        """(2 C,), which of :attr:`rows` are members; for the referee."""
        return np.arange(2 * len(self.members)) < len(self.members)


def draw_candidates(world: World, pairs: int, seed: int) -> MemberPairs:
    """Draw pairs at random from all clients' data and the test data; half of the test data at most is used up."""
    rng = numpy_stream(seed, "membership-candidates")
    train, test = len(world.dataset.x_train), len(world.dataset.x_test)
    places = [(client, position) for client, rows in enumerate(world.partitions) for position in range(len(rows))]
    count = min(pairs, len(places), test // 2)
    if count < 2:
        raise InputError(
            f"membership: {len(places)} training and {test} test examples make {max(0, count)} pairs of candidates; "
            "at least 2 are needed"
        )
    chosen = rng.choice(len(places), count, replace=False)
    clients, positions = np.array(places, dtype=np.int64)[chosen].T
    members = np.array([world.partitions[c][p] for c, p in zip(clients, positions, strict=True)], dtype=np.int64)
    outside = train + rng.permutation(test)
    return MemberPairs(members, outside[:count], clients, positions, outside[count:][:MOST_POPULATION])


@dataclass(frozen=True, eq=False)
class MembershipGame:
    """Members and others, and who asks."""

    candidates: MemberPairs  # pairs, as in an audit
    pool: Pool  # training data, then test data, as the network is fed
    images: Tensor  # the same as they lie in the data set, uint8, (N, C, H, W)

    def asked(self) -> tuple[Tensor, NDArray[np.int64]]:
        """Return all candidates' images, (2 C, C, H, W) on [0, 1], float64, and labels."""
        rows = torch.from_numpy(self.candidates.rows)
        return unit_scale(self.images[rows], torch.float64), self.pool.labels.cpu()[rows].numpy()


def draw_game(rehearsal: Rehearsal, pairs: int, seed: int) -> MembershipGame:
    """Draw members and as many others."""
    world = rehearsal.world
    candidates = draw_candidates(world, pairs, seed)
    return MembershipGame(candidates, build_pool(world), torch.cat([world.dataset.x_train, world.dataset.x_test]))


def pairs_within(budget: int, pairs: int, each: int = 1) -> int:
    """Return how many pairs are asked about where each candidate takes ``each`` questions."""
    count = min(pairs, budget // (2 * each))
    if count < 2:
        raise InputError(f"{budget} questions are too few: two pairs of candidates take {4 * each}")
    return count
