"""The loop that all evasion attacks share: steps inside a ball around the image and inside the box of pixels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.attacks.evasion.gradients import Loss, gradient
from fedpriv.attacks.evasion.table import EvasionAttack
from fedpriv.smoothing.noise import NormName

__all__ = ["Ball", "attacked", "strongest"]

_PIXELS = (1, 2, 3)
_FAR_L2 = 2.5


@dataclass(frozen=True)
class Ball:
    """The perturbations that are allowed.

    Attributes:
        norm: l2: Euclidean; linf: the largest change of a pixel.
        size: above 0, in pixels from 0 to 1.
    """

    norm: NormName
    size: float

    def distance(self, origins: Tensor, images: Tensor) -> Tensor:
        """Return how far images (B, C, H, W) are from their origins, (B,)."""
        order = 2 if self.norm == "l2" else torch.inf
        distance: Tensor = torch.linalg.vector_norm(images - origins, order, dim=_PIXELS)
        return distance

    def project(self, origins: Tensor, images: Tensor) -> Tensor:
        """Return images in the box [0, 1] and in the ball; the origins are in the box.

        The Euclidean ball comes last: on the way to an origin in the box no image leaves the box.
        """
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
    """Return images (B, C, H, W) in ball and box whose loss the attack made large.

    Args:
        attack: which.
        loss: what it climbs.
        images: (B, C, H, W) on [0, 1], on the network's device.
        labels: (B,), the true ones.
        ball: how far it may go.
        steps: at least 1.
        stream: of random starts, on the network's device.
    """
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
    """Return of several restarts, all attacked at once, the one with each image's highest loss.

    Args:
        restarts: at least 1; attacks that start at the image make one. The other arguments are those of
            :func:`attacked`.
    """
    copies = restarts if attack.starts_anywhere else 1
    every, their_labels = images.repeat(copies, 1, 1, 1), labels.repeat(copies)
    moved = attacked(attack, loss, every, their_labels, ball, steps, stream)
    if copies == 1:
        return moved
    with torch.no_grad():
        best = loss(moved, their_labels).view(copies, -1).argmax(dim=0)
    return moved.view(copies, *images.shape)[best, torch.arange(len(images), device=best.device)]
