"""An orthonormal basis of the span of a batch's directions, from nothing but their inner products.

Any basis serves. When the directions are far enough from being dependent, the Cholesky factor L of their inner products
gives one (the columns of M' L^{-T}, as in the QR decomposition), ten times faster than eigenvectors do. Otherwise the
eigenvectors tell what is to be left out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Basis", "spectral_basis", "triangular_basis"]


class Basis(NamedTuple):
    """A basis of the span of n unit vectors; float64, on the CPU.

    Attributes:
        coordinates: (r, n); column i, of length 1, holds vector i in the basis.
        combination: (n, r); basis vector j is the sum over i of ``combination[i, j]`` times vector i.
    """

    coordinates: Tensor
    combination: Tensor

    @property
    def rank(self) -> int:
        """The dimension r of the span."""
        return self.coordinates.shape[0]


def triangular_basis(similarity: Tensor, least: float) -> Basis | None:
    """Return a basis of the span of n independent unit vectors, or ``None`` if they are too close to dependent.

    Args:
        similarity: (n, n), their inner products, float64.
        least: the smallest eigenvalue of ``similarity`` has to be proven to be at least this. The proof is the bound
            1 / lam_min = |L^-1|_2^2 <= |L^-1|_1 |L^-1|_inf.
    """
    factor, failed = torch.linalg.cholesky_ex(similarity)
    # No eigenvalue is below the smallest by much, but some square on the diagonal may be: then there is no proof.
    if int(failed) or (len(factor) and not float(factor.diagonal().min()) ** 2 >= least):
        return None
    identity = torch.eye(len(similarity), dtype=similarity.dtype)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    sizes = inverse.abs()
    if len(sizes) and not float(sizes.sum(dim=0).max() * sizes.sum(dim=1).max()) * least <= 1:
        return None
    return Basis(_unit_columns(factor.T), inverse.T)


def spectral_basis(similarity: Tensor, dimension: int, least: float) -> Basis:
    """Return a basis of the span of n unit vectors, dependent or not.

    Args:
        similarity: (n, n), their inner products, float64.
        dimension: K, of the space they live in: the rank is at most that.
        least: directions with a smaller eigenvalue are noise. They are left out of the basis, and what a vector has in
            them out of its coordinates: no more than the root of this.
    """
    values, vectors = torch.linalg.eigh(similarity)
    kept = values >= least
    kept[: max(0, len(values) - dimension)] = False
    roots = values[kept].sqrt()
    return Basis(_unit_columns(roots[:, None] * vectors[:, kept].T), vectors[:, kept] / roots)


def _unit_columns(coordinates: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(coordinates, dim=0)
    return coordinates / lengths
