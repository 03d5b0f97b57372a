"""Rows of a table that examples look up: an embedding."""

import math
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from fedpriv.gradients.factors.factor import Factor
from fedpriv.gradients.factors.products import (
    products,
    products_of_lookups,
    slices,
    summed_at_first,
    zeroed,
)
from fedpriv.gradients.norms import lengths, row_norms
from fedpriv.gradients.operator import in_double
from fedpriv.gradients.rounding import without_extremes


class Lookup(Factor):
    """Gradients of an embedding: example i adds ``errors[i, t]`` to the row ``indices[i, t]``.

    Args:
        indices: (B, T).
        errors: (B, T, width); only one of an example's positions that look up the same row may have any. So no sum is
            left whose terms may cancel.
        shape: of the table, (words, width).
        magnitudes: bounds of what was summed to make the gradients, (B,).
    """

    def __init__(self, indices: Tensor, errors: Tensor, shape: torch.Size, scratch: int, magnitudes: Tensor) -> None:
        super().__init__(len(errors), shape, scratch)
        self._indices = indices
        self._errors = errors
        self._magnitudes = magnitudes
        self._positions = indices.shape[1]
        self._words, self._width = shape

    @classmethod
    def of(cls, indices: Tensor, errors: Tensor, shape: torch.Size, scratch: int) -> "Lookup":
        """Make it from the gradients of the loss with respect to all vectors that were looked up, (B, T, width)."""
        indices = indices.to(errors.device, torch.int64)
        # At most the norm of all of an example's errors times the root of their number.
        magnitudes = math.sqrt(errors.shape[1]) * without_extremes(lengths(errors.flatten(1)))
        made = cls(indices, errors.new_empty(errors.shape), shape, scratch, magnitudes)
        for chunk in slices(0, len(errors), made._chunk):
            made._errors[chunk] = summed_at_first(indices[chunk], errors[chunk])
        return made

    def gram(self, precise: bool) -> Tensor:
        """Return the inner products: two positions count when they look up the same row."""
        if self._is_common:
            return products(self._errors.flatten(1)[None], self._scratch)[0]
        return self._by_pairs(self._positions, self._positions * (self._width + 1), self.side, products_of_lookups)

    def squared_norms(self) -> Tensor:
        """Return the squared norms."""
        return lengths(self._errors.flatten(1)).square()

    def absolute_sums(self) -> Tensor:
        """Return the L1 norms."""
        return row_norms(self._errors.flatten(1), 1)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        """Return the weighted sums of squares."""
        return torch.cat([row_norms(weights[i].sqrt_().mul_(e).flatten(1)).square() for i, e in self._chunks()])

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner products with a table."""
        return torch.cat([vector[i].mul_(e).sum(dim=(1, 2)) for i, e in self._chunks()])

    def combine(self, weights: Tensor) -> Tensor:
        """Return the weighted sum: the rows of the table that were looked up."""
        total = self._errors.new_zeros(self._shape)
        for (i, e), weight in zip(self._chunks(), weights.split(self._chunk), strict=True):
            total.index_add_(0, i.reshape(-1), (e * weight[:, None, None]).reshape(-1, self._width))
        return total

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the gradients, zero but for the rows that were looked up."""
        written = self._errors.new_zeros(stop - start, *self._shape)
        for chunk in slices(0, stop - start, self._chunk):
            first = self._words * torch.arange(chunk.start, chunk.stop, device=written.device)
            places = self._indices[start + chunk.start : start + chunk.stop] + first[:, None]
            errors = self._errors[start + chunk.start : start + chunk.stop]
            written.view(-1, self._width).index_add_(0, places.reshape(-1), errors.reshape(-1, self._width))
        return written

    def part(self, start: int, stop: int) -> "Lookup":
        """Return what some examples look up."""
        indices, errors, magnitudes = (all_[start:stop] for all_ in (self._indices, self._errors, self._magnitudes))
        return Lookup(indices, errors, self._shape, self._scratch, magnitudes)

    def masked(self, keep: Tensor) -> "Lookup":
        """Return what the examples look up, the errors of the others zero."""
        errors, magnitudes = zeroed(self._errors, keep), zeroed(self._magnitudes, keep)
        return Lookup(self._indices, errors, self._shape, self._scratch, magnitudes)

    def magnitudes(self) -> Tensor:
        """Return the bounds of what was summed."""
        return self._magnitudes

    def pair_products(self, precise: bool) -> int:
        """Return those of all positions with all positions, or with their own."""
        return self._width * self._positions ** (1 if self._is_common else 2)

    @cached_property
    def _is_common(self) -> bool:
        """Whether all examples look up the same rows in the same order, as for embeddings of positions."""
        return bool((self._indices == self._indices[:1]).all())

    def side(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return all indices (n T,) and errors (n T, width) of some examples, these in float64."""
        errors = in_double(self._errors[chunk].reshape(-1, self._width))
        return self._indices[chunk].reshape(-1).to(errors.device), errors

    def add_rows(self, written: Tensor, words: slice) -> Tensor:
        """Add some rows of the gradients to what is written out of them, (B, rows, width), in place, and return it."""
        inside = (self._indices >= words.start) & (self._indices < words.stop)
        examples, _ = inside.nonzero(as_tuple=True)
        places = examples * (words.stop - words.start) + self._indices[inside] - words.start
        written.view(-1, self._width).index_add_(0, places, self._errors[inside].to(written))
        return written

    @property
    def _chunk(self) -> int:
        """How many examples are handled at once, four tensors as large as the errors."""
        return self._step(4 * self._positions * self._width, self._errors.element_size())

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Indices and errors of some examples at a time."""
        return zip(self._indices.split(self._chunk), self._errors.split(self._chunk), strict=True)
