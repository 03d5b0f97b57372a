"""A table that is looked up and multiplied with: input and output embeddings of a language model that are one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedpriv.gradients.factors.factor import Factor
from fedpriv.gradients.factors.lookup import Lookup
from fedpriv.gradients.factors.outer import Outer
from fedpriv.gradients.factors.products import products, rows_are_cheaper, slices
from fedpriv.gradients.norms import row_norms
from fedpriv.gradients.operator import total
from fedpriv.gradients.rounding import of_products, of_sums


class Tied(Factor):
    """Sums of what an embedding and what a Linear layer give the same weight (Press and Wolf 2017).

    With looked-up rows v_t and their errors d_t, inputs a_s and errors e_s, an example's squared norm is that of both
    gradients plus twice the sum over t and s of (a_s . d_t) e_s[v_t]; so are inner products. All in float64, since the
    two may cancel.

    Args:
        multiplied: the Linear layer's, of the same examples and the same shape, (words, width).
    """

    kept_as_sums = True

    def __init__(
        self, looked_up: Lookup, multiplied: Outer, sizes: tuple[int, int, int, int], examples: int, scratch: int
    ) -> None:
        self._words, self._width, self._positions, self._lookups = self._sizes = sizes
        super().__init__(examples, torch.Size(sizes[:2]), scratch)
        self._looked_up = looked_up
        self._multiplied = multiplied

    def gram(self, precise: bool) -> Tensor:
        """Return the inner products: of both gradients with both, or from gradients multiplied out piece by piece."""
        if rows_are_cheaper(self._examples, self._positions, self._width, self._words):
            return total(products(rows[None], self._scratch)[0] for rows in self._pieces())
        strips = []
        for chunk in self._chunks():
            left = self._looked_up.side(chunk)
            crossed = [self._crossed(left, self._multiplied.side(other)) for other in self._chunks()]
            strips.append(torch.cat(crossed, dim=1))
        across = torch.cat(strips)
        return self._looked_up.gram(True) + self._multiplied.gram(True) + across + across.T

    def squared_norms(self) -> Tensor:
        """Return the squared norms, by the cheaper of the two ways of :meth:`gram`."""
        if self._positions * (self._width + self._words) >= self._width * self._words:
            return total(row_norms(rows).square() for rows in self._pieces()).to(self._like)
        one_by_one = [slice(example, example + 1) for example in range(self._examples)]
        return torch.cat([self._own(chunk) for chunk in one_by_one]).clamp_(min=0).to(self._like)

    def absolute_sums(self) -> Tensor:
        """Return the L1 norms, from gradients multiplied out piece by piece."""
        return total(row_norms(rows, 1) for rows in self._pieces()).to(self._like)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        """Return the weighted sums of squares, from gradients multiplied out piece by piece."""
        parts = zip(self._pieces(), weights.split(self._piece), strict=True)
        sums = total(row_norms(rows.mul_(part.reshape(-1).sqrt().to(rows))).square() for rows, part in parts)
        return sums.to(self._like)

    def dot(self, vector: Tensor) -> Tensor:
        """Return the sum of both inner products with a table."""
        return self._looked_up.dot(vector) + self._multiplied.dot(vector)

    def combine(self, weights: Tensor) -> Tensor:
        """Return the sum of both weighted sums."""
        return self._multiplied.combine(weights).add_(self._looked_up.combine(weights))

    def rows(self, start: int, stop: int) -> Tensor:
        """Return gradients multiplied out."""
        return self._looked_up.rows(start, stop).add_(self._multiplied.rows(start, stop))

    def part(self, start: int, stop: int) -> Factor:
        """Return both parts of some examples."""
        looked_up, multiplied = self._looked_up.part(start, stop), self._multiplied.part(start, stop)
        return Tied(looked_up, multiplied, self._sizes, stop - start, self._scratch)

    def masked(self, keep: Tensor) -> Factor:
        """Return both, the others zero."""
        looked_up, multiplied = self._looked_up.masked(keep), self._multiplied.masked(keep)
        return Tied(looked_up, multiplied, self._sizes, self._examples, self._scratch)

    def magnitudes(self) -> Tensor:
        """Return the sums of both bounds."""
        return self._looked_up.magnitudes() + self._multiplied.magnitudes()

    def roundings(self) -> Tensor:
        """Return what the sums may be off by, and norms from products of positions, as of outer products alone."""
        terms = self._positions + self._lookups
        share = of_sums(terms, self._like.dtype)
        if self._positions * (self._width + self._words) < 2 * self._width * self._words:
            share += of_products(terms**2 + self._width + self._words)
        return share * self.magnitudes()

    def pair_products(self, precise: bool) -> int:
        """Return those of both, and of both with one another."""
        across = self._positions * self._lookups * self._width
        return self._looked_up.pair_products(True) + self._multiplied.pair_products(True) + 2 * across

    @property
    def _like(self) -> Tensor:
        """Nothing, of the gradients' type and device."""
        return self._multiplied.magnitudes()[:0]

    @property
    def _piece(self) -> int:
        """How many rows of the table are multiplied out at once for all examples, in float64."""
        return self._step(2 * self._examples * self._width, 8)

    def _pieces(self) -> Iterator[Tensor]:
        """The gradients multiplied out, some rows of the table at a time: (B, rows * width) each, in float64."""
        for words in slices(0, self._words, self._piece):
            rows = self._multiplied.written(slice(0, self._examples), words, precise=True)
            yield self._looked_up.add_rows(rows, words).flatten(1)

    def _chunks(self) -> Iterator[slice]:
        """Examples of which two lots fit, in float64, with the products of their positions."""
        each = 2 * self._positions * (self._words + self._width) + self._lookups * self._width
        most = max(1, int((self._scratch / (32 * self._positions * self._lookups)) ** 0.5))
        return slices(0, self._examples, min(most, self._step(2 * each, 8)))

    def _crossed(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
        """Inner products of embeddings' gradients (n examples) with Linear layers' (m), (n, m)."""
        (indices, errors), (inputs, other_errors) = left, right
        pairs = (errors @ inputs.T).mul_(other_errors[:, indices].T)
        by_examples: Tensor = pairs.unflatten(1, (-1, self._positions)).unflatten(0, (-1, self._lookups))
        return by_examples.sum(dim=(1, 3))

    def _own(self, chunk: slice) -> Tensor:
        """The squared norm of one example, (1,), in float64."""
        looked_up, multiplied = self._looked_up.side(chunk), self._multiplied.side(chunk)
        inputs, errors = multiplied
        own = (inputs @ inputs.T).mul_(errors @ errors.T).sum() + looked_up[1].square().sum()
        return (own + 2 * self._crossed(looked_up, multiplied).sum()).view(1)
