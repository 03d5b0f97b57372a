"""A client's training in one round; it knows no Flower.

FedSGD uploads the privatised mean gradient of one batch, FedAvg the change of the parameters after local training; so
does a client that trains a convex model to its minimum, once.

With a mechanism nothing that an example does may show but through the noise, and a refusal would show: an example on
which the model raises counts as one whose gradient is zero, as one does whose gradient is not finite.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedpriv.clients.model_errors import unless_raised, where_sound
from fedpriv.core.algorithm import ModelRelease, algorithm_of
from fedpriv.core.federated import batch_loss, example_losses, train_locally
from fedpriv.core.plan import Plan
from fedpriv.core.randomness import Secret, generator_states, seeded_generators, torch_stream
from fedpriv.core.world import State, World, tracked_buffers, trained_parameters
from fedpriv.gradients import GradientOperator, Vector, per_example_gradients, plain_gradient, zero_gradients

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


def local_upload(world: World, client: int, before: State, round_number: int, secret: Secret | None = None) -> State:
    """Train for one round and return what leaves the client.

    Under ``parameters`` that is a mean gradient for FedSGD, else after minus before, in all cases after the mechanism;
    under ``buffers`` the change of the running statistics (empty without BatchNorm).
    """
    plan, model = world.plans[client], world.model
    if not plan.config.protects:
        secret = None  # there is no noise to key, and a network may mix the examples of a batch
    elif secret is None:
        secret = answer_secret(world.secret, client, round_number, world.received(client, before))
    before.load_into(model)
    model.train()
    algorithm = algorithm_of(world.experiment)
    if isinstance(algorithm, ModelRelease):
        upload = _model_change(algorithm, world, plan, before, secret)
    elif secret is not None and plan.config.protects_updates:
        upload = plan.release_update(_update(world, plan, before, round_number), secret.stream("noise"))
    else:
        upload = _trained(world, plan, before, round_number, secret)
    change = {name: value.cpu() - before.buffers[name] for name, value in tracked_buffers(model).items()}
    if plan.config.protects:
        # No mechanism covers running statistics, so none of them leaves.
        change = {name: torch.zeros_like(value) for name, value in change.items()}
    return State({name: value.detach().cpu() for name, value in upload.items()}, change)


def unprotected_upload(
    world: World, before: State, batches: Sequence[tuple[Tensor, Tensor]], seed: int
) -> tuple[Vector, bool]:
    """Return an upload for nobody's batches, without a mechanism, and whether the network drew random numbers."""
    before.load_into(world.model)
    world.model.train()
    drew = False

    def gradient(step: int) -> Vector:
        nonlocal drew
        images, labels = batches[step]
        own = torch_stream(seed, "model-noise", step).initial_seed()
        with _drawing(world, own, seed, step):
            start = generator_states(world.device)
            found = _mean_gradient(world, images, labels, len(images))
            drew |= generator_states(world.device) != start
        return found

    steps = range(len(batches))
    parameters = trained_parameters(world.model)
    return train_locally(world.experiment, steps, before.parameters, parameters, gradient), drew


def answer_secret(secret: Secret, client: int, round_number: int, received: bytes) -> Secret:
    """Return the key of one answer's noise: no other answer, to whatever was received, has the same noise."""
    return secret.derived("answer", client, round_number, received)


def _trained(world: World, plan: Plan, before: State, round_number: int, secret: Secret | None) -> Vector:
    """The batch's gradient (FedSGD), or the change of the parameters (FedAvg)."""
    parameters = trained_parameters(world.model)
    steps = plan.steps(round_number)
    return train_locally(
        world.experiment, steps, before.parameters, parameters, lambda step: _gradient(world, plan, step, secret)
    )


def _model_change(algorithm: ModelRelease, world: World, plan: Plan, before: State, secret: Secret | None) -> Vector:
    """The model that a client releases, minus the one that the server sent."""
    inputs, labels = world.examples(plan.client, np.arange(len(world.partitions[plan.client])))
    noise = None if secret is None else secret.stream("noise")
    released = algorithm.released_model(world, plan.client, inputs, labels, plan, noise)
    return {name: value - before.parameters[name] for name, value in released.items()}


def _update(world: World, plan: Plan, before: State, round_number: int) -> Vector:
    """The update as a mechanism is given it: zero where the model raises."""
    update = _unless_raised(world, lambda: _trained(world, plan, before, round_number, None))
    if update is None:
        _LOG.warning("client %d: the model raises in round %d; its update counts as zero", plan.client, round_number)
        return {name: torch.zeros_like(value) for name, value in before.parameters.items()}
    return update


def _gradient(world: World, plan: Plan, step: int, secret: Secret | None) -> Vector:
    """The mean gradient of one step's batch, privatised where there is a secret to key noise by."""
    images, labels = world.examples(plan.client, plan.batch(step))
    if secret is None:
        with _surroundings(world, plan, step):
            return _mean_gradient(world, images, labels, plan.sampling.batch_size)
    # Noise and norms are never computed in bfloat16.
    return plan.release_gradient(_gradients(world, plan, step, images, labels), secret.stream("noise", step))


def _gradients(world: World, plan: Plan, step: int, images: Tensor, labels: Tensor) -> GradientOperator:
    """The gradients of a batch; zero for examples on which the model raises."""
    gradients = _unless_raised(world, lambda: _computed(world, plan, step, images, labels))
    if gradients is not None:
        return gradients
    blanked = [torch.cat([values, torch.zeros_like(values[:1])]) for values in (images, labels)]
    batch = where_sound(lambda rows: _computed(world, plan, step, *(values[rows] for values in blanked)), len(images))
    if batch is None:
        _LOG.warning("client %d: the model raises on every example of a batch; it counts as zero", plan.client)
        return zero_gradients(world.model, len(images), world.experiment.engine.gradient_bytes)
    raising = int((~batch.sound).sum())
    _LOG.warning("client %d: the model raises on %d examples of a batch; they count as zero", plan.client, raising)
    return batch.result.masked(batch.sound.to(images.device))


def _unless_raised(world: World, compute: Callable[[], T]) -> T | None:
    """The result, or ``None`` where the model raises; networks of ours run out of memory whatever the examples are."""
    passed = () if world.experiment.model.is_own else (MemoryError, torch.OutOfMemoryError)
    return unless_raised(compute, *passed)


def _computed(world: World, plan: Plan, step: int, images: Tensor, labels: Tensor) -> GradientOperator:
    route, memory = world.route, world.experiment.engine.gradient_bytes
    loss = partial(example_losses, forward=world.corrected)
    with _surroundings(world, plan, step):
        return per_example_gradients(
            world.model, loss, images, labels, route=route, chunk_bytes=memory, often=plan.asks_often
        )


@contextmanager
def _surroundings(world: World, plan: Plan, step: int) -> Iterator[None]:
    """What the model runs in: the settings' numbers, and streams for dropout that start afresh with every step."""
    seed = torch_stream(plan.seed, "model-noise", plan.client, step).initial_seed()
    with _drawing(world, seed, plan.seed, plan.client, step):
        yield


@contextmanager
def _drawing(world: World, own: int, seed: int, *numbers: int) -> Iterator[None]:
    noise = nullcontext() if world.forward_noise is None else world.forward_noise.drawing(seed, *numbers)
    with noise, seeded_generators(own, world.device), world.autocast():
        yield


def _mean_gradient(world: World, images: Tensor, labels: Tensor, batch_size: int) -> Vector:
    """The sum of the gradients divided by the public batch size (a Poisson batch has another, private size)."""
    losses = example_losses(world.model(images), labels, world.corrected)
    tilt = world.experiment.training.tilt
    weights = torch.full_like(losses.detach(), 1 / batch_size)
    total = losses.sum() / batch_size if tilt is None else batch_loss(losses, weights, tilt)
    return plain_gradient(total, trained_parameters(world.model))
