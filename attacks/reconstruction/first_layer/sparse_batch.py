"""The images of a whole batch from the gradient of a first Linear layer followed by ReLU: exact without noise.

The gradient is ``E X`` with the examples' errors E (outputs, B) and their images X (B, P): a matrix of rank B, from
which E and X are known only up to a mixing matrix Q. But a ReLU that lets an example through at half of its outputs
leaves half of that example's column of E zero, and hardly any other combination of columns has so many zeros
(Dimitrov, Baader, Mueller and Vechev 2024: SPEAR). So Q's columns are looked for among the vectors that make B - 1
randomly chosen rows zero: if an example was stopped at all of them, one of these vectors is its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SparseBatch", "separate"]

DRAWS = 4096  # sets of rows that are tried at once
ROUNDS = 200  # of them at most
OFFERED = 256  # of the vectors of a round, those with the most zeros
PATIENCE = 8  # rounds without progress after which a complete set is kept
OVERSAMPLED = 8  # random vectors more than examples, with which the range is found
DISTINCT = 1e2  # the smallest singular value of the examples over the largest of what is left, at least
ROUNDING = 1e-6  # of a row, relative to its length
CLOSE = 1e2  # noise of a product over that of a row, at most
ALIKE = 1 - 1e-6  # cosine of two vectors that are taken for one
INDEPENDENT = 1e-3  # smallest singular value of unit vectors that are taken for independent


@dataclass(frozen=True, eq=False)
class SparseBatch:
    """What a gradient was made of.

    Attributes:
        images: (B, P), on the scale of the network's input.
        errors: (outputs, B), the columns of E.
    """

    images: Tensor
    errors: Tensor


def separate(weight: Tensor, bias: Tensor, examples: int, generator: torch.Generator) -> SparseBatch | None:
    """Take the gradient apart.

    Args:
        weight: (outputs, P), the sum over the batch of errors times images.
        bias: (outputs,), the sum of the errors.
        examples: B, at least 2.
        generator: of the rows that are tried, on the CPU.

    Returns:
        The images, or ``None`` where the gradient is not of rank B but for rounding, or B columns with many zeros are
        not found: noise, an activation without zeros, or too many examples.
    """
    matrix = torch.cat([weight, bias[:, None]], dim=1).double().cpu()
    factors = _factors(matrix, examples, generator)
    if factors is None:
        return None
    mixing = _Search(factors, examples).run(generator)
    if mixing is None:
        return None
    homogeneous = torch.linalg.solve(mixing, factors.right)
    errors = (factors.left @ mixing) * homogeneous[:, -1]
    if not bool((homogeneous[:, -1].abs() > 0).all()):
        return None
    images = homogeneous[:, :-1] / homogeneous[:, -1:]
    return SparseBatch(images.to(weight), errors.to(weight))


@dataclass(frozen=True, eq=False)
class _Factors:
    """A matrix of rank B as a product.

    Attributes:
        left: (outputs, B).
        right: (B, P + 1), orthonormal rows.
        noise: of an entry of ``left``.
    """

    left: Tensor
    right: Tensor
    noise: float


def _factors(matrix: Tensor, rank: int, generator: torch.Generator) -> _Factors | None:
    """Factors of a matrix that is of a rank but for rounding (Halko, Martinsson and Tropp 2011); else ``None``."""
    count = rank + OVERSAMPLED
    if min(matrix.shape) < count or not bool(torch.isfinite(matrix).all()):
        return None
    probes = torch.randn(matrix.shape[1], count, generator=generator, dtype=matrix.dtype)
    basis, _ = torch.linalg.qr(matrix @ probes)
    inner, values, right = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
    if not float(values[rank - 1]) > DISTINCT * float(values[rank]):
        return None
    left = (basis @ inner[:, :rank]) * values[:rank]
    noise = float(values[rank]) / (matrix.shape[0] ** 0.5 + matrix.shape[1] ** 0.5)
    return _Factors(left, right[:rank], noise)


class _Search:
    """Looks for vectors q with many zeros in ``left q``."""

    def __init__(self, factors: _Factors, examples: int) -> None:
        lengths = factors.left.norm(dim=1)
        heard = lengths > max(ROUNDING * float(lengths.max()), CLOSE * factors.noise)
        self._rows = factors.left[heard] / lengths[heard, None]
        # What counts as zero in a product with a row of length one.
        self._zero = CLOSE * (ROUNDING + factors.noise / lengths[heard])
        self._examples = examples
        self._seen = factors.left[:0]
        # By chance B - 1 are zero; a column has a good share of all rows.
        self._wanted = 2 * examples + len(self._rows) // 50

    def run(self, generator: torch.Generator) -> Tensor | None:
        """Return Q (B, B), or ``None``."""
        best = _Best(self._examples)
        waited = 0
        if len(self._rows) < 2 * self._wanted:
            return None
        for _ in range(ROUNDS):
            before = best.zeros
            self._offer(self._draw(generator), best)
            waited = waited + 1 if best.zeros == before else 0
            if best.complete and waited >= PATIENCE:
                break
        columns: Tensor | None = best.columns if best.complete else None
        return columns

    def _draw(self, generator: torch.Generator) -> Tensor:
        """Vectors (n, B) that make B - 1 random rows zero, and many others too."""
        chosen = torch.randint(len(self._rows), (DRAWS, self._examples - 1), generator=generator)
        orthogonal, triangles = torch.linalg.qr(self._rows[chosen].mT, mode="complete")
        # Rows that depend on each other leave a choice.
        settled = triangles.diagonal(dim1=1, dim2=2).abs().amin(dim=1) > INDEPENDENT
        vectors = orthogonal[settled, :, -1]
        zeros = self._zeros(vectors).sum(dim=0)
        order = zeros.argsort(descending=True)
        promising: Tensor = vectors[order[: int((zeros >= self._wanted).sum())]]
        return promising

    def _offer(self, vectors: Tensor, best: "_Best") -> None:
        """Offer those of the vectors (n, B) that are new, the most promising first."""
        vectors = vectors[~_alike(vectors, self._seen)]
        for _ in range(OFFERED):
            if len(vectors) == 0:
                return
            first = vectors[:1]
            self._seen = torch.cat([self._seen, first])
            self._sharpen(first[0], best)
            vectors = vectors[~_alike(vectors, first)]

    def _sharpen(self, vector: Tensor, best: "_Best") -> None:
        """Make a vector precise with all rows that it makes zero, and keep it if they leave no choice."""
        rows = self._rows[self._zeros(vector[None])[:, 0]]
        _, values, directions = torch.linalg.svd(rows, full_matrices=False)
        if float(values[-2]) > CLOSE * max(float(values[-1]), ROUNDING):
            best.add(directions[-1], int(self._zeros(directions[-1:]).sum()))

    def _zeros(self, vectors: Tensor) -> Tensor:
        """Which rows (rows, n) the vectors (n, B) make zero."""
        zero: Tensor = (self._rows @ vectors.mT).abs() < self._zero[:, None]
        return zero


class _Best:
    """Independent vectors with the most zeros."""

    def __init__(self, examples: int) -> None:
        self._examples = examples
        self._found: list[tuple[int, Tensor]] = []

    @property
    def zeros(self) -> int:
        """Of all vectors together: grows with every improvement."""
        return sum(count for count, _ in self._found)

    @property
    def complete(self) -> bool:
        """Whether there is one for each example."""
        return len(self._found) == self._examples

    @property
    def columns(self) -> Tensor:
        """The vectors, (B, B)."""
        return torch.stack([vector for _, vector in self._found], dim=1)

    def add(self, vector: Tensor, zeros: int) -> None:
        """Choose anew, by zeros, among those that are independent of what was chosen before them."""
        kept: list[tuple[int, Tensor]] = []
        for entry in sorted([*self._found, (zeros, vector)], key=lambda entry: -entry[0]):
            trial = torch.stack([*(other for _, other in kept), entry[1]])
            if float(torch.linalg.svdvals(trial)[-1]) > INDEPENDENT:
                kept.append(entry)
        self._found = kept[: self._examples]


def _alike(vectors: Tensor, others: Tensor) -> Tensor:
    """Which of the unit vectors (n, B) are, but for the sign, among others (m, B)."""
    return ((vectors @ others.mT).abs() > ALIKE).any(dim=1)
