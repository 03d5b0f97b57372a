"""The gradients of one parameter for N rows of U units, in the form in which they are cheapest.

A row is one restart of one victim, a unit one dummy example, or a whole dummy batch where only its mean counts.
Everything can be differentiated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fedpriv.attacks.reconstruction.dummy_gradients.targets import Matrix, Targets
from fedpriv.gradients import Block, flattened

__all__ = ["Factor", "Outer", "Written"]


class Factor(ABC):
    """The gradients with respect to one parameter.

    Attributes:
        size: its numbers.
    """

    size: int

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


class Written(Factor):
    """Gradients that are written out, (N, U, *shape)."""

    def __init__(self, rows: Tensor) -> None:
        self.size = rows.shape[2:].numel()
        self._rows = rows
        self._squared: Tensor | None = None
        self._dots: dict[tuple[int, Block], Tensor] = {}

    @override
    def squared(self) -> Tensor:
        if self._squared is None:
            self._squared = _Lengths.apply(self._flat)
        return self._squared

    @override
    def gram(self) -> Tensor:
        return torch.bmm(self._flat, self._flat.mT)

    @override
    def dot(self, targets: Targets, block: Block) -> Tensor:
        key = (id(targets), block)
        if key not in self._dots:
            self._squared, self._dots[key] = _Products.apply(self._flat, targets.flat(block))
        return self._dots[key]

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


class Outer(Factor):
    """Sums over positions t of outer products ``errors[t] inputs[t]^T``, not multiplied out: those of a Linear weight.

    Args:
        inputs: (N, U, T, in).
        errors: (N, U, T, out).
        shape: of the parameter, out * in numbers.
    """

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
        summed: Tensor = products.unflatten(1, self._inputs.shape[1:3]).sum(dim=2)
        return summed

    @override
    def rows(self) -> Tensor:
        return (self._errors.mT @ self._inputs).reshape(*self._inputs.shape[:2], *self._shape)

    def _many_positions(self, positions: int) -> bool:
        """Whether products of all pairs of positions cost more than the gradients themselves."""
        wide, tall = self._inputs.shape[3], self._errors.shape[3]
        return positions * (wide + tall) > wide * tall


class _Lengths(torch.autograd.Function):
    """Squared norms (N, U) of vectors (N, U, K), in as few passes over them as can be, for the derivative too."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(vectors)
        norms: Tensor = torch.linalg.vector_norm(vectors, dim=2)
        return norms.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        of_vectors: Tensor = vectors * (2 * gradient)[:, :, None]
        return of_vectors


class _Products(torch.autograd.Function):
    """Squared norms (N, U) of vectors (N, U, K), and their inner products with others (N, K) or (1, K).

    Both together, since the derivative is one sum of two vectors.
    """

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
    """``e^T T a`` for inputs a (N, P, in), errors e (N, P, out) and each row's own matrix T: (N, P).

    Both products with the matrix, which the derivatives need, are made at once, while it is in the cache: matrices are
    what takes the time.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, errors: Tensor, matrix: Matrix) -> Tensor:
        left, right = matrix.products(inputs, errors)
        ctx.save_for_backward(left, right)
        return (left * errors).sum(dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right = ctx.saved_tensors
        return gradient[:, :, None] * right, gradient[:, :, None] * left, None
