"""What the dummies are compared with: one vector a victim, shared by the victim's rows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from fedpriv.gradients import Block, Vector

__all__ = ["Matrix", "Targets"]

# Matrices of at most so many numbers are stacked, so that all rows go through one call.
STACKED = 2**16
# Rows of a large matrix that are read together: 2^18 float32 are 1 MiB and stay in the cache for the second product.
STRIP = 2**18
# A matrix that is a product of two with so many columns is kept as these two.
RANK = 8
# Smallest side of a matrix for which that is tried.
SMALLEST_SIDE = 64


class Targets:
    """The target of each row.

    Args:
        vectors: one a victim.
        owners: for each row the number of its vector.
        often: whether they are used so often that finding products of few columns among them pays.
    """

    def __init__(self, vectors: Sequence[Vector], owners: Sequence[int], often: bool = True) -> None:
        self.vectors = tuple(vectors)
        self.owners = tuple(owners)
        self._often = often
        self._matrices: dict[str, Matrix] = {}
        self._flat: dict[Block, Tensor] = {}
        self._factored: dict[tuple[int, str], tuple[Tensor, Tensor] | None] = {}

    def __len__(self) -> int:
        return len(self.owners)

    def select(self, rows: Sequence[int]) -> "Targets":
        """Return the targets of some of the rows."""
        owners = [self.owners[row] for row in rows]
        kept = sorted(set(owners))
        place = {owner: number for number, owner in enumerate(kept)}
        chosen = Targets([self.vectors[owner] for owner in kept], [place[owner] for owner in owners], self._often)
        chosen._factored = {(place[o], n): pair for (o, n), pair in self._factored.items() if o in place}
        return chosen

    @cached_property
    def index(self) -> Tensor:
        """The owners, as a tensor (N,)."""
        first = next(iter(self.vectors[0].values()))
        return torch.tensor(self.owners, device=first.device)

    @cached_property
    def runs(self) -> list[tuple[int, slice]]:
        """Consecutive rows with the same vector: its number, and the rows."""
        runs, start = [], 0
        for owner, members in groupby(self.owners):
            stop = start + len(list(members))
            runs.append((owner, slice(start, stop)))
            start = stop
        return runs

    def squared(self, name: str) -> Tensor:
        """The squared norm of each row's tensor of that name: (N,)."""
        return torch.stack([vector[name].square().sum() for vector in self.vectors])[self.index]

    def flat(self, block: Block) -> Tensor:
        """Each row's tensors of these names side by side: (N, numbers), or (1, numbers) where all rows share them."""
        if block not in self._flat:
            vectors = [torch.cat([vector[name].flatten() for name in block]) for vector in self.vectors]
            stacked = torch.stack(vectors)
            as_it_is = len(vectors) == 1 or self.owners == tuple(range(len(vectors)))
            self._flat[block] = stacked if as_it_is else stacked[self.index]
        return self._flat[block]

    def rows(self) -> Vector:
        """Each row's target, written out: (N, *shape)."""
        return {
            name: self.flat((name,)).expand(len(self), -1).view(len(self), *value.shape)
            for name, value in self.vectors[0].items()
        }

    def matrix(self, name: str) -> "Matrix":
        """Each row's tensor of that name as a matrix."""
        if name not in self._matrices:
            self._matrices[name] = self._matrix(name)
        return self._matrices[name]

    def _matrix(self, name: str) -> "Matrix":
        matrices = [vector[name].flatten(1) for vector in self.vectors]
        if self._often and min(matrices[0].shape) >= SMALLEST_SIDE:
            pairs = [self._pair(number, name) for number in range(len(matrices))]
            if all(pair is not None for pair in pairs):
                return _LowRank([pair for pair in pairs if pair is not None], self.index)
        if len(matrices) > 1 and matrices[0].numel() <= STACKED:
            return _Stacked(torch.stack(matrices)[self.index])
        return _Large(matrices, self.runs)

    def _pair(self, number: int, name: str) -> tuple[Tensor, Tensor] | None:
        if (number, name) not in self._factored:
            self._factored[number, name] = _low_rank(self.vectors[number][name].flatten(1))
        return self._factored[number, name]


class Matrix(ABC):
    """A matrix (out, in) for each row."""

    @abstractmethod
    def products(self, inputs: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
        """Return T a (N, P, out) and T^T e (N, P, in) for inputs a (N, P, in) and errors e (N, P, out)."""


class _Stacked(Matrix):
    """Small matrices, one a row: (N, out, in)."""

    def __init__(self, matrices: Tensor) -> None:
        self._matrices = matrices

    def products(self, inputs: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
        return torch.bmm(inputs, self._matrices.mT), torch.bmm(errors, self._matrices)


class _Large(Matrix):
    """Large matrices, each used where it lies, for its rows."""

    def __init__(self, matrices: Sequence[Tensor], runs: Sequence[tuple[int, slice]]) -> None:
        self._matrices = matrices
        self._runs = runs

    def products(self, inputs: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
        parts = [_multiply(self._matrices[number], inputs[rows], errors[rows]) for number, rows in self._runs]
        if len(parts) == 1:
            return parts[0]
        left, right = zip(*parts, strict=True)
        return torch.cat(left), torch.cat(right)


class _LowRank(Matrix):
    """Matrices that are products u v^T with few columns, as those of one example without noise."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], index: Tensor) -> None:
        rank = max(left.shape[1] for left, _ in pairs)
        left, right = (torch.stack([_widened(pair[side], rank) for pair in pairs]) for side in (0, 1))
        self._shared = len(pairs) == 1
        self._left, self._right = (left[0], right[0]) if self._shared else (left[index], right[index])

    def products(self, inputs: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
        if self._shared:
            return (inputs @ self._right) @ self._left.mT, (errors @ self._left) @ self._right.mT
        of_inputs, of_errors = torch.bmm(inputs, self._right), torch.bmm(errors, self._left)
        return torch.bmm(of_inputs, self._left.mT), torch.bmm(of_errors, self._right.mT)


def _multiply(matrix: Tensor, inputs: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """The products with one matrix (out, in); for a single vector each strip of it is read once for both."""
    if inputs.shape[:2].numel() > 1 or matrix.numel() <= STRIP or matrix.device.type != "cpu":
        return inputs @ matrix.mT, errors @ matrix
    a, e = inputs[0, 0], errors[0, 0]
    left, right = torch.empty_like(e), torch.zeros_like(a)
    step = max(1, STRIP // matrix.shape[1])
    for start in range(0, len(matrix), step):
        strip = matrix[start : start + step]
        torch.mv(strip, a, out=left[start : start + step])
        right.addmv_(strip.mT, e[start : start + step])
    return left[None, None], right[None, None]


def _widened(columns: Tensor, rank: int) -> Tensor:
    return torch.nn.functional.pad(columns, (0, rank - columns.shape[1]))


def _low_rank(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (out, r) and (in, r) whose product is the matrix up to rounding, or ``None``.

    The range is found with random vectors (Halko, Martinsson and Tropp 2011, algorithm 4.1) and then checked on the
    whole matrix, so that chance decides nothing but the time.
    """
    generator = torch.Generator().manual_seed(0)
    precise = matrix if matrix.device.type == "mps" else matrix.double()
    probes = torch.randn(matrix.shape[1], RANK + 2, generator=generator).to(precise)
    sample = precise @ probes
    if not bool(torch.isfinite(sample).all()):
        return None
    basis, values, _ = torch.linalg.svd(sample, full_matrices=False)
    precision = 4 * torch.finfo(matrix.dtype).eps
    rank = int((values > precision * values[0]).sum())
    if rank > RANK:
        return None
    basis = basis[:, : max(rank, 1)]
    right = precise.mT @ basis
    rest = torch.linalg.vector_norm(precise - basis @ right.mT)
    close = bool(rest <= precision * torch.linalg.vector_norm(precise))
    return (basis.to(matrix), right.to(matrix)) if close else None
