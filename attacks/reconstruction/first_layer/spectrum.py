"""A first Linear layer's gradient as a product of few factors, and how many of them stand above the noise.

The gradient of weight and bias side by side is ``E Xh``: the examples' errors E (outputs, B) times their images, each
with a one behind it (B, P + 1). Its singular values are those of the images as long as they exceed what noise alone
would show: a matrix of independent normal entries of deviation s has no singular value above
``s (sqrt(rows) + sqrt(columns) + t)``, but with probability ``exp(-t^2 / 2)`` (Davidson and Szarek 2001, theorem II.13;
in the limit of large matrices Bai and Yin 1993). What is below that edge cannot be told from noise.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Spectrum", "noise_edge", "take_apart"]

FALSE_ALARM = 1e-6  # probability that noise alone counts as an image
ROUNDING = 8.0  # rounding errors of sums, in units of the type's precision times the root mean square of the entries
SPARE = 16  # singular values beyond twice those that are expected, from which on there is noise alone
DIRECT = 512  # up to so many rows or columns the singular values are computed directly
PASSES = 4  # over larger matrices, to find the range of the leading singular vectors
SHORT = (torch.bfloat16, torch.float16)  # types in which uploads may be sent
PROBES = 20240513  # the seed of the random vectors that this starts from; it decides nothing but roundings


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The part of a matrix (rows, P + 1) that stands above the noise; float64 on the CPU.

    Attributes:
        left: (rows, B), orthonormal columns.
        values: (B,), singular values, the largest first, all above the edge.
        right: (B, P + 1), orthonormal rows.
        deviation: of the noise in each entry of the matrix, rounding included.
        edge: the largest singular value that noise alone shows.
        largest: the largest singular value.
        unexplained: the share of the squared matrix that these factors leave.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    deviation: float
    edge: float
    largest: float
    unexplained: float

    @property
    def examples(self) -> int:
        """How many images stand above the noise."""
        return len(self.values)

    @property
    def scaled(self) -> Tensor:
        """The right factor times the singular values, (B, P + 1): the matrix is ``left @ scaled``."""
        return self.values[:, None] * self.right

    def noise_of(self, vectors: Tensor) -> Tensor:
        """The deviation (n,) of the noise in ``left @ vector`` for vectors (n, B)."""
        noise: Tensor = self.deviation * (vectors / self.values).norm(dim=1)
        return noise


def noise_edge(rows: int, columns: int, deviation: float) -> float:
    """Return the singular value that noise of this deviation exceeds with probability :data:`FALSE_ALARM` at most."""
    return deviation * (math.sqrt(rows) + math.sqrt(columns) + math.sqrt(-2 * math.log(FALSE_ALARM)))


def take_apart(matrix: Tensor, deviation: float, expected: int) -> Spectrum:
    """Find the leading singular values and vectors, and how many of them are the images'.

    The noise is the larger of what is public and what is seen: the rest that no image explains (noise that the threat
    model does not tell, or numbers that were sent with few digits).

    Args:
        matrix: (rows, P + 1).
        deviation: public standard deviation of the noise in each entry; 0: none.
        expected: the public number of examples.

    Raises:
        ValueError: the matrix is not finite.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("the gradient of the first layer is not finite")
    precise = matrix.double().cpu()
    rows, columns = precise.shape
    kept = min(rows, columns, 2 * expected + SPARE)
    left, values, right = _leading(precise, kept)
    squared = float(precise.square().sum())
    rounding = ROUNDING * _precision(matrix) * math.sqrt(squared / precise.numel())
    deviation = max(deviation, rounding)
    above = int((values > noise_edge(rows, columns, deviation)).sum())
    if kept < min(rows, columns):
        deviation, above = _seen(precise.shape, squared, values[:above], deviation)
    edge = noise_edge(rows, columns, deviation)
    explained = float(values[:above].square().sum())
    unexplained = max(1 - explained / squared, 0.0) if squared else 1.0
    return Spectrum(
        left[:, :above], values[:above], right[:above], deviation, edge, float(values[:1].sum()), unexplained
    )


def _precision(matrix: Tensor) -> float:
    """The relative precision of the shortest type that holds all numbers: that in which they were sent."""
    short = [kind for kind in SHORT if torch.equal(matrix.to(kind).to(matrix.dtype), matrix)]
    return float(torch.finfo(short[0] if short else matrix.dtype).eps)


def _seen(shape: torch.Size, squared: float, values: Tensor, least: float) -> tuple[float, int]:
    """The noise's deviation, and how many of the values are images: the fewest without which the rest looks like noise.

    As the number of components is tested by Kritchman and Nadler (2008).
    """
    rows, columns = shape
    rests = squared - torch.cat([values.new_zeros(1), values.square().cumsum(0)])
    for above, (value, rest) in enumerate(zip(values.tolist(), rests.tolist(), strict=False)):
        deviation = max(least, math.sqrt(max(rest, 0.0) / ((rows - above) * (columns - above))))
        if value <= noise_edge(rows, columns, deviation):
            return deviation, above
    return least, len(values)


def _leading(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The leading singular vectors and values; of large matrices by subspace iteration (Halko et al. 2011)."""
    if min(matrix.shape) <= DIRECT:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[:, :count], values[:count], right[:count]
    generator = torch.Generator().manual_seed(PROBES)
    basis = torch.randn(matrix.shape[1], count, generator=generator, dtype=matrix.dtype)
    for _ in range(PASSES):
        basis, _ = torch.linalg.qr(matrix @ basis)
        basis, _ = torch.linalg.qr(matrix.mT @ basis)
    basis, _ = torch.linalg.qr(matrix @ basis)
    inner, values, right = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
    return basis @ inner, values, right
