"""The distribution of a release around its expectation, from public parameters: the likelihood that attacks use.

- Normal noise (gaussian, hgm): minus the log-likelihood is |heard - expected|^2 / (2 deviation^2), for hgm in
  coordinates in which the noise is as large everywhere.
- Laplace noise: |heard - expected|_1 / width.
- von Mises-Fisher draws: minus kappa times the cosine, summed over the blocks. A sum of B draws has no such density; in
  many dimensions it is close to normal, with the mean ``A sum_i mu_i`` and, across it, the variance ``B A / kappa`` in
  each coordinate (for one draw, E[t^2] = 1 - (K - 1) A / kappa and so (1 - E[t^2]) / (K - 1) = A / kappa, A the mean
  cosine; Mardia and Jupp 2000, section 9.3). For B = 1 that normal density is, as a function of the gradient, exactly
  the one above, because the expected release's length is fixed: one formula serves all.

Averages over several releases, as of local steps or of clients, are taken as normal, with the variance of the average.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from fedpriv.gradients.operator import wide

# The least deviation that is modelled, over the root mean square of what was heard: about what float32 rounds away in a
# network, so that releases without noise have a density too.
FLOOR = 1e-4


@dataclass(frozen=True)
class Noise:
    """Normal noise in standardised coordinates (see :meth:`Mechanism.standardise`), independent between coordinates."""

    sizes: tuple[int, ...]  # how many coordinates, laid end to end, have the same variance
    variances: tuple[float, ...]  # these variances, one for each size

    def averaged(self, releases: float) -> "Noise":
        """Return the noise in the mean of so many independent releases."""
        return Noise(self.sizes, tuple(variance / releases for variance in self.variances))

    def follows_from(self, blocks: int) -> bool:
        """Whether the inner products of this many blocks give the likelihood; else it needs the vectors themselves."""
        return len(self.sizes) == blocks

    def misfit_of_blocks(self, squared: Tensor, dot: Tensor, heard: Tensor) -> Tensor:
        """As :meth:`misfit`, (N,), from the blocks' |expected|^2, expected.heard and |heard|^2, all (N, m)."""
        variances = _at_least(self.variances, FLOOR**2 * (heard / torch.tensor(self.sizes).to(heard)))
        return ((squared - 2 * dot) / (2 * variances)).sum(dim=1)

    def misfit(self, expected: Tensor, heard: Tensor) -> Tensor:
        """Return minus the log-likelihood (N,) of heard vectors (N, K), over that of zero; differentiable."""
        parts = zip(self.variances, expected.split(self.sizes, dim=1), heard.split(self.sizes, dim=1), strict=True)
        return torch.stack([_normal(*part) for part in parts]).sum(dim=0)


class LaplaceNoise(Noise):
    """Laplace noise; of the mean of several releases only the variance is kept."""

    @override
    def averaged(self, releases: float) -> Noise:
        return self if releases == 1 else super().averaged(releases)

    @override
    def follows_from(self, blocks: int) -> bool:
        return False

    @override
    def misfit(self, expected: Tensor, heard: Tensor) -> Tensor:
        width = _at_least([math.sqrt(self.variances[0] / 2)], FLOOR * heard.abs().mean(dim=1, keepdim=True))
        return wide((heard - expected).abs() - heard.abs()).sum(dim=1) / width[:, 0]


def _normal(variance: float, expected: Tensor, heard: Tensor) -> Tensor:
    floor = FLOOR**2 * heard.square().mean(dim=1, keepdim=True)
    return wide(expected.square() - 2 * expected * heard).sum(dim=1) / (2 * _at_least([variance], floor)[:, 0])


def _at_least(values: Sequence[float], least: Tensor) -> Tensor:
    """Values (m,) where they are not below ``least`` (N, m), which for an upload of zero is next to nothing."""
    return torch.maximum(torch.tensor(values).to(least), least.clamp(min=1e-30))
