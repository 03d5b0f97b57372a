"""Gradients of many dummy batches as an operator: norms and inner products without writing the gradients out.

A row is a restart of one victim. A unit is a dummy example, or a whole dummy batch where only its mean counts. Each
parameter's gradients are kept as the factors in which they are cheapest, and everything can be differentiated.
``dummy_gradients.network`` computes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from fedpriv.core.randomness import fixed_normal
from fedpriv.gradients import Block, Vector, flattened
from fedpriv.gradients.operator import total, wide

# Matrices of at most so many numbers are stacked, so that all rows go through one call.
STACKED = 2**16
# Rows of a large matrix that are read together: 2^18 float32 are 1 MiB and stay in the cache for the second product.
STRIP = 2**18
# A matrix that is a product of two with so many columns is kept as these two.
RANK = 8
# Smallest side of a matrix for which that is tried.
SMALLEST_SIDE = 64


class Targets:
    """The target of each row."""

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
        left, right = (
            torch.stack([pad(columns, (0, rank - columns.shape[1])) for columns in side])
            for side in zip(*pairs, strict=True)
        )
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


def _low_rank(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (out, r) and (in, r) whose product is the matrix up to rounding, or ``None`` (Halko et al. 2011, 4.1)."""
    precise = wide(matrix)
    sample = precise @ fixed_normal(0, matrix.shape[1], RANK + 2).to(precise)
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


class DummyFactor(ABC):
    """The gradients with respect to one parameter."""

    size: int  # its numbers

    @abstractmethod
    def squared(self) -> Tensor:
        """Return the squared norms, (N, U)."""

    @abstractmethod
    def gram(self) -> Tensor:
        """Return the inner products of each row's units, (N, U, U)."""

    @abstractmethod
    def dot(self, targets: Targets, block: Block) -> Tensor:
        """Return the inner products with each row's target for the parameters of these names, (N, U)."""

    @abstractmethod
    def rows(self) -> Tensor:
        """Return the gradients themselves, (N, U, *shape)."""


class Written(DummyFactor):
    """Gradients that are written out, (N, U, *shape)."""

    def __init__(self, rows: Tensor) -> None:
        self.size = rows.shape[2:].numel()
        self._rows = rows
        self._squared: Tensor | None = None

    @override
    def squared(self) -> Tensor:
        if self._squared is None:
            self._squared = _DummyLengths.apply(self._flat)
        return self._squared

    @override
    def gram(self) -> Tensor:
        return torch.bmm(self._flat, self._flat.mT)

    @override
    def dot(self, targets: Targets, block: Block) -> Tensor:
        self._squared, products = _Products.apply(self._flat, targets.flat(block))
        return products

    @override
    def rows(self) -> Tensor:
        return self._rows

    @cached_property
    def _flat(self) -> Tensor:
        """(N, U, numbers)."""
        return flattened(self._rows, 2)

    @staticmethod
    def joined(factors: Sequence["Written"]) -> "Written":
        """Return the gradients of several parameters side by side: (N, U, numbers)."""
        return factors[0] if len(factors) == 1 else Written(torch.cat([factor._flat for factor in factors], dim=2))


class DummyOuter(DummyFactor):
    """Sums over positions t of outer products ``errors[t] inputs[t]^T``: of errors (N, U, T, out), inputs (..., in)."""

    def __init__(self, inputs: Tensor, errors: Tensor, shape: torch.Size) -> None:
        self.size = shape.numel()
        self._inputs = inputs
        self._errors = errors
        self._shape = shape

    @override
    def squared(self) -> Tensor:
        if self._inputs.shape[2] == 1:
            return self._inputs.square().sum(dim=(2, 3)) * self._errors.square().sum(dim=(2, 3))
        if self._many_positions(self._inputs.shape[2]):
            return self.rows().flatten(2).square().sum(dim=2)
        return ((self._inputs @ self._inputs.mT) * (self._errors @ self._errors.mT)).sum(dim=(2, 3))

    @override
    def gram(self) -> Tensor:
        rows, units, positions = self._inputs.shape[:3]
        if self._many_positions(units * positions):
            return Written(self.rows()).gram()
        inputs, errors = self._inputs.flatten(1, 2), self._errors.flatten(1, 2)
        products = torch.bmm(inputs, inputs.mT) * torch.bmm(errors, errors.mT)
        return products.reshape(rows, units, positions, units, positions).sum(dim=(2, 4))

    @override
    def dot(self, targets: Targets, block: Block) -> Tensor:
        matrix = targets.matrix(block[0])
        products: Tensor = _Bilinear.apply(self._inputs.flatten(1, 2), self._errors.flatten(1, 2), matrix)
        return products.unflatten(1, self._inputs.shape[1:3]).sum(dim=2)

    @override
    def rows(self) -> Tensor:
        return (self._errors.mT @ self._inputs).reshape(*self._inputs.shape[:2], *self._shape)

    def _many_positions(self, positions: int) -> bool:
        """Whether products of all pairs of positions cost more than the gradients themselves."""
        wide, tall = self._inputs.shape[3], self._errors.shape[3]
        return positions * (wide + tall) > wide * tall


class _DummyLengths(torch.autograd.Function):
    """Squared norms (N, U) of vectors (N, U, K), in as few passes over them as can be, for the derivative too."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(vectors)
        norms: Tensor = torch.linalg.vector_norm(vectors, dim=2)
        return norms.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        return vectors * (2 * gradient)[:, :, None]


class _Products(torch.autograd.Function):
    """Squared norms (N, U) of vectors (N, U, K), with their inner products with others (N, K) or (1, K)."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(vectors, others)
        norms = torch.linalg.vector_norm(vectors, dim=2)
        if len(others) == 1:
            return norms.square(), vectors @ others[0]
        return norms.square(), torch.linalg.vecdot(vectors, others[:, None])

    @staticmethod
    def backward(ctx: Any, of_squares: Tensor, of_products: Tensor) -> tuple[Tensor, None]:
        vectors, others = ctx.saved_tensors
        of_vectors = vectors * (2 * of_squares)[:, :, None]
        return of_vectors.addcmul_(others[:, None], of_products[:, :, None]), None


class _Bilinear(torch.autograd.Function):
    """``e^T T a`` (N, P) for inputs a (N, P, in), errors e (N, P, out), and each row's matrix T, read once."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, errors: Tensor, matrix: Matrix) -> Tensor:
        left, right = matrix.products(inputs, errors)
        ctx.save_for_backward(left, right)
        return (left * errors).sum(dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right = ctx.saved_tensors
        return gradient[:, :, None] * right, gradient[:, :, None] * left, None


class DummyGradients:
    """The gradients of N rows of U units, differentiable: U = B examples, or one mean over a dummy batch."""

    def __init__(self, factors: Mapping[str, DummyFactor], joined: Written | None = None) -> None:
        self._factors = dict(factors)
        self._squared: dict[Block, Tensor] = {}
        self._dots: dict[tuple[int, Block], Tensor] = {}
        self._joined: dict[Block, Written] = {} if joined is None else {tuple(factors): joined}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(self._factors)

    def dimension(self, block: Block | None = None) -> int:
        """Return the number of coordinates."""
        return sum(self._factors[name].size for name in block or self.names)

    def squared(self, block: Block | None = None) -> Tensor:
        """Return the squared norms, (N, U)."""
        block = block or self.names
        if block not in self._squared:
            self._squared[block] = total([factor.squared() for _, factor in self._parts(block)])
        return self._squared[block]

    def gram(self, block: Block | None = None) -> Tensor:
        """Return the inner products of each row's units, (N, U, U)."""
        return total([factor.gram() for _, factor in self._parts(block or self.names)])

    def dot(self, targets: Targets, block: Block | None = None) -> Tensor:
        """Return the inner products with each row's target, (N, U)."""
        key = (id(targets), block or self.names)
        if key not in self._dots:
            self._dots[key] = total([factor.dot(targets, names) for names, factor in self._parts(key[1])])
        return self._dots[key]

    def rows(self, block: Block | None = None) -> Vector:
        """Return the gradients written out, tensors (N, U, *shape)."""
        return {name: self._factors[name].rows() for name in block or self.names}

    def _parts(self, block: Block) -> list[tuple[Block, DummyFactor]]:
        """The block's factors with their names; all that are written out as one."""
        written = {name: factor for name in block if isinstance(factor := self._factors[name], Written)}
        parts: list[tuple[Block, DummyFactor]] = [
            ((name,), self._factors[name]) for name in block if name not in written
        ]
        if written:
            names = tuple(written)
            if names not in self._joined:
                self._joined[names] = Written.joined(list(written.values()))
            parts.append((names, self._joined[names]))
        return parts
