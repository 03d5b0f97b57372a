"""Cloak: noise that a client learns to put on what it asks an endpoint (Mireshghallah et al., WWW 2021).

The model stays as it is. Each feature gets a shift and a deviation of its own: large where the model does not look. It
is a heuristic: it is no differential privacy, and nothing is proven about what somebody reads out of a question.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

Model = Callable[[Tensor], Tensor]
"""Images (n, C, H, W), floating point on the scale of [0, 1] -> logits (n, classes), differentiable."""

# Deviations begin in the middle of their range, and shrink where noise hurts; from small ones few would ever grow.
_START = 0.0


@dataclass(frozen=True, eq=False)
class Cloak:
    """What a client does to an image before it asks: kept features get noise, the others are the same in all images."""

    shift: Tensor  # (C, H, W), mu, added to the kept features
    sigma: Tensor  # (C, H, W), the deviation of each one's noise, in pixels from 0 to 1
    kept: Tensor  # (C, H, W), bool
    constants: Tensor  # (C, H, W), what stands in place of the others
    clamped: bool  # whether what is sent is put back onto [0, 1], as endpoints of images want it

    def hide(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return images (n, C, H, W) as they are sent, each with noise of its own."""
        noise = torch.randn(images.shape, generator=generator, dtype=images.dtype)
        sent = torch.where(self.kept, images + self.shift + self.sigma * noise, self.constants)
        return (sent.clamp(0, 1) if self.clamped else sent).to(images.dtype)

    def bits(self, variances: Tensor) -> float:
        """Return what one sent image tells of the image at most, in bits, whatever the data look like.

        The sum of log2(1 + variance / sigma^2) / 2 over the kept features: the capacity of as many Gaussian channels
        (Cover and Thomas, Elements of Information Theory, section 9.4), which features that depend on one another do
        not reach. Clamping tells no more. Of an image that is sent k times it is at most k times as much.
        """
        ratio = torch.where(self.kept, variances / self.sigma.square(), torch.zeros_like(variances))
        return float((torch.log2(1 + ratio) / 2).sum())


@dataclass(frozen=True)
class Learning:
    """How noise is learnt."""

    weight: float  # lambda, of the cross entropy against -log of the noise power
    least: float = 1e-3  # m, of each deviation, above 0
    most: float = 1.5  # M, of each deviation, above `least`
    steps: int = 1500  # of Adam
    rate: float = 0.05  # of its steps
    batch: int = 128  # images of a step
    clamped: bool = False  # as in Cloak

    def deviations(self, rho: Tensor) -> Tensor:
        """Return sigma = m + (1 + tanh rho) (M - m) / 2, from m to M."""
        return self.least + (1 + torch.tanh(rho)) * (self.most - self.least) / 2


def uniform_noise(shape: Sequence[int], sigma: float, clamped: bool) -> Cloak:
    """Return what Cloak is compared with: one deviation for all features (C, H, W), nothing shifted or suppressed."""
    nothing = torch.zeros(shape, dtype=torch.float64)
    return Cloak(nothing, nothing + sigma, nothing == 0, nothing, clamped)


def cloak_loss(
    model: Model, cloak: Cloak, weight: float, images: Tensor, labels: Tensor, generator: torch.Generator
) -> Tensor:
    """Return -log mean sigma^2 + lambda CE(f(x + mu + sigma z), y), a number, differentiable in shift and sigma."""
    entropy = functional.cross_entropy(model(cloak.hide(images, generator)), labels)
    return weight * entropy - cloak.sigma.square().mean().log()


def learn_noise(model: Model, images: Tensor, labels: Tensor, learning: Learning, generator: torch.Generator) -> Cloak:
    """Learn shift and deviations on public images: what is learnt from somebody's own images may tell of them."""
    shift = torch.zeros(images.shape[1:], dtype=images.dtype, requires_grad=True)
    rho = torch.full_like(shift, _START).requires_grad_()
    even = uniform_noise(images.shape[1:], 1.0, learning.clamped)
    optimizer = torch.optim.Adam([shift, rho], lr=learning.rate)
    for batch, wanted in _batches(images, labels, learning, generator):
        cloak = replace(even, shift=shift, sigma=learning.deviations(rho))
        optimizer.zero_grad()
        cloak_loss(model, cloak, learning.weight, batch, wanted, generator).backward()
        optimizer.step()
    return replace(even, shift=shift.detach(), sigma=learning.deviations(rho).detach())


def suppress(
    cloak: Cloak,
    threshold: float,
    model: Model,
    images: Tensor,
    labels: Tensor,
    learning: Learning,
    generator: torch.Generator,
) -> Cloak:
    """Send a constant in place of each feature whose deviation is above a threshold, trained for the cross entropy."""
    kept = cloak.sigma <= threshold
    constants = (images.mean(dim=0) + cloak.shift).requires_grad_()
    optimizer = torch.optim.Adam([constants], lr=learning.rate)
    for batch, wanted in _batches(images, labels, learning, generator):
        sent = replace(cloak, kept=kept, constants=constants).hide(batch, generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(sent), wanted).backward()
        optimizer.step()
    return replace(cloak, kept=kept, constants=constants.detach())


def _batches(
    images: Tensor, labels: Tensor, learning: Learning, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(learning.steps):
        rows = torch.randint(len(images), (min(learning.batch, len(images)),), generator=generator)
        yield images[rows], labels[rows]
