"""Supervised training of one network: a teacher at a client, the student at the server."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.core.config import TrainingConfig
from fedpriv.core.federated import batch_loss, decayed, example_losses
from fedpriv.core.optimizers import make_optimizer
from fedpriv.gradients import Vector, plain_gradient


def teach(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    training: TrainingConfig,
    epochs: int,
    stream: np.random.Generator,
    autocast: Callable[[], AbstractContextManager[object]],
) -> None:
    """Train a network in place, by the loss of shuffled batches that the settings name; an optimiser starts afresh.

    Inputs are normalised images (n, C, H, W) on the model's device; none leave the model as it is.
    """
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
