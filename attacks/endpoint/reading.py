"""What a curious endpoint reads out of the images that it is asked about, when people put noise on them.

It knows what noise that is (Kerckhoffs), and has public images with the attribute that it is after. First it takes off
as much noise as a linear filter can; then a network learns from public images, sent as people send theirs, with fresh
noise at every step.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.attacks.endpoint.scene import Network
from fedpriv.cloak import Cloak, uniform_noise
from fedpriv.core.randomness import torch_stream
from fedpriv.core.records import CONFIDENCE, Interval

__all__ = ["Reader", "Training", "equal_uniform", "linear_filter", "mean_interval", "right_rates", "trained_reader"]

Rates = NDArray[np.float64]
"""One an image: the share of draws of noise in which it was read, or answered, correctly."""

DRAWS = 4  # of noise, that each judged image is sent with
_TWO_SIDED = 1.96
# Even noise is searched for up to this deviation, in pixels from 0 to 1, to a thousandth of it.
_LARGEST, _HALVINGS = 8.0, 12
_FREE = 0.0025  # of the accuracy: what noise that is hardly there may cost


@dataclass(frozen=True)
class Training:
    """How an adversary's network is trained, by Adam.

    Attributes:
        steps: each with fresh noise.
        filtered: whether noise is taken off first.
        batch: images of a step.
        rate: of its steps.
    """

    steps: int
    filtered: bool = True
    batch: int = 128
    rate: float = 1e-3


@dataclass(frozen=True, eq=False)
class Reader:
    """A network behind a linear filter, in float32.

    Attributes:
        network: filtered images -> logits of the attribute.
        sent: (d,), mean of public images as they are sent.
        factors: what images less ``sent`` are multiplied by, (d, r) and (r, d), or (d, d); empty: nothing.
        scale: that what comes out is divided by.
    """

    network: nn.Module
    sent: Tensor
    factors: tuple[Tensor, ...]
    scale: Tensor

    def logits(self, images: Tensor) -> Tensor:
        """Return logits (n, values) for images (n, C, H, W) as they are sent."""
        flat = images.float().flatten(1) - self.sent
        for factor in self.factors:
            flat = flat @ factor
        logits: Tensor = self.network((flat / self.scale).view(images.shape))
        return logits


def linear_filter(images: Tensor, cloak: Cloak) -> tuple[Tensor, ...]:
    """Return the best linear estimate of images from what is sent: what to multiply deviations from the mean by.

    With S the covariance of public images and D that of the noise, S (S + D)^-1 (Wiener 1949), transposed. What is
    suppressed is noise without end, and is estimated from what is kept. Clamping is not taken into account.

    Args:
        images: (n, C, H, W), public, float64.
        cloak: known to the adversary.

    Returns:
        One factor (d, d), or (d, r) and (r, d) where that is less work.
    """
    flat = images.flatten(1)
    root = (flat - flat.mean(dim=0)) / len(flat) ** 0.5  # S = root^T root
    if len(root) > root.shape[1]:
        root = torch.linalg.qr(root).R
    precision = torch.where(cloak.kept, cloak.sigma**-2, torch.zeros_like(cloak.sigma)).flatten()
    weighed = root * precision
    inner = torch.linalg.solve(torch.eye(len(root), dtype=root.dtype) + weighed @ root.T, root)
    if 2 * len(root) < root.shape[1]:
        return weighed.T, inner
    return (weighed.T @ inner,)


def trained_reader(
    network: nn.Module, cloak: Cloak, images: Tensor, wanted: Tensor, training: Training, seed: int
) -> Reader:
    """Train a network to read the attribute out of what is sent.

    Args:
        network: untrained, images (n, C, H, W) -> logits; it is trained in place.
        cloak: what people do to images.
        images: (n, C, H, W) on [0, 1], public, float64.
        wanted: (n,), int64, the attribute.
        training: how.
        seed: of batches and noise.
    """
    stream = torch_stream(seed, "probe-reading")
    factors = tuple(factor.float() for factor in linear_filter(images, cloak)) if training.filtered else ()
    sent = cloak.hide(images, stream).float().flatten(1)
    scale = images.flatten(1).std(dim=0).square().mean().sqrt().float()
    reader = Reader(network.train(), sent.mean(dim=0), factors, scale)
    optimizer = torch.optim.Adam(network.parameters(), lr=training.rate)
    for _ in range(training.steps):
        rows = torch.randint(len(images), (min(training.batch, len(images)),), generator=stream)
        optimizer.zero_grad()
        functional.cross_entropy(reader.logits(cloak.hide(images[rows], stream)), wanted[rows]).backward()
        optimizer.step()
    network.eval().requires_grad_(False)
    return reader


def right_rates(network: Network, cloak: Cloak, images: Tensor, wanted: Tensor, seed: int) -> Rates:
    """Return how often the largest logit is the wanted one, for each image (n,), over draws of the noise.

    The draws are the same for every network and deviation: what is compared differs in nothing else.

    Args:
        network: images as they are sent -> logits.
        cloak: what people do to images.
        images: (n, C, H, W) on [0, 1], float64.
        wanted: (n,), int64.
        seed: of the noise.
    """
    stream = torch_stream(seed, "probe-sent")
    right = torch.zeros(len(images), dtype=torch.float64)
    with torch.no_grad():
        for _ in range(DRAWS):
            sent = cloak.hide(images, stream)
            named = torch.cat([network(part).argmax(dim=1) for part in sent.split(512)])
            right += named == wanted
    rates: Rates = (right / DRAWS).numpy()
    return rates


def mean_interval(values: Rates) -> Interval:
    """Return the mean of values, one an image, and its normal interval of 95 %; at least two images."""
    mean, reach = float(values.mean()), _TWO_SIDED * float(values.std(ddof=1)) / len(values) ** 0.5
    return Interval(mean, mean - reach, mean + reach, CONFIDENCE)


def equal_uniform(answers: Network, accuracy: float, images: Tensor, labels: Tensor, seed: int, clamped: bool) -> Cloak:
    """Return the strongest even noise with which answers stay as often right as wanted, by bisection.

    Where noise that is hardly there costs more than that, it is the strongest that costs a quarter of a point.

    Args:
        answers: of the model, images as they are sent -> logits.
        accuracy: wanted.
        images: (n, C, H, W) on [0, 1], float64.
        labels: (n,), of the model's task.
        seed: of the noise.
        clamped: as in :class:`~fedpriv.cloak.Cloak`.
    """

    def accurate(sigma: float) -> float:
        cloak = uniform_noise(images.shape[1:], sigma, clamped)
        return float(right_rates(answers, cloak, images, labels, seed).mean())

    wanted = min(accuracy, accurate(0.0)) - _FREE
    low, high = 0.0, _LARGEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if accurate(middle) >= wanted else (low, middle)
    return uniform_noise(images.shape[1:], low, clamped)
