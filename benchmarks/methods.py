"""One training step in each of the ways that are compared: plain, privatised by fedpriv, privatised by Opacus.

Each builder returns a function without arguments that does a whole step on one fixed batch: forward, backward, noise,
update of the parameters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.gradients import GradientOperator, Vector, per_example_gradients
from fedpriv.gradients.dense import dense_gradients
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.machinery.base import Mechanism
from fedpriv.mechanisms.machinery.cosine import draw_cosines
from fedpriv.mechanisms.vmf import VmfMechanism
from fedpriv.models import ModelSettings
from fedpriv.models.convnet import ConvnetSettings
from fedpriv.models.lenet import LenetSettings
from fedpriv.models.machinery.build import build_model
from fedpriv.models.mlp import MlpSettings
from fedpriv.randomness import Secret, numpy_stream, torch_stream

__all__ = ["METHODS", "MODELS", "Setting", "Step"]

Step = Callable[[], None]

CLIP_NORM, SIGMA, KAPPA = 1.0, 1.0, 50.0
LEARNING_RATE = 1e-3
CLASSES = 10
LOSS = partial(functional.cross_entropy, reduction="none")


@dataclass(frozen=True)
class Setting:
    """A network and the shape (C, H, W) of its images."""

    config: ModelSettings
    shape: tuple[int, int, int]


MODELS = {
    "lenet": Setting(LenetSettings(), (3, 32, 32)),
    "mlp(1024,1024)": Setting(MlpSettings(hidden=(1024, 1024)), (3, 32, 32)),
    "mlp(128)": Setting(MlpSettings(hidden=(128,)), (1, 28, 28)),
    "convnet": Setting(ConvnetSettings(), (3, 32, 32)),
}


def _network(setting: Setting) -> nn.Module:
    return build_model(setting.config, setting.shape, CLASSES, seed=0)


def _batch(setting: Setting, batch: int) -> tuple[Tensor, Tensor]:
    """Random images that look like normalised ones, and labels."""
    generator = torch_stream(0, "benchmark batch", batch)
    images = torch.randn(batch, *setting.shape, generator=generator)
    return images, torch.randint(CLASSES, (batch,), generator=generator)


def _optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _stepping(optimizer: torch.optim.Optimizer, loss: Callable[[], Any]) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def _releasing(setting: Setting, batch: int, release: Callable[[nn.Module, Tensor, Tensor], Vector]) -> Step:
    """A step along what is released of the model's gradients at a batch."""
    model, (x, y) = _network(setting), _batch(setting, batch)
    optimizer, parameters = _optimizer(model), dict(model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        for name, value in release(model, x, y).items():
            parameters[name].grad = value
        optimizer.step()

    return step


def _sgd(setting: Setting, batch: int) -> Step:
    model, (x, y) = _network(setting), _batch(setting, batch)
    return _stepping(_optimizer(model), lambda: functional.cross_entropy(model(x), y))


def _ghost(mechanism: Mechanism, setting: Setting, batch: int) -> Step:
    """What a client of fedpriv does in a step."""
    noise = Secret.of_seed(0).stream("benchmark noise")
    return _releasing(
        setting, batch, lambda model, x, y: mechanism.release(per_example_gradients(model, LOSS, x, y), batch, noise)
    )


def _vmf_dense(setting: Setting, batch: int) -> Step:
    """The way of every implementation known to us: B gradients of K numbers, and a draw of K numbers for each."""
    draws = torch_stream(0, "benchmark noise"), numpy_stream(0, "benchmark noise")
    return _releasing(
        setting,
        batch,
        lambda model, x, y: _separate_draws(dense_gradients(model, LOSS, x, y, "the benchmark's reference"), *draws),
    )


def _separate_draws(gradients: GradientOperator, generator: torch.Generator, rng: np.random.Generator) -> Vector:
    """The mean of one von Mises-Fisher draw an example, each made of K normal numbers of its own."""
    cosines = draw_cosines(KAPPA, gradients.dimension(), gradients.examples, rng)
    total = {name: torch.zeros(shape) for name, shape in gradients.shapes.items()}
    for index in range(gradients.examples):
        own = {name: value[0] for name, value in gradients.rows(index, index + 1).items()}
        noise = {name: torch.randn(shape, generator=generator) for name, shape in gradients.shapes.items()}
        squared = _inner(own, own)
        share = _inner(own, noise) / squared
        length = math.sqrt(_inner(noise, noise) - share**2 * squared)
        cosine, sine = float(cosines.cosine[index]), float(cosines.sine[index])
        along = cosine / math.sqrt(squared) - sine * share / length
        for name, value in total.items():
            value.add_(own[name], alpha=along / gradients.examples)
            value.add_(noise[name], alpha=sine / length / gradients.examples)
    return total


def _inner(left: Vector, right: Vector) -> float:
    return sum(float(torch.dot(value.flatten(), right[name].flatten())) for name, value in left.items())


def _opacus_hooks(setting: Setting, batch: int) -> Step:
    model, (x, y) = GradSampleModule(_network(setting)), _batch(setting, batch)
    optimizer = DPOptimizer(_optimizer(model), **_noise_of_opacus(batch))
    return _stepping(optimizer, lambda: functional.cross_entropy(model(x), y))


def _opacus_ghost(setting: Setting, batch: int) -> Step:
    x, y = _batch(setting, batch)
    model = GradSampleModuleFastGradientClipping(_network(setting), max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(_optimizer(model), **_noise_of_opacus(batch))
    criterion = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())
    return _stepping(optimizer, lambda: criterion(model(x), y))


def _noise_of_opacus(batch: int) -> dict[str, Any]:
    return {
        "noise_multiplier": SIGMA,
        "max_grad_norm": CLIP_NORM,
        "expected_batch_size": batch,
        "generator": torch_stream(0, "benchmark noise"),
    }


METHODS: dict[str, Callable[[Setting, int], Step]] = {
    "sgd": _sgd,
    "gaussian-ghost": partial(_ghost, GaussianMechanism(SIGMA, CLIP_NORM)),
    "vmf-ghost": partial(_ghost, VmfMechanism(KAPPA)),
    "vmf-dense": _vmf_dense,
    "opacus-hooks": _opacus_hooks,
    "opacus-ghost": _opacus_ghost,
}
