"""Orthonormal bases of the spans of groups of directions, from nothing but their inner products.

Any basis serves. When the directions are far enough from being dependent, the Cholesky factor L of their inner products
gives one (the columns of M' L^{-T}, as in the QR decomposition), ten times faster than eigenvectors do. Otherwise the
eigenvectors tell what is to be left out.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Basis(NamedTuple):
    """Bases of the spans of G groups of n vectors of length 1 or 0, all of one dimension r; float64, on the CPU.

    Attributes:
        coordinates: (G, r, n); column i, of length 1, holds vector i of a group in its basis; 0 for a vector of zeros.
        combination: (G, n, r); basis vector j of a group is the sum over i of entry (i, j) times vector i.
    """

    coordinates: Tensor
    combination: Tensor

    @property
    def rank(self) -> int:
        """The dimension r of the spans."""
        return self.coordinates.shape[1]


def triangular_basis(similarity: Tensor, least: float) -> Basis | None:
    """Return bases of the spans of groups of n independent unit vectors, ``None`` if any is too close to dependent.

    Args:
        similarity: (G, n, n), their inner products, float64.
    """
    factor, failed = torch.linalg.cholesky_ex(similarity)
    # No eigenvalue is below the smallest by much, but some square on the diagonal may be: then there is no proof.
    if failed.any() or (factor.numel() and not float(factor.diagonal(dim1=1, dim2=2).min()) ** 2 >= least):
        return None
    identity = torch.eye(factor.shape[2], dtype=similarity.dtype)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    if inverse.numel():
        columns, rows = (torch.linalg.vector_norm(inverse, ord=1, dim=axis).amax(dim=1) for axis in (1, 2))
        if not float((columns * rows).max()) * least <= 1:
            return None
    return Basis(factor.mT, inverse.mT)


def spectral_basis(similarity: Tensor, dimension: int, least: float) -> Basis:
    """Return a basis of the span of one group of unit vectors, dependent or not, and vectors of zeros among them.

    Args:
        similarity: (n, n), their inner products, float64.
    """
    values, vectors = _eigenvectors(similarity)
    # An eigenvector's sign is the library's to choose, by rounding errors; another sign would make other draws. Its
    # product with a vector that is orthogonal to none by design decides instead.
    generic = torch.arange(1, len(values) + 1, dtype=vectors.dtype, device=vectors.device).sqrt()
    vectors = torch.where(generic @ vectors < 0, -vectors, vectors)
    kept = values >= least
    kept[: max(0, len(values) - dimension)] = False
    roots = values[kept].sqrt()
    coordinates = roots[:, None] * vectors[:, kept].T
    directions = coordinates / torch.linalg.vector_norm(coordinates, dim=0)
    # Rounding leaves something of a vector of zeros: it must not become a direction.
    present = similarity.diagonal() > 0
    return Basis(torch.where(present, directions, 0.0)[None], (vectors[:, kept] / roots)[None])


def _eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (n,), ascending, and eigenvectors (n, n) of a symmetric matrix.

    PyTorch has LAPACK divide and conquer, which does not converge on rare matrices with repeated eigenvalues. QR
    iteration, which takes longer, is then asked: a client must not fail because of its examples.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        from scipy.linalg import eigh  # a client that never gets here does without SciPy

        values, vectors = map(torch.from_numpy, eigh(matrix.numpy(), driver="ev"))
    return values, vectors
