"""What a client computes in one round; it knows no Flower.

FedSGD uploads the privatised mean gradient of one batch, FedAvg the change of the parameters after local training.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.gradients import Vector, per_example_gradients
from fedpriv.optimizers import make_optimizer
from fedpriv.plan import Plan
from fedpriv.randomness import seeded_generators, torch_stream
from fedpriv.world import State, World, tracked_buffers, trained_parameters

__all__ = ["local_upload"]

_MIB = 1 << 20


def local_upload(world: World, client: int, before: State, round_number: int) -> State:
    """Train for one round and return what leaves the client.

    Args:
        world: the experiment, built.
        client: the partition's number, from 0.
        before: the global state that the server sent.
        round_number: the round, from 1.

    Returns:
        Under ``parameters`` the upload: for FedSGD a mean gradient, for FedAvg after minus before, in both cases after
        the mechanism. Under ``buffers`` the change of the running statistics (empty without BatchNorm).
    """
    plan, model = world.plans[client], world.model
    before.load_into(model)
    model.train()
    if world.experiment.federation.algorithm == "fedsgd":
        upload = _gradient(world, plan, plan.steps(round_number)[0])
    else:
        _train(world, plan, round_number)
        upload = {name: value - before.parameters[name] for name, value in State.of(model).parameters.items()}
    if plan.config.unit == "update" and plan.config.name != "none":
        upload = plan.release_update(upload, round_number)
    change = {name: value.cpu() - before.buffers[name] for name, value in tracked_buffers(model).items()}
    if plan.config.name != "none":
        # No mechanism covers running statistics, so none of them leaves.
        change = {name: torch.zeros_like(value) for name, value in change.items()}
    return State({name: value.detach().cpu() for name, value in upload.items()}, change)


def _train(world: World, plan: Plan, round_number: int) -> None:
    """Local epochs of privatised SGD or Adam, in place; the optimiser starts afresh each round."""
    training = world.experiment.training
    optimizer = make_optimizer(training.optimizer, training.learning_rate, training.momentum)
    parameters = trained_parameters(world.model)
    for step in plan.steps(round_number):
        optimizer.step(parameters, _gradient(world, plan, step))


def _gradient(world: World, plan: Plan, step: int) -> Vector:
    """The mean gradient of one step's batch, privatised where the unit is the example."""
    images, labels = world.examples(plan.client, plan.batch(step))
    with _model_randomness(plan, step, world.device), _precision(world):
        if plan.config.name == "none" or plan.config.unit == "update":
            return _mean_gradient(world.model, images, labels, plan.sampling.batch_size)
        memory = world.experiment.engine.gradient_memory * _MIB
        gradients = per_example_gradients(world.model, _loss, images, labels, chunk_bytes=memory)
    # Outside: noise and norms are never computed in bfloat16.
    return plan.release_gradient(gradients, step)


def _precision(world: World) -> torch.autocast:
    """Forward and backward passes in bfloat16 where the settings ask for that."""
    return torch.autocast(world.device.type, torch.bfloat16, enabled=world.experiment.engine.precision == "bfloat16")


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each example, (B,), in float32 at least."""
    precise = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return functional.cross_entropy(precise, labels, reduction="none")


def _mean_gradient(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> Vector:
    """The sum of the gradients divided by the public batch size (a Poisson batch has another, private size)."""
    names, tensors = zip(*trained_parameters(model).items(), strict=True)
    total = _loss(model(images), labels).sum() / batch_size
    gradients = torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)
    return dict(zip(names, gradients, strict=True))


def _model_randomness(plan: Plan, step: int, device: torch.device) -> AbstractContextManager[None]:
    """Give what the model draws at random (dropout) a stream of its own, which starts afresh with every step.

    So what one step draws cannot depend on the examples of an earlier one.
    """
    return seeded_generators(torch_stream(plan.seed, "model-noise", plan.client, step).initial_seed(), device)
