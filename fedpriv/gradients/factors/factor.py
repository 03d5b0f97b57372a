"""What a factor is: the per-example gradients of one parameter, as its layer's backward pass makes them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedpriv.gradients.factors.products import (
    slices,
    summed,
)


class Memory:
    """What the gradients of a batch may take beyond the inputs and the output gradients of its layers.

    Half is for what is written out to be kept, all layers together; half for what is computed on the way, each time.

    Attributes:
        scratch: bytes for what is computed on the way.
        models: in how many ways the batch is cut; what is decided by its size is decided by one model's.
    """

    def __init__(self, chunk_bytes: int, models: int = 1) -> None:
        self.scratch = chunk_bytes // 2
        self.models = models
        self._free = models * (chunk_bytes - self.scratch)

    def reserve(self, numbers: int, like: Tensor) -> bool:
        """Tell whether so many numbers fit into what is still free to be kept, and count them as kept if they do."""
        wanted = numbers * like.element_size()
        if wanted > self._free:
            return False
        self._free -= wanted
        return True


class Inputs(Protocol):
    """What a weight matrix was applied to: a tensor (B, T, in), or something that makes the examples asked for."""

    @property
    def shape(self) -> torch.Size:
        """(B, T, in)."""

    def __getitem__(self, examples: slice, /) -> Tensor:
        """Return some examples, (n, T, in)."""


class Factor(ABC):
    """The gradients of B examples with respect to one parameter.

    Attributes:
        kept_as_sums: whether gradients are sums whose terms are kept, and may cancel where they are combined.
    """

    kept_as_sums: ClassVar[bool] = False

    def __init__(self, examples: int, shape: torch.Size, scratch: int) -> None:
        self._examples = examples
        self._shape = shape
        self._scratch = scratch

    @abstractmethod
    def gram(self, precise: bool) -> Tensor:
        """Return their inner products, (B, B), in float64 at least if ``precise``; not to be changed."""

    def grams(self, groups: int, precise: bool) -> Tensor:
        """Return the inner products within G groups of the same size, (G, B / G, B / G), as :meth:`gram` does."""
        return torch.stack([part.gram(precise) for part in self._cut(groups)])

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Return their squared norms, (B,)."""

    @abstractmethod
    def absolute_sums(self) -> Tensor:
        """Return their L1 norms, (B,)."""

    @abstractmethod
    def weighted_squares(self, weights: Tensor) -> Tensor:
        """Return the sums of their squares with weights of the parameter's shape, (B,)."""

    @abstractmethod
    def dot(self, vector: Tensor) -> Tensor:
        """Return their inner products with a tensor of the parameter's shape, (B,)."""

    def dots(self, vectors: Tensor) -> Tensor:
        """Return the inner products of G groups of the same size with a tensor each, (G, *shape): (G, B / G)."""
        return torch.stack([part.dot(vector) for part, vector in zip(self._cut(len(vectors)), vectors, strict=True)])

    @abstractmethod
    def combine(self, weights: Tensor) -> Tensor:
        """Return their sum with weights (B,), a new tensor of the parameter's shape."""

    def add_to(self, total: Tensor, scale: float, weights: Tensor) -> None:
        """Replace a tensor of the parameter's shape by ``scale`` times itself plus their sum with weights (B,)."""
        total.mul_(scale).add_(self.combine(weights))

    def combine_each(self, weights: Tensor) -> Tensor:
        """Return the sums of G groups of the same size with weights (G, B / G), a new tensor (G, *shape)."""
        return torch.stack([part.combine(own) for part, own in zip(self._cut(len(weights)), weights, strict=True)])

    def add_to_each(self, totals: Tensor, scale: float, weights: Tensor) -> None:
        """Replace G tensors (G, *shape) by ``scale`` times themselves plus the sums of :meth:`combine_each`."""
        totals.mul_(scale).add_(self.combine_each(weights))

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """Return gradients ``start`` to ``stop`` - 1 written out, (stop - start, *shape); not to be changed."""

    @abstractmethod
    def part(self, start: int, stop: int) -> "Factor":
        """Return gradients ``start`` to ``stop`` - 1 in the same form, without copying them; at least one."""

    @abstractmethod
    def masked(self, keep: Tensor) -> "Factor":
        """Return the gradients with zeros in place of all but those to keep, (B,), in the same form."""

    @abstractmethod
    def magnitudes(self) -> Tensor:
        """Return bounds of their norms, and of those of what is summed to make them, (B,).

        One is NaN or infinite if a number is that goes into the gradient, or if the bound is beyond its type.
        """

    def roundings(self) -> Tensor:
        """Return bounds, (B,), of the norm of what rounding adds to a gradient where it is combined with a weight of 1.

        Beside the few roundings of its numbers: 0 unless the gradients are kept as sums.
        """
        return torch.zeros_like(self.magnitudes())

    @abstractmethod
    def pair_products(self, precise: bool) -> int:
        """Return about how many multiplications the inner product of two of them takes; quick ones count for less."""

    def _cut(self, groups: int) -> Sequence["Factor"]:
        """Cut the batch into groups of the same size."""
        if groups == 1:
            return (self,)
        size = self._examples // groups
        return [self.part(start, start + size) for start in range(0, self._examples, size)]

    def _step(self, numbers_each: int, size: int) -> int:
        """How many things of ``numbers_each`` numbers of ``size`` bytes fit into the scratch, at least 1."""
        return max(1, self._scratch // (max(1, numbers_each) * size))

    def _by_pairs(self, positions: int, numbers: int, side: "Side", product: "Product") -> Tensor:
        """Inner products (B, B) from products of all positions with all positions, summed over pairs of examples."""
        half = self._scratch // 16  # for two sides, for two products, all of them in float64
        step = max(1, min(math.isqrt(half // 2) // positions, half // (2 * numbers)))
        parts = list(slices(0, self._examples, step))
        strips = []
        for number, first in enumerate(parts):
            left = side(first)
            rights = (left if second is first else side(second) for second in parts[number:])
            strips.append(torch.cat([summed(product(left, right), positions) for right in rights], dim=1))
        if len(strips) == 1:
            return strips[0]
        total = strips[0].new_empty(self._examples, self._examples)
        for chunk, strip in zip(parts, strips, strict=True):
            total[chunk, chunk.start :] = strip
            total[chunk.start :, chunk] = strip.T
        return total


Side = Callable[[slice], tuple[Tensor, Tensor]]
Product = Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], Tensor]
