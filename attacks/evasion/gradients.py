"""What an evasion attack climbs: the loss of the network as it is, or through the expectation over its noise."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.smoothing import SmoothedNetwork

__all__ = ["Loss", "PlainTarget", "SmoothedTarget", "Target", "gradient"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""Images (B, C, H, W) on [0, 1] and labels (B,) -> each image's own loss (B,), differentiable by the images."""


class Target(Protocol):
    """A network that is attacked, and that judges by its votes."""

    @property
    def noisy(self) -> bool:
        """Whether there is noise in it."""

    @property
    def dimension(self) -> int:
        """How many numbers it draws for one image; without noise, how many it is fed."""

    def loss(self, draws: int, stream: torch.Generator) -> Loss:
        """Return the loss through so many draws of noise, new ones whenever it is asked; 0: without noise."""

    def votes(self, images: Tensor, count: int, purpose: str, rows: Sequence[int]) -> Tensor:
        """Return how often each class wins, (B, classes), int64; as ``SmoothedNetwork.votes``."""


@dataclass(frozen=True, eq=False)
class PlainTarget:
    """A network without noise: each image has one vote.

    Attributes:
        network: in evaluation mode.
        normalise: (B, C, H, W) on [0, 1] -> what the network is fed.
        classes: number of logits.
        dimension: numbers of an image.
    """

    network: nn.Module
    normalise: Callable[[Tensor], Tensor]
    classes: int
    dimension: int

    @property
    def noisy(self) -> bool:
        """There is no noise."""
        return False

    def loss(self, draws: int, stream: torch.Generator) -> Loss:
        """Return the cross entropy; there is nothing to draw."""
        return lambda images, labels: functional.cross_entropy(
            self.network(self.normalise(images)), labels, reduction="none"
        )

    def votes(self, images: Tensor, count: int, purpose: str, rows: Sequence[int]) -> Tensor:
        """Return one vote of each image, whatever ``count`` says."""
        with torch.inference_mode():
            won = self.network(self.normalise(images)).argmax(dim=1)
        return functional.one_hot(won, self.classes).cpu()


@dataclass(frozen=True, eq=False)
class SmoothedTarget:
    """A network with noise in it.

    Attributes:
        network: answers with votes.
    """

    network: SmoothedNetwork

    @property
    def noisy(self) -> bool:
        """There is noise."""
        return True

    @property
    def dimension(self) -> int:
        """K, at the place of the noise."""
        return self.network.smoothing.spread.numel()

    def loss(self, draws: int, stream: torch.Generator) -> Loss:
        """Return -log of the mean over draws of the label's probability (Salman et al. 2019, SmoothAdv).

        With ``draws`` = 0 it is the cross entropy of the network without its noise, as in the paper's code.
        """
        network = self.network
        if not draws:
            return PlainTarget(network.network, network.normalise, network.classes, self.dimension).loss(0, stream)

        def expected(images: Tensor, labels: Tensor) -> Tensor:
            logits = network.noisy_logits(images, draws, stream)
            own = functional.log_softmax(logits, dim=2).gather(2, labels.expand(draws, -1)[..., None])[..., 0]
            return math.log(draws) - own.logsumexp(dim=0)

        return expected

    def votes(self, images: Tensor, count: int, purpose: str, rows: Sequence[int]) -> Tensor:
        """Ask the smoothed network."""
        return self.network.votes(images, count, purpose, rows)


def gradient(loss: Loss, images: Tensor, labels: Tensor) -> Tensor:
    """Return each image's gradient of its own loss, (B, C, H, W), detached.

    Where it is not finite it is taken for zero: an image moved by it would be none, and what it shows no evidence.
    """
    leaf = images.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf, labels).sum(), leaf)
    return slope.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
