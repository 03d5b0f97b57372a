"""Copies of a model, trained on its answers (Tramer et al. 2016; Orekondy, Schiele and Fritz 2019, Knockoff Nets)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.attacks.endpoint.scene import Network, Public, Scene
from fedpriv.core.randomness import numpy_stream, torch_stream

__all__ = ["mixed_images", "trained_copy"]

Array = NDArray[np.float64]

# From so many numbers on a step of L-BFGS costs more than many of Adam's.
MOST_FOR_LBFGS = 100_000
LBFGS_STEPS, ADAM_STEPS, ADAM_BATCH, ADAM_RATE = 300, 3000, 256, 1e-3
# Of the squared numbers: holds copies of few answers together, and is far too small to show in those of many.
DECAY = 1e-6


def trained_copy(scene: Scene, images: Tensor, targets: Array, seed: int = 0) -> Network:
    """Train a network of the model's architecture on answers, with the cross entropy of all classes.

    Args:
        scene: knows the architecture.
        images: (n, C, H, W) on [0, 1], at least one.
        targets: (n, classes), probabilities.
        seed: of its first weights, beside the scene's.

    Returns:
        Images -> logits, without gradients of its numbers.
    """
    network = scene.copy(int(numpy_stream(scene.seed, "probe-copy", seed).integers(2**31))).eval()
    inputs, wanted = scene.normalise(images.double()), torch.from_numpy(targets)
    parameters = [value for value in network.parameters() if value.requires_grad]
    if sum(value.numel() for value in parameters) < MOST_FOR_LBFGS:
        _by_lbfgs(network, parameters, inputs, wanted)
    else:
        _by_adam(network, parameters, inputs, wanted, torch_stream(scene.seed, "probe-batches", seed))
    network.requires_grad_(False)
    return lambda asked: network(scene.normalise(asked.double()))


def mixed_images(public: Public, count: int, generator: np.random.Generator) -> Tensor:
    """Draw mixtures of two public images each, with a weight from U(0, 1): (count, C, H, W), float64."""
    pairs = generator.integers(len(public.images), size=(2, count))
    weights = torch.from_numpy(generator.random(count))[:, None, None, None]
    first, second = (public.images[torch.from_numpy(rows)] for rows in pairs)
    return weights * first + (1 - weights) * second


def _loss(network: nn.Module, parameters: list[nn.Parameter], inputs: Tensor, wanted: Tensor) -> Tensor:
    entropy: Tensor = -(wanted * network(inputs).log_softmax(dim=1)).sum(dim=1).mean()
    return entropy + DECAY * sum((value.square().sum() for value in parameters), torch.zeros(()))


def _by_lbfgs(network: nn.Module, parameters: list[nn.Parameter], inputs: Tensor, wanted: Tensor) -> None:
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=LBFGS_STEPS, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(network, parameters, inputs, wanted)
        loss.backward()
        return loss

    optimizer.step(evaluate)


def _by_adam(
    network: nn.Module, parameters: list[nn.Parameter], inputs: Tensor, wanted: Tensor, stream: torch.Generator
) -> None:
    optimizer = torch.optim.Adam(parameters, lr=ADAM_RATE)
    for _ in range(ADAM_STEPS):
        rows = torch.randint(len(inputs), (min(ADAM_BATCH, len(inputs)),), generator=stream)
        optimizer.zero_grad()
        _loss(network, parameters, inputs[rows], wanted[rows]).backward()
        optimizer.step()
