"""Small networks with noise, and the same first layers as matrices by autograd."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedpriv.core.randomness import torch_stream
from fedpriv.robustness.noise import RobustnessNoise, noise_layers
from fedpriv.robustness.norms import FirstLayer

__all__ = ["Bent", "Skip", "first_layer", "jacobian", "normalised", "seeded"]


def seeded(make: type[nn.Module], *arguments: object, seed: int = 0, **named: object) -> nn.Module:
    """A layer whose weights are drawn by a seed."""
    layer = make(*arguments, **named)
    stream = torch_stream(seed, "weights")
    with torch.no_grad():
        for value in layer.parameters():
            value.copy_(torch.randn(value.shape, generator=stream) / 3)
    return layer


def normalised(mean: Sequence[float], std: Sequence[float], pixels: Tensor) -> Tensor:
    """As data sets do it."""
    middle, scale = (torch.tensor(values, dtype=pixels.dtype)[:, None, None] for values in (mean, std))
    return (pixels - middle) / scale


def first_layer(
    network: nn.Module, shape: tuple[int, int, int], mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
) -> FirstLayer:
    """How images of one or more channels, with these constants, reach the noise."""
    return FirstLayer(network.eval(), noise_layers(network)[0], partial(normalised, mean, std), shape)


def jacobian(first: FirstLayer, layer: nn.Module | None) -> Tensor:
    """W, (K, d), float64, by autograd through normalisation and the layer itself; ``None``: noise on the image."""

    def value(pixels: Tensor) -> Tensor:
        inputs = first.normalise(pixels)
        return (inputs if layer is None else layer.double()(inputs)).flatten()

    found = torch.autograd.functional.jacobian(value, torch.rand(1, *first.shape, dtype=torch.float64))
    if layer is not None:
        layer.float()
    return found.reshape(len(found), -1)


class Skip(nn.Module):
    """What goes past the noise: the input itself, or its mean."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.noisy = how, RobustnessNoise(nn.Linear(16, 16))
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        hidden = torch.relu(self.noisy(x))
        if self.how == "input":
            hidden = hidden + 1e-3 * x
        elif self.how == "mean":
            hidden = hidden * (1 + 1e-3 * x.mean(dim=1, keepdim=True))
        elif self.how == "sign":
            hidden = hidden * x.sum(dim=1, keepdim=True).sign()
        elif self.how == "value only":
            hidden = hidden + 1e-3 * x.detach()
        elif self.how == "gradient only":  # a straight-through trick: the value stays, the gradient does not
            hidden = hidden + (x - x.detach())
        elif self.how == "twice":
            hidden = hidden + self.noisy(x)
        return self.last(hidden)


class Bent(nn.Module):
    """What reaches the noise is not affine in the image."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.noisy, self.last = how, RobustnessNoise(nn.Linear(16, 16)), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        bent = {"relu": torch.relu, "square": torch.square, "scaled": lambda v: v / v.norm(dim=1, keepdim=True)}[
            self.how
        ]
        return self.last(torch.relu(self.noisy(bent(x))))
