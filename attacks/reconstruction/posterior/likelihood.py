"""How probable images are after an upload was heard: the noise of its mechanism, and what images look like.

Minus the logarithm of ``p(upload | images, labels) p(images)``, on one scale: the noise is public, so that no weight
between the two is left to be chosen.

- Normal noise (gaussian, hgm): |heard - expected|^2 / (2 deviation^2), the expected upload with clipping as the
  mechanism does it; for hgm in coordinates in which the noise is as large everywhere.
- Laplace noise: |heard - expected|_1 / width.
- von Mises-Fisher draws: minus kappa times the cosine, summed over the blocks. A sum of B draws has no such density; in
  many dimensions it is close to normal, with the mean ``A sum_i mu_i`` and, across it, the variance ``B A / kappa`` in
  each coordinate (for one draw, E[t^2] = 1 - (K - 1) A / kappa and so (1 - E[t^2]) / (K - 1) = A / kappa, A the mean
  cosine; Mardia and Jupp 2000, section 9.3). For B = 1 that normal density is, as a function of the image, exactly the
  one above, because the expected upload's length is fixed: one formula serves all.

Averages over several releases, as of local steps or of clients, are taken as normal, with the variance of the average.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attacks.reconstruction.errors import AttackRefused
from attacks.reconstruction.matching.matcher import Comparison
from attacks.reconstruction.priors import GaussianPrior
from attacks.reconstruction.upload_model.model import UploadModel, Victim
from fedpriv.gradients import Vector
from fedpriv.mechanisms import (
    GaussianMechanism,
    HeterogeneousGaussianMechanism,
    LaplaceMechanism,
    NoMechanism,
    VmfMechanism,
)
from fedpriv.mechanisms.blocks import block_runs
from fedpriv.mechanisms.cosine import mean_cosine

__all__ = ["Noise", "Whitening", "misfit"]

# The least deviation that is modelled, over the root mean square of what was heard: about what float32 rounds away in a
# network, so that uploads without noise have a density too.
FLOOR = 1e-4


@dataclass(frozen=True)
class Noise:
    """The noise in an upload, in gradient space, standardised (see :meth:`UploadModel.standardise`).

    Attributes:
        sizes: how many coordinates, laid end to end, have the same variance.
        variances: these variances, one for each size.
        laplace: whether the noise has the Laplace distribution; else it is normal.
    """

    sizes: tuple[int, ...]
    variances: tuple[float, ...]
    laplace: bool = False

    @staticmethod
    def of(model: UploadModel, tensors: Mapping[str, int]) -> "Noise":
        """Read it off the public settings.

        Args:
            model: how uploads come about.
            tensors: the number of coordinates of each parameter, in order.

        Raises:
            AttackRefused: the mechanism is none of those whose noise is known here.
        """
        mechanism, total = model.mechanism, sum(tensors.values())
        # An update is privatised as it is and divided by its step only then; a batch's sum is divided by its size.
        unit = model.step if model.unit == "update" else float(model.batch)
        match mechanism:
            case (
                GaussianMechanism(sigma=sigma, clip_norm=bound)
                | HeterogeneousGaussianMechanism(sigma=sigma, clip_norm=bound)
            ):
                return Noise((total,), ((sigma * bound / unit) ** 2 / model.releases,))
            case LaplaceMechanism(scale=scale, clip_norm=bound):
                variance = 2 * (scale * bound / unit) ** 2
                return Noise((total,), (variance / model.releases,), laplace=model.releases == 1)
            case VmfMechanism(blocks=blocks, scale=length):
                draws = model.releases * (1 if model.unit == "update" else model.batch)
                share = unit if model.unit == "update" else 1.0
                runs = block_runs(blocks, list(tensors.values()))
                spread = [(length / share) ** 2 * _across(mechanism, size) / draws for _, size in runs]
                return Noise(tuple(count * size for count, size in runs), tuple(spread))
            case NoMechanism():
                return Noise((total,), (0.0,))
        raise AttackRefused(f"the noise of {mechanism.name} is not modelled")

    @staticmethod
    def behind(victim: Victim) -> "Noise":
        """Read it off the settings of one upload."""
        return Noise.of(victim.model, {name: value.numel() for name, value in victim.gradient.items()})

    def needs_writing(self, model: UploadModel) -> bool:
        """Whether the misfit needs the uploads themselves, not just inner products of their blocks."""
        return self.laplace or (not model.blocks_are_layers and len(self.sizes) > 1)


def _across(mechanism: VmfMechanism, dimension: int) -> float:
    """The variance of a draw in each coordinate across its mean direction."""
    if mechanism.kappa == 0:
        return 1 / dimension
    return mean_cosine(mechanism.kappa, dimension) / mechanism.kappa


def misfit(comparison: Comparison) -> Tensor:
    """Return minus the log-likelihood (N,) of what was heard, over that of an expected upload of zero; differentiable.

    The difference to zero is what depends on the dummies, and it does not drown in the noise's own length.
    """
    tensors = {name: value.numel() for name, value in comparison.targets.vectors[0].items()}
    noise = Noise.of(comparison.model, tensors)
    if not noise.needs_writing(comparison.model):
        heard = comparison.heard / torch.tensor(noise.sizes).to(comparison.heard)
        variances = _at_least(noise.variances, FLOOR**2 * heard)
        return ((comparison.squared - 2 * comparison.dot) / (2 * variances)).sum(dim=1)
    expected, heard = _flat(comparison.expected()), _flat(comparison.upload())
    if noise.laplace:
        width = _at_least([math.sqrt(noise.variances[0] / 2)], FLOOR * heard.abs().mean(dim=1, keepdim=True))
        return _wide((heard - expected).abs() - heard.abs()).sum(dim=1) / width[:, 0]
    parts = zip(noise.variances, expected.split(noise.sizes, dim=1), heard.split(noise.sizes, dim=1), strict=True)
    return torch.stack([_normal(*part) for part in parts]).sum(dim=0)


def _normal(variance: float, expected: Tensor, heard: Tensor) -> Tensor:
    floor = FLOOR**2 * heard.square().mean(dim=1, keepdim=True)
    return _wide(expected.square() - 2 * expected * heard).sum(dim=1) / (2 * _at_least([variance], floor)[:, 0])


def _at_least(values: Sequence[float], least: Tensor) -> Tensor:
    """Values (m,) where they are not below ``least`` (N, m), which for an upload of zero is next to nothing."""
    return torch.maximum(torch.tensor(values).to(least), least.clamp(min=1e-30))


def _flat(vectors: Vector) -> Tensor:
    return torch.cat([value.flatten(1) for value in vectors.values()], dim=1)


def _wide(values: Tensor) -> Tensor:
    return values if values.device.type == "mps" else values.double()


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
