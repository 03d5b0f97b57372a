"""Images, and the labels that belong to them, at which a search starts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.scene import Scene

__all__ = ["Start"]


@dataclass(frozen=True, eq=False)
class Start:
    """Where the search for one victim's images starts.

    Attributes:
        images: (B, C, H, W), normalised.
        labels: int64 (B,), each its image's; ``None``: not all are known.
    """

    images: Tensor
    labels: Tensor | None

    @staticmethod
    def of(scene: Scene, images: Tensor, labels: Tensor, count: int) -> "Start":
        """Take the first ``count`` of images (n, C, H, W) with labels (n,); what is missing is the prior's mean."""
        missing = count - len(images)
        if missing <= 0:
            return Start(images[:count], labels[:count])
        mean = scene.prior.mean.view(scene.shape).expand(missing, *scene.shape)
        return Start(torch.cat([images, mean.to(images)]), None)
