"""Victims for the attacks' tests: networks, real digits, and uploads computed the plain way, one client at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.gradients import DenseGradients, Vector
from fedpriv.mechanisms import mechanism_settings
from fedpriv.models.convnets import LenetSettings
from fedpriv.models.machinery.build import build_model
from fedpriv.models.perceptrons import MlpSettings
from tests.noise import stream

MEAN, STD = 0.3, 0.35
NONE = {"name": "none"}


def lenet(init: str = "uniform", seed: int = 1) -> nn.Module:
    return build_model(LenetSettings(init=init), (1, 8, 8), 10, seed)


def mlp(activation: str = "sigmoid", hidden: tuple[int, ...] = (64,), seed: int = 1) -> nn.Module:
    return build_model(MlpSettings(hidden=hidden, activation=activation), (1, 8, 8), 10, seed)


@lru_cache
def digits() -> tuple[Tensor, Tensor]:
    """All scikit-learn digits: images (1797, 1, 8, 8) in [0, 1] and labels."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def settings(**changes: Any) -> PublicSettings:
    usual = PublicSettings(
        model={"name": "lenet"}, shape=(1, 8, 8), classes=10, mean=(MEAN,), std=(STD,), algorithm="fedsgd",
        batch_size=1, local_steps=1, learning_rate=0.1, optimizer="sgd", momentum=0.0, client_examples=100,
        mechanism=NONE,
    )  # fmt: skip
    return replace(usual, **changes)


def normalise(images: Tensor) -> Tensor:
    return (images - MEAN) / STD


def parameters_of(model: nn.Module) -> Vector:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def example_gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Each example's gradient by plain autograd, one at a time: tensors (B, *shape)."""
    names = [name for name, _ in model.named_parameters()]
    rows = [
        torch.autograd.grad(F.cross_entropy(model(x[k : k + 1]), y[k : k + 1]), list(model.parameters()))
        for k in range(len(x))
    ]
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}


def observe(
    model: nn.Module, images: Tensor, labels: Tensor, *, client: int = 0, round_number: int = 1,
    mechanism: Mapping[str, Any] = NONE, noise_seed: int = 0, **changes: Any,
) -> Observation:  # fmt: skip
    """One FedSGD upload of a batch of images (B, C, H, W) on the [0, 1] scale."""
    reference = next(model.parameters())
    x = normalise(images).to(reference)
    config = mechanism_settings(mechanism)
    built = config.mechanism()
    generator = stream(noise_seed + 1000 * client)
    upload = built.release(DenseGradients(example_gradients(model, x, labels)), len(x), generator)
    changes = {"mechanism": dict(mechanism), "batch_size": len(x), "shape": tuple(x.shape[1:]), **changes}
    return Observation(round_number, client, parameters_of(model), upload, settings(**changes))


def observe_digits(
    model: nn.Module, count: int, first: int = 0, **changes: Any
) -> tuple[list[Observation], Tensor, Tensor]:
    """Observations of single digits, one client each, with the images (count, 1, 1, 8, 8) and labels (count, 1)."""
    images, labels = digits()
    chosen = range(first, first + count)
    heard = [observe(model, images[[i]], labels[[i]], client=k, **changes) for k, i in enumerate(chosen)]
    return heard, images[list(chosen)][:, None], labels[list(chosen)][:, None]


def errors(images: Sequence[Tensor], truth: Tensor) -> Tensor:
    """MSE on [0, 1] of each victim: (V,)."""
    return (torch.stack(list(images)) - truth).square().flatten(1).mean(dim=1)


class Patches(nn.Module):
    """A small vision transformer: kernels of patches, a table of positions, attention, a last layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.patches, self.positions = nn.Conv2d(1, width, 2, 2), nn.Parameter(torch.randn(1, 17, width))
        self.block = nn.TransformerEncoderLayer(width, width // 8, 64, dropout=0.0, batch_first=True)
        self.output = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        made = self.patches(images).flatten(2).mT
        made = torch.cat([made.new_zeros(len(made), 1, made.shape[2]), made], dim=1) + self.positions
        return self.output(self.block(made).mean(dim=1))


class OwnHead(nn.Module):
    """An own network without a Linear layer at its end: matrix and offset are bare parameters, registered first."""

    def __init__(self, classes: int = 10, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.offset = nn.Parameter(torch.randn(classes, generator=generator))
        self.matrix = nn.Parameter(torch.randn(classes, 24, generator=generator) / 5)
        self.body = nn.Parameter(torch.randn(64, 24, generator=generator) / 8)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x.flatten(1) @ self.body) @ self.matrix.T + self.offset


class Biasless(nn.Module):
    """No bias anywhere."""

    def __init__(self, activation: Callable[[Tensor], Tensor], seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(64, 32, bias=False)
            self.last = nn.Linear(32, 10, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.first(x.flatten(1))))


class Headless(nn.Module):
    """Logits that no single tensor shifts or scales: they are normalised at the end."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first = nn.Linear(64, 48)
            self.last = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.tanh(self.last(torch.sigmoid(self.first(x.flatten(1)))))
