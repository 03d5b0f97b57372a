"""Coordinates of images in which neighbouring pixels are independent, so that optimisers get far in few steps.

Photographs vary most in what is coarse and grey, and so do their gradients. In pixels a quasi-Newton method has to find
that out for each image. Here it is told: images are a fixed matrix times coordinates, and standard normal coordinates
make images with the covariance of photographs, neighbours and colours alike (the one of the generic prior, see
``priors``). The objective does not change, only the path to its minimum; where an upload
leaves details open, they stay as small as they are in photographs. Nothing of the victims' data enters.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.priors import NEIGHBOURS, channel_covariance, line_covariance

__all__ = ["Coordinates", "coordinates_of"]

# The side of an image in which neighbours are as much alike as in the generic prior. Photographs look the same at all
# scales, so in a smaller image neighbours, which are further apart in the scene, are less alike.
SIDE = 32


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Roots of the covariances of an image's channels, lines and columns.

    Attributes:
        channels: (C, C).
        down: (H, H).
        across: (W, W).
    """

    channels: Tensor
    down: Tensor
    across: Tensor

    def images(self, coordinates: Tensor) -> Tensor:
        """Map coordinates (..., C, H, W) to normalised images of the same shape; linear, and one to one."""
        smooth = self.down @ coordinates @ self.across.mT
        mixed: Tensor = (self.channels @ smooth.flatten(-2)).unflatten(-1, smooth.shape[-2:])
        return mixed

    def of(self, images: Tensor) -> Tensor:
        """Map normalised images (..., C, H, W) to their coordinates."""
        unmixed = torch.linalg.solve(self.channels, images.flatten(-2)).unflatten(-1, images.shape[-2:])
        coordinates: Tensor = torch.linalg.solve(self.across, torch.linalg.solve(self.down, unmixed).mT).mT
        return coordinates

    def to(self, like: Tensor) -> "Coordinates":
        """Return the same coordinates on a tensor's device and in its type."""
        return Coordinates(self.channels.to(like), self.down.to(like), self.across.to(like))


def coordinates_of(shape: tuple[int, int, int]) -> Coordinates:
    """Return the coordinates of images (C, H, W), in float64 on the CPU."""
    channels, height, width = shape
    return Coordinates(_root(channel_covariance(channels)), _line(height), _line(width))


def _line(length: int) -> Tensor:
    return _root(line_covariance(length, NEIGHBOURS ** (SIDE / length)))


def _root(covariance: Tensor) -> Tensor:
    """R with R R^T = covariance, its columns along the principal directions: coarse ones apart from fine ones."""
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = vectors * values.sqrt()
    return root
