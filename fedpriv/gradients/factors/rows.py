"""Gradients written out, one row an example."""

import torch
from torch import Tensor

from fedpriv.gradients.factors.factor import Factor
from fedpriv.gradients.factors.products import LARGE, QUICK, grouped, products, zeroed
from fedpriv.gradients.norms import lengths, row_norms
from fedpriv.gradients.operator import total


class Rows(Factor):
    """Gradients written out: ``rows`` of shape (B, *shape); their numbers are used in the order in which they lie.

    Inner products of small gradients are in float64 even where that is not asked for: it takes little time compared
    with writing them out. That is not so for the two sides of dyads, and for large gradients.

    Args:
        magnitudes: bounds of what was summed to make them, (B,); ``None``: they are no sums.
    """

    def __init__(self, rows: Tensor, scratch: int, magnitudes: Tensor | None = None, *, side: bool = False) -> None:
        super().__init__(len(rows), rows.shape[1:], scratch)
        # A new tensor from here on only where the rows have gaps.
        strides = rows.stride()
        self._order = sorted(range(rows.ndim - 1), key=lambda axis: -strides[axis + 1])
        self._rows = rows.permute(0, *(axis + 1 for axis in self._order)).reshape(len(rows), self._shape.numel())
        self._magnitudes = magnitudes
        self._side = side
        self._grams: dict[tuple[int, bool], Tensor] = {}
        self._norms: Tensor | None = None

    def gram(self, precise: bool) -> Tensor:
        """Return the inner products."""
        return self.grams(1, precise)[0]

    def grams(self, groups: int, precise: bool) -> Tensor:
        """Return the inner products within groups, B^2 n / G operations for n coordinates the first time."""
        precise = precise or not self._is_quick
        if (groups, precise) not in self._grams:
            rows = grouped(self._rows, groups)
            self._grams[groups, precise] = products(rows, self._scratch, own_type=not precise)
        return self._grams[groups, precise]

    def norms(self) -> Tensor:
        """Return the norms, (B,); computed once, not to be changed."""
        if self._norms is None:
            self._norms = lengths(self._rows)
        return self._norms

    def squared_norms(self) -> Tensor:
        """Return the squared norms."""
        return self.norms().square()

    def absolute_sums(self) -> Tensor:
        """Return the L1 norms."""
        return row_norms(self._rows, 1)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        """Return the weighted sums of squares, some coordinates at a time."""
        step = self._step(self._examples, self._rows.element_size())
        parts = zip(self._rows.split(step, dim=1), self._laid_out(weights).split(step), strict=True)
        return total(row_norms(columns * chosen.sqrt()).square() for columns, chosen in parts)

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner products with a tensor."""
        return self.dots(vector[None])[0]

    def dots(self, vectors: Tensor) -> Tensor:
        """Return the inner products of groups with a tensor each."""
        order = (0, *(axis + 1 for axis in self._order))
        laid_out = vectors.permute(order).reshape(len(vectors), 1, self._shape.numel())
        # Vectors from the left: from the right a batched product takes ten times as long.
        return torch.bmm(laid_out, grouped(self._rows, len(vectors)).mT)[:, 0]

    def combine(self, weights: Tensor) -> Tensor:
        """Return the weighted sum."""
        return self._shaped(torch.mv(self._rows.T, weights)[None])[0].contiguous()

    def combine_each(self, weights: Tensor) -> Tensor:
        """Return the weighted sums of groups: one batched product."""
        return self._shaped(torch.bmm(weights[:, None], grouped(self._rows, len(weights)))[:, 0]).contiguous()

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the gradients themselves."""
        return self._shaped(self._rows[start:stop])

    def part(self, start: int, stop: int) -> "Rows":
        """Return some of the gradients."""
        magnitudes = None if self._magnitudes is None else self._magnitudes[start:stop]
        part = Rows(self.rows(start, stop), self._scratch, magnitudes, side=self._side)
        part._norms = None if self._norms is None else self._norms[start:stop]
        return part

    def masked(self, keep: Tensor) -> "Rows":
        """Return a copy of the gradients, the others zero."""
        magnitudes = None if self._magnitudes is None else zeroed(self._magnitudes, keep)
        return Rows(self._shaped(zeroed(self._rows, keep)), self._scratch, magnitudes, side=self._side)

    def magnitudes(self) -> Tensor:
        """Return the norms, or the bounds of what was summed."""
        return self.norms() if self._magnitudes is None else self._magnitudes

    def pair_products(self, precise: bool) -> int:
        """Return the number of coordinates."""
        numbers = self._rows.shape[1]
        return numbers if precise or numbers < LARGE else numbers // QUICK

    @property
    def _is_quick(self) -> bool:
        """Whether inner products may come from the gradients' own type: of sides, and where that is faster."""
        return self._side or self._rows.shape[1] >= LARGE

    def _laid_out(self, vector: Tensor) -> Tensor:
        """A tensor of the parameter's shape as a row."""
        return vector.permute(self._order).reshape(-1)

    def _shaped(self, rows: Tensor) -> Tensor:
        """Rows as tensors of the parameter's shape."""
        lying = rows.view(len(rows), *(self._shape[axis] for axis in self._order))
        return lying.permute(0, *(self._order.index(axis) + 1 for axis in range(len(self._shape))))
