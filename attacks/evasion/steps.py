"""The loop of all evasion attacks: gradient steps inside a ball around the image and inside the range of pixels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.attacks.evasion.table import EvasionAttack
from fedpriv.core.names import NormName

# What an evasion attack climbs: the loss of the network as it is, or through the expectation over its noise.


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
        """Return how often each class wins, (B, classes), int64, on the CPU."""


@dataclass(frozen=True, eq=False)
class PlainTarget:
    """A network without noise: each image has one vote."""

    network: nn.Module  # in evaluation mode
    normalise: Callable[[Tensor], Tensor]  # (B, C, H, W) on [0, 1] -> what the network is fed
    classes: int  # number of logits
    dimension: int  # numbers of an image

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


def gradient(loss: Loss, images: Tensor, labels: Tensor) -> Tensor:
    """Return each image's gradient of its own loss, (B, C, H, W), detached; zero where it is not finite."""
    leaf = images.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf, labels).sum(), leaf)
    return slope.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


_PIXELS = (1, 2, 3)
_FAR_L2 = 2.5


@dataclass(frozen=True)
class Ball:
    """The perturbations that are allowed."""

    norm: NormName  # l2: Euclidean; linf: the largest change of a pixel
    size: float  # above 0, in pixels from 0 to 1

    def distance(self, origins: Tensor, images: Tensor) -> Tensor:
        """Return how far images (B, C, H, W) are from their origins, (B,)."""
        order = 2 if self.norm == "l2" else torch.inf
        distance: Tensor = torch.linalg.vector_norm(images - origins, order, dim=_PIXELS)
        return distance

    def project(self, origins: Tensor, images: Tensor) -> Tensor:
        """Return images in the box [0, 1] and in the ball; the Euclidean one last, which leaves no box."""
        boxed = images.clamp(0, 1)
        if self.norm == "linf":
            return origins + (boxed - origins).clamp(-self.size, self.size)
        length = self.distance(origins, boxed).clamp(min=self.size)
        return origins + (boxed - origins) * (self.size / length)[:, None, None, None]

    def direction(self, followed: Tensor) -> Tensor:
        """Return the steepest way of length 1 in the norm, (B, C, H, W); zero where what is followed is zero."""
        if self.norm == "linf":
            return followed.sign()
        length: Tensor = torch.linalg.vector_norm(followed, dim=_PIXELS, keepdim=True)
        return followed / length.where(length > 0, 1)

    def anywhere(self, origins: Tensor, stream: torch.Generator) -> Tensor:
        """Return points drawn uniformly from the ball, then put into the box."""
        device, dtype = origins.device, origins.dtype
        if self.norm == "linf":
            moved = 2 * torch.rand(origins.shape, generator=stream, device=device, dtype=dtype) - 1
        else:
            # A share u of the ball's volume lies within the radius u^(1/d).
            shares = torch.rand(len(origins), 1, 1, 1, generator=stream, device=device, dtype=dtype)
            ways = self.direction(torch.randn(origins.shape, generator=stream, device=device, dtype=dtype))
            moved = ways * shares ** (1 / origins[0].numel())
        return self.project(origins, origins + self.size * moved)


def attacked(
    attack: type[EvasionAttack],
    loss: Loss,
    images: Tensor,
    labels: Tensor,
    ball: Ball,
    steps: int,
    stream: torch.Generator,
) -> Tensor:
    """Return images (B, C, H, W) in ball and box whose loss the attack made large."""
    count = 1 if attack.single else steps
    far = attack.far if ball.norm == "linf" or attack.single else _FAR_L2
    moved = ball.anywhere(images, stream) if attack.starts_anywhere else images
    followed: Tensor | None = None
    for _ in range(count):
        followed = attack.followed(followed, gradient(loss, moved, labels))
        moved = ball.project(images, moved + far * ball.size / count * ball.direction(followed))
    return moved


def strongest(
    attack: type[EvasionAttack],
    loss: Loss,
    images: Tensor,
    labels: Tensor,
    ball: Ball,
    steps: int,
    restarts: int,
    stream: torch.Generator,
) -> Tensor:
    """Return of several restarts, all attacked at once, the one with each image's highest loss."""
    copies = restarts if attack.starts_anywhere else 1
    every, their_labels = images.repeat(copies, 1, 1, 1), labels.repeat(copies)
    moved = attacked(attack, loss, every, their_labels, ball, steps, stream)
    if copies == 1:
        return moved
    with torch.no_grad():
        best = loss(moved, their_labels).view(copies, -1).argmax(dim=0)
    return moved.view(copies, *images.shape)[best, torch.arange(len(images), device=best.device)]
