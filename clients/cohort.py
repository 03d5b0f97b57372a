"""Train the clients that one process answers for together, as far as they do the same; each answers by itself.

They are one stack of models, each trained by streams of its own: what leaves a client is, up to rounding, what it would
have sent alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice

import numpy as np
import torch
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from torch import Tensor
from typing_extensions import override

from fedpriv.clients.model_errors import unless_raised
from fedpriv.clients.training import answer_secret
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.federated import example_losses, stack_objective, train_stack
from fedpriv.core.plan import Plan
from fedpriv.core.randomness import Secret, seeded_generators, torch_stream
from fedpriv.core.wire import record_in, unpack
from fedpriv.core.world import State, World, random_examples, trained_parameters
from fedpriv.gradients import Vector, plain_gradient
from fedpriv.gradients.ghost import TOLERANCE, Entangled
from fedpriv.gradients.operator import first_line
from fedpriv.gradients.stacked import Objective, StackedModel, stacked_model

# Bytes of all models of a stack on a CPU, as far as a step works on them: what stays in its cache is not fetched anew.
_CACHE_BYTES = 8 << 20


@dataclass(frozen=True)
class Stack:
    """The network of an experiment for many clients at once."""

    world: World  # the experiment, built
    model: StackedModel  # the network
    most: int  # how many clients are trained at once, by the memory that they take

    def uploads(self, clients: Sequence[int], before: State, round_number: int) -> tuple[State, ...] | None:
        """Train clients for one round and return what leaves each; ``None``: the model raises on these examples."""
        world = self.world
        plans = tuple(world.plans[client] for client in clients)
        secrets: tuple[Secret, ...] = ()
        if plans[0].config.protects:
            received = [world.received(client, before) for client in clients]
            pairs = zip(clients, received, strict=True)
            secrets = tuple(answer_secret(world.secret, client, round_number, digest) for client, digest in pairs)
        group = _Group(self, plans, secrets)
        if world.experiment.model.is_own:
            changes = unless_raised(partial(group.changes, before, round_number), MemoryError, torch.OutOfMemoryError)
        else:
            changes = group.changes(before, round_number)
        if changes is None:
            return None
        numbers = {name: value.detach().cpu() for name, value in changes.items()}
        return tuple(State({name: value[row] for name, value in numbers.items()}, {}) for row in range(len(clients)))


def same_work(plan: Plan) -> tuple[object, ...]:
    """Return what has to be equal of clients that are trained together: steps, size of a batch, and release."""
    return plan.steps_per_round, plan.sampling.batch_size, plan.config


def stack_of(world: World) -> Stack | Entangled:
    """Return the network as a stack, or why clients are trained one at a time, as random images show."""
    if reason := _other_work(world):
        return Entangled(reason)
    world.model.train()
    try:
        model = stacked_model(world.model)
    except (RuntimeError, TypeError, ValueError) as error:
        return Entangled(f"{type(world.model).__name__} cannot be copied ({first_line(error)})")
    if isinstance(model, Entangled):
        return model
    tried = unless_raised(partial(_tried, world, model), MemoryError, torch.OutOfMemoryError)
    if tried is None:
        return Entangled(f"{type(world.model).__name__} raises on a batch of several models' examples")
    if isinstance(tried, Entangled):
        return tried
    numbers = sum(value.nbytes for value in world.initial.parameters.values())
    room = world.experiment.engine.gradient_bytes // (tried + 4 * numbers)
    if world.device.type == "cpu":
        room = min(room, _CACHE_BYTES // (tried // 2 + numbers))
    return Stack(world, model, max(1, room))


def _other_work(world: World) -> str:
    """Why clients do other work than steps of one size each, or compute in another way; empty if they do not."""
    experiment = world.experiment
    if not algorithm_of(experiment).trains_in_steps:
        return f"federation.algorithm = {experiment.federation.algorithm!r} has no steps of training"
    if experiment.training.sampling in ("poisson", "balls-in-bins"):
        return f"training.sampling = {experiment.training.sampling!r} draws batches of different sizes"
    if experiment.engine.precision == "bfloat16":
        return "engine.precision = 'bfloat16' rounds each model's products in its own way"
    if world.forward_noise is not None:
        return "the network has noise in its forward pass"
    noisy = experiment.mechanism.protects and not experiment.mechanism.protects_updates
    return world.route.dense if noisy else ""


@dataclass(frozen=True)
class _Group:
    """Clients that are trained together: their plans and, with a mechanism, what each one's noise is keyed by."""

    stack: Stack
    plans: tuple[Plan, ...]
    secrets: tuple[Secret, ...]

    def changes(self, before: State, round_number: int) -> Vector | None:
        """What leaves the clients, (M, *shape)."""
        world = self.stack.world
        parameters = {
            name: value.to(world.device).expand(len(self.plans), *value.shape).clone()
            for name, value in before.parameters.items()
        }
        try:
            return train_stack(
                world.experiment,
                self.plans,
                round_number,
                (before.parameters, parameters),
                partial(self._step, parameters),
                partial(self._descend, parameters),
                lambda row: self.secrets[row].stream("noise"),
            )
        except _TakenApart:
            return None

    def _descend(self, parameters: Vector, step: int) -> None:
        """Take a plain step in place."""
        world, model = self.stack.world, self.stack.model
        x, y = self._examples(step)
        model.descend(
            parameters, x, y, _objective(world, x), world.experiment.training.learning_rate, self._generators(step)
        )

    def _generators(self, step: int) -> list[torch.Generator]:
        """What each client's dropout is drawn from in a step; the same seeds as where it is trained alone."""
        world = self.stack.world
        if not self.stack.model.draws:
            return []
        return [torch_stream(own.seed, "model-noise", own.client, step, device=world.device) for own in self.plans]

    def _step(self, parameters: Vector, step: int) -> Vector:
        """The clients' gradients of a step, privatised where that is done with examples."""
        world, plan, model = self.stack.world, self.plans[0], self.stack.model
        x, y = self._examples(step)
        generators = self._generators(step)
        if not plan.config.protects_examples:
            return model.gradients(parameters, x, y, _objective(world, x), generators)
        loss, memory = partial(example_losses, forward=world.corrected), world.experiment.engine.gradient_bytes
        gradients = model.operator(parameters, x, y, loss, memory, generators)
        if isinstance(gradients, Entangled):
            raise _TakenApart
        return plan.release_gradients(gradients, [secret.stream("noise", step) for secret in self.secrets])

    def _examples(self, step: int) -> tuple[Tensor, Tensor]:
        """Images (M, B, C, H, W), normalised, and labels (M, B), on the device."""
        world = self.stack.world
        rows = torch.from_numpy(np.stack([world.partitions[plan.client][plan.batch(step)] for plan in self.plans]))
        images = world.network_input(world.dataset.x_train.index_select(0, rows.flatten()))
        return images.unflatten(0, rows.shape), world.dataset.y_train[rows].to(world.device)


class _TakenApart(Exception):
    """The model cannot be taken apart layer by layer on these examples."""


def _objective(world: World, x: Tensor) -> Objective:
    """The sum over models of the mean loss of each one's batch, of examples (M, B, ...)."""
    weights = x.new_full(x.shape[:2], 1 / x.shape[1])
    return partial(stack_objective, weights, world.experiment.training.tilt, world.corrected)


def _tried(world: World, model: StackedModel) -> int | Entangled:
    """Compare two models of a stack with each of them alone, and return the bytes that one more model takes."""
    examples = world.experiment.training.batch_size
    images, labels = random_examples(world.experiment, world.dataset, 2 * examples)
    x = world.network_input(images).unflatten(0, (2, examples))
    y = labels.to(world.device).view(2, examples)
    if x.is_floating_point():
        x[1] *= 0.5  # a range that both together do not have, by which a model may scale all of its input
    first = {name: value.to(world.device) for name, value in world.initial.parameters.items()}
    parameters = {name: torch.stack([value, 0.9 * value]) for name, value in first.items()}

    def generators() -> list[torch.Generator]:
        return [torch.Generator(device=world.device).manual_seed(seed) for seed in range(2)]

    def objective(outputs: Tensor, targets: Tensor) -> Tensor:
        return example_losses(outputs, targets).sum()

    kept = 0  # bytes of what autograd keeps for the way back

    def keep(value: Tensor) -> Tensor:
        nonlocal kept
        kept += value.nbytes
        return value

    moved = {name: value.clone() for name, value in parameters.items()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        model.descend(moved, x, y, objective, 1.0, generators())
    ways = [
        model.gradients(parameters, x, y, objective, generators()),
        {name: value - moved[name] for name, value in parameters.items()},
    ]
    if world.experiment.mechanism.protects and not world.experiment.mechanism.protects_updates:
        memory = world.experiment.engine.gradient_bytes
        operator = model.operator(parameters, x, y, example_losses, memory, generators())
        if isinstance(operator, Entangled):
            return operator
        ways.append(operator.combine(torch.ones_like(operator.norms())))
    for row in range(2):
        alone = _alone(world, {name: value[row] for name, value in parameters.items()}, x[row], y[row], row)
        if not all(_same({name: value[row] for name, value in way.items()}, alone) for way in ways):
            return Entangled(f"{type(world.model).__name__} computes otherwise with the examples of several models")
    return kept


def _alone(world: World, parameters: Vector, x: Tensor, y: Tensor, seed: int) -> Vector:
    """The gradient of one model as a client computes it."""
    State(parameters, {}).load_into(world.model)
    with seeded_generators(seed, world.device):
        total = example_losses(world.model(x), y).sum()
    return plain_gradient(total, trained_parameters(world.model))


def _same(given: Vector, expected: Vector) -> bool:
    size = torch.stack([value.norm() for value in expected.values()]).norm()
    return all(bool((given[name] - value).norm() <= TOLERANCE * size) for name, value in expected.items())


@dataclass(frozen=True)
class _Received(State):
    """What clients were sent and do not change, so that its digest stays what it is."""

    @override
    def digest(self) -> bytes:
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return super().digest()


@dataclass
class Cohort:
    """Who is about to be asked, what they were sent, and what was trained before its client was asked for it."""

    _expected: dict[int, State] = field(default_factory=dict)
    _states: dict[int, tuple[ArrayRecord, State]] = field(default_factory=dict)
    _trained: dict[int, State] = field(default_factory=dict)
    _stacks: list[tuple[World, Stack | Entangled]] = field(default_factory=list)

    def expect(self, messages: Mapping[int, Message]) -> None:
        """Take note of messages that are about to be answered, by client, in their order."""
        self._states, self._trained = {}, {}
        self._expected = {client: self._unpacked(message) for client, message in messages.items()}

    def sent(self, message: Message) -> State:
        """Return the global state in a message; of messages that were expected, one for all that hold the same."""
        known = self._states.get(id(record_in(message.content, "parameters", ArrayRecord)))
        return _received(message) if known is None else known[1]

    def upload(self, world: World, client: int, before: State, round_number: int) -> State | None:
        """Return what leaves a client, trained with those that are asked after it; ``None``: it is trained alone."""
        if client not in self._trained and self._expected.get(client) is before:
            self._train(world, client, before, round_number)
        return self._trained.pop(client, None)

    def _train(self, world: World, client: int, before: State, round_number: int) -> None:
        stack = self._stack(world)
        if isinstance(stack, Entangled):
            return
        work = same_work(world.plans[client])
        alike = (
            other
            for other, state in self._expected.items()
            if state is before and same_work(world.plans[other]) == work
        )
        group = list(islice(alike, stack.most))
        for other in group:
            del self._expected[other]
        uploads = stack.uploads(group, before, round_number)
        if uploads is not None:
            self._trained |= zip(group, uploads, strict=True)

    def _stack(self, world: World) -> Stack | Entangled:
        if not self._stacks or self._stacks[0][0] is not world:
            self._stacks = [(world, stack_of(world))]
        return self._stacks[0][1]

    def _unpacked(self, message: Message) -> State:
        record = record_in(message.content, "parameters", ArrayRecord)
        if id(record) not in self._states:
            # The record is kept, so that no other one takes its place in memory.
            self._states[id(record)] = record, _received(message)
        return self._states[id(record)][1]


def _received(message: Message) -> State:
    parameters, buffers = (record_in(message.content, name, ArrayRecord) for name in ("parameters", "buffers"))
    return _Received(unpack(parameters), unpack(buffers))


class CohortApp(ClientApp):
    """A ClientApp whose clients may be trained together, where an engine says who is about to be asked."""

    def __init__(self) -> None:
        super().__init__()
        self.cohort = Cohort()
        # `World.origin` of the run, where clients may read none but the server's data, as in a simulation; `None`: each
        # client has its own data, and goes on with them for the whole run
        self.origin: bytes | None = None
