"""FedAvg on dummy data: a client's local steps, carried out so that its update can be differentiated.

After several steps an update is no longer a gradient: parameters move between the steps, momentum weighs them
unequally, and Adam normalises them. So the adversary trains on the dummies as the client did on its images, with the
public optimiser, learning rate, batch size and number of steps, and compares the updates (Geiping et al. 2020,
section 6).

Which examples were in which batch is not known. The dummies are taken in a fixed order, batch after batch, and from the
start again when all have been used: in each epoch the same batches. A client shuffles anew in each epoch; what that
changes in the update is of the second order in the learning rate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.gradients import Vector
from fedpriv.optimizers import ADAM_BETAS, ADAM_EPSILON, momentum_weights

__all__ = ["LocalTraining", "local_optimizer", "unrolled_update"]


@dataclass(frozen=True)
class LocalTraining:
    """The public facts of what a client does between the parameters that it is sent and its upload.

    Attributes:
        optimizer: sgd or adam.
        learning_rate: of the optimiser.
        momentum: of sgd, from 0 up to 1.
        steps: optimiser steps.
        batch_size: examples in the batch of a step.
        clients: how many clients' updates are averaged; each trains on its own share of the dummies.
    """

    optimizer: Literal["sgd", "adam"]
    learning_rate: float
    momentum: float
    steps: int
    batch_size: int
    clients: int = 1

    @property
    def is_gradient(self) -> bool:
        """Whether the update is a multiple of one batch's mean gradient, so that there is nothing to unroll."""
        return self.steps == 1 and self.optimizer == "sgd"

    @property
    def length(self) -> float:
        """By how much the update is longer than the mean gradient, were the gradient the same in all steps.

        For sgd the sum of the steps' weights, learning_rate * steps without momentum; Adam's update has no such factor,
        and the same number brings it to an order of magnitude of 1.
        """
        if self.optimizer == "adam":
            return self.learning_rate * self.steps
        return self.learning_rate * sum(self._weights)

    @property
    def equal_steps(self) -> float:
        """How many steps of equal weight would average noise of their own as much; ``steps`` without momentum."""
        return sum(self._weights) ** 2 / sum(weight**2 for weight in self._weights)

    @property
    def _weights(self) -> list[float]:
        return momentum_weights(self.steps, self.momentum)

    def batches(self, examples: int) -> list[list[int]]:
        """The numbers of the dummies, of one client's ``examples``, in the batch of each step."""
        size = min(self.batch_size, examples)
        return [[(step * size + place) % examples for place in range(size)] for step in range(self.steps)]


def unrolled_update(
    network: Network,
    parameters: Vector,
    images: Tensor,
    labels: Tensor,
    training: LocalTraining,
    release: Callable[[Vector], Vector] | None = None,
) -> Vector:
    """Train on dummy data and return parameters after minus before, differentiable in images and label probabilities.

    Takes ``steps`` times the memory of written-out gradients, N * K numbers each and more to differentiate them.

    Args:
        network: the network.
        parameters: what the clients started from, shared by all rows.
        images: (N, B, C, H, W), normalised; B is a multiple of ``training.clients``.
        labels: probabilities (N, B, classes).
        training: how the client trains.
        release: maps the gradients (N, b, *shape) of a step's b examples to the gradient (N, *shape) that is expected
            to be used in it, where a mechanism privatises each step; ``None``: their mean is used as it is.

    Returns:
        Tensors (N, *shape): the mean update of the clients. It points downhill, against the gradient.

    Raises:
        AttackRefused: the network cannot be differentiated this way.
    """
    rows = len(images)
    images, labels = (values.unflatten(1, (training.clients, -1)).flatten(0, 1) for values in (images, labels))
    start = {name: parameters[name].detach() for name in network.names}
    optimizer = local_optimizer(training)
    change: Vector = {}
    for batch in training.batches(images.shape[1]):
        now = {name: start[name] + value for name, value in change.items()} or start
        each = release is not None
        gradients = network.gradients(now, images[:, batch], labels[:, batch], shared=not change, each=each)
        step = optimizer(gradients if release is None else release(gradients))
        change = {name: change[name] + value for name, value in step.items()} if change else step
    return {name: value.unflatten(0, (rows, training.clients)).mean(dim=1) for name, value in change.items()}


Step = Callable[[Vector], Vector]
"""(gradients) -> the change of the parameters, of an optimiser that remembers the steps before."""


def local_optimizer(training: LocalTraining) -> Step:
    """Return a client's optimiser, afresh, as torch has it, for tensors of any shape; it can be differentiated."""
    return _adam(training.learning_rate) if training.optimizer == "adam" else _sgd(training)


def _sgd(training: LocalTraining) -> Step:
    velocity: Vector = {}

    def step(gradients: Vector) -> Vector:
        for name, value in gradients.items():
            again = name in velocity and training.momentum
            velocity[name] = training.momentum * velocity[name] + value if again else value
        return {name: -training.learning_rate * value for name, value in velocity.items()}

    return step


def _adam(rate: float) -> Step:
    means: tuple[Vector, Vector] = ({}, {})
    steps = 0

    def step(gradients: Vector) -> Vector:
        nonlocal steps
        steps += 1
        for name, value in gradients.items():
            for mean, beta, new in zip(means, ADAM_BETAS, (value, value.square()), strict=True):
                share = (1 - beta) * new
                mean[name] = beta * mean[name] + share if name in mean else share
        return {name: change(*(mean[name] for mean in means)) for name in gradients}

    def change(first: Tensor, second: Tensor) -> Tensor:
        first, second = first / (1 - ADAM_BETAS[0] ** steps), second / (1 - ADAM_BETAS[1] ** steps)
        # The root of zero has no derivative, so a zero is replaced before the root is taken.
        positive = second > 0
        root = torch.where(positive, torch.where(positive, second, 1.0).sqrt(), 0.0)
        return -rate * first / (root + ADAM_EPSILON)

    return step
