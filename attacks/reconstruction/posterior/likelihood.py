"""How probable images are after an upload was heard: the noise of its mechanism, and what images look like.

Minus the logarithm of ``p(upload | images, labels) p(images)``, on one scale: the noise is public, so that no weight
between the two is left to be chosen. The upload's density is the mechanism's own (see the module
``fedpriv.mechanisms.machinery.law``).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.matching.matcher import Comparison
from fedpriv.attacks.reconstruction.priors import GaussianPrior
from fedpriv.gradients import Vector, flattened

__all__ = ["Whitening", "flat", "misfit"]


def misfit(comparison: Comparison) -> Tensor:
    """Return minus the log-likelihood (N,) of what was heard, over that of an expected upload of zero; differentiable.

    The difference to zero is what depends on the dummies, and it does not drown in the noise's own length.
    """
    noise = comparison.model.noise([value.numel() for value in comparison.targets.vectors[0].values()])
    if noise.follows_from(len(comparison.blocks)):
        return noise.misfit_of_blocks(comparison.squared, comparison.dot, comparison.heard)
    return noise.misfit(flat(comparison.expected()), flat(comparison.upload()))


def flat(vectors: Vector) -> Tensor:
    """Lay tensors (N, *shape) end to end: (N, K)."""
    return torch.cat([flattened(value) for value in vectors.values()], dim=1)


@dataclass(frozen=True)
class Whitening:
    """Coordinates of images in which the prior is standard normal: image = mean + S z with S S = covariance.

    S is the covariance's symmetric root, so that without principal directions z is the image itself, shifted and
    scaled.

    Attributes:
        prior: of images.
        shape: (C, H, W).
    """

    prior: GaussianPrior
    shape: tuple[int, int, int]

    @cached_property
    def _roots(self) -> tuple[Tensor, float]:
        return self.prior.variances.sqrt(), math.sqrt(self.prior.rest)

    def images(self, coordinates: Tensor) -> Tensor:
        """Map coordinates (..., C, H, W) to images (..., C, H, W); differentiable."""
        along, rest = self._roots
        flat = coordinates.flatten(-3)
        offsets = rest * flat + ((along - rest) * (flat @ self.prior.basis)) @ self.prior.basis.mT
        images: Tensor = (self.prior.mean + offsets).unflatten(-1, self.shape)
        return images

    def coordinates(self, images: Tensor) -> Tensor:
        """Map images (..., C, H, W) to their coordinates."""
        along, rest = self._roots
        flat = images.flatten(-3) - self.prior.mean
        scaled = flat / rest + ((1 / along - 1 / rest) * (flat @ self.prior.basis)) @ self.prior.basis.mT
        coordinates: Tensor = scaled.unflatten(-1, self.shape)
        return coordinates
