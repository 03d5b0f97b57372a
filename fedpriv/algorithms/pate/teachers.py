"""Teachers and the student: what is asked of them, in public numbers, and how one network is trained."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.algorithms.pate.settings import PateConfig
from fedpriv.core.config import TrainingConfig
from fedpriv.core.federated import batch_loss, decayed, example_losses
from fedpriv.core.optimizers import make_optimizer
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.world import World
from fedpriv.gradients import Vector, plain_gradient


def asked_rows(world: World) -> Tensor:
    """Return the test images (Q,) that are spent on votes, drawn by the seed, in the order in which they are asked."""
    order = numpy_stream(world.experiment.seed, "questions").permutation(len(world.dataset.x_test))
    return torch.from_numpy(order[: PateConfig.required(world.experiment).queries])


def questions(world: World) -> Tensor:
    """Return the public images (Q, C, H, W), uint8, that teachers vote on."""
    return world.dataset.x_test[asked_rows(world)]


def teachers(world: World) -> int:
    """Return how many vote, if all clients do; a public number."""
    return world.experiment.federation.clients * PateConfig.required(world.experiment).teachers_per_client


def noise_of_votes(world: World) -> float:
    """Return the deviation of the noise on each count, in votes, where normal noise is on counts alone."""
    return PateConfig.required(world.experiment).sigma2 * teachers(world)


def votes_type(world: World) -> torch.dtype:
    """Return the numbers in which votes travel: the smallest that hold all classes."""
    return torch.uint8 if world.dataset.classes <= 256 else torch.int16


def teach(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    training: TrainingConfig,
    epochs: int,
    stream: np.random.Generator,
    autocast: Callable[[], AbstractContextManager[object]],
) -> None:
    """Train a network in place on normalised images (n, C, H, W) by the settings' loss; none leave it as it is."""
    optimizer = make_optimizer(training.optimizer, training.learning_rate, training.momentum)
    parameters: Vector = {name: value for name, value in model.named_parameters() if value.requires_grad}
    size = min(training.batch_size, len(labels))
    model.train()
    for _ in range(epochs if size else 0):
        order = torch.from_numpy(stream.permutation(len(labels))).to(labels.device)
        for rows in order[: len(labels) // size * size].split(size):
            with autocast():
                losses = example_losses(model(inputs[rows]), labels[rows])
                loss = batch_loss(losses, torch.full_like(losses.detach(), 1 / size), training.tilt)
            optimizer.step(parameters, decayed(plain_gradient(loss, parameters), parameters, training.weight_decay))
    model.eval()
