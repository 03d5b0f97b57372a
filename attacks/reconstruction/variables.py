"""Variables of the search: image coordinates with independent pixels, and relaxed rows of tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.priors import NEIGHBOURS, channel_covariance, line_covariance
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.core.columns import groups

if TYPE_CHECKING:
    from fedpriv.attacks.reconstruction.scene import Scene

# Coordinates in which neighbouring pixels are independent: images are a fixed matrix times coordinates, with the
# covariance of photographs (the generic prior's, see ``priors``). Only the path to the minimum changes; where an upload
# leaves details open, they stay as small as they are in photographs.


# The side of an image in which neighbours are as much alike as in the generic prior. Photographs look the same at all
# scales, so in a smaller image neighbours, which are further apart in the scene, are less alike.
SIDE = 32


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Roots of the covariances of an image's channels, lines and columns."""

    channels: Tensor  # (C, C)
    down: Tensor  # (H, H)
    across: Tensor  # (W, W)

    def images(self, coordinates: Tensor) -> Tensor:
        """Map coordinates (..., C, H, W) to normalised images of the same shape; linear, and one to one."""
        smooth = self.down @ coordinates @ self.across.mT
        return (self.channels @ smooth.flatten(-2)).unflatten(-1, smooth.shape[-2:])

    def of(self, images: Tensor) -> Tensor:
        """Map normalised images (..., C, H, W) to their coordinates."""
        unmixed = torch.linalg.solve(self.channels, images.flatten(-2)).unflatten(-1, images.shape[-2:])
        return torch.linalg.solve(self.across, torch.linalg.solve(self.down, unmixed).mT).mT

    @property
    def strengths(self) -> Tensor:
        """How much each coordinate adds to an image, squared, (C, H, W)."""
        channels, down, across = (part.square().sum(dim=0) for part in (self.channels, self.down, self.across))
        return torch.einsum("c,h,w->chw", channels, down, across)

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
    return vectors * values.sqrt()


# Rows of tables as functions of free variables: a softmax for each category, a sigmoid for all else.
#
# So every iterate is a row that the table could nearly hold: the features of a category are shares that add up to 1,
# and numbers stay in their range (Vero, Balunović, Dimitrov and Vechev: TabLeak, ICML 2023, section 4.1).


LEAST = 1e-3  # share of a category's value, and distance of a number from the ends of its range, in a start


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The way from variables to normalised rows."""

    groups: tuple[slice, ...]  # the features of each category
    mean: Tensor  # (1, 1, 1) of the normalisation
    std: Tensor  # (1, 1, 1) of the normalisation

    def images(self, variables: Tensor) -> Tensor:
        """Map variables (..., 1, 1, features) to normalised rows of the same shape."""
        parts = list(variables.sigmoid().split(1, dim=-1))
        for group in self.groups:
            parts[group] = variables[..., group].softmax(dim=-1).split(1, dim=-1)
        return self._normalised(torch.cat(parts, dim=-1))

    def of(self, images: Tensor) -> Tensor:
        """Map normalised rows to variables; what lies at an end of its range starts near it."""
        rows = (images * self.std.to(images) + self.mean.to(images)).clamp(LEAST, 1 - LEAST)
        variables = rows.logit()
        for group in self.groups:
            variables[..., group] = rows[..., group].log()
        return variables

    def hard(self, images: Tensor) -> Tensor:
        """Return normalised rows with one value a category, the one with the largest share."""
        rows = images * self.std.to(images) + self.mean.to(images)
        for group in self.groups:
            part = rows[..., group]
            rows[..., group] = F.one_hot(part.argmax(dim=-1), part.shape[-1]).to(rows)
        return self._normalised(rows)

    def free(self, features: int) -> list[int]:
        """The features, out of so many, that are no category's."""
        taken = {place for group in self.groups for place in range(group.start, group.stop)}
        return [place for place in range(features) if place not in taken]

    def pooled(self, members: Sequence[Tensor]) -> Tensor:
        """Pool normalised rows of the same examples (B, 1, 1, features): medians, and the largest mean share."""
        every = torch.stack(list(members))
        rows = every.median(dim=0).values
        for group in self.groups:
            rows[..., group] = every[..., group].mean(dim=0)
        return self.hard(rows)

    def _normalised(self, rows: Tensor) -> Tensor:
        return (rows - self.mean.to(rows)) / self.std.to(rows)


def relaxation_of(scene: "Scene") -> Relaxation:
    """Return the relaxation of a table's rows."""
    if not scene.columns:
        raise AttackRefused("tabular reads rows of tables, whose columns the data set declares; these data are images")
    return Relaxation(groups(scene.columns), scene.mean, scene.std)
