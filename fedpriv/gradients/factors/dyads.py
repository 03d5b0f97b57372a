"""One outer product an example: a Linear layer without further positions."""

import torch
from torch import Tensor

from fedpriv.gradients.factors.factor import Factor
from fedpriv.gradients.factors.products import grouped, powers_of_two, slices, zeroed
from fedpriv.gradients.factors.rows import Rows
from fedpriv.gradients.norms import row_norms
from fedpriv.gradients.rounding import without_extremes


class Dyads(Factor):
    """Outer products: the gradient of example i is ``errors[i] inputs[i]^T``.

    This is the gradient of a weight matrix that is applied once an example, never multiplied out for a whole batch.

    Args:
        inputs: what the weight was applied to, (B, in).
        errors: the gradients of the loss with respect to its results, (B, out), a side; the bias has the same.
    """

    def __init__(self, inputs: Tensor, errors: Rows, scratch: int) -> None:
        values = errors.rows(0, len(inputs))
        super().__init__(len(inputs), torch.Size((values.shape[1], inputs.shape[1])), scratch)
        self._inputs, self._errors = inputs, values
        self._sides = Rows(inputs, scratch, side=True), errors

    def gram(self, precise: bool) -> Tensor:
        """Return the inner products."""
        return self.grams(1, precise)[0]

    def grams(self, groups: int, precise: bool) -> Tensor:
        """Return the inner products within groups: products of inner products."""
        left, right = self._sides
        return left.grams(groups, precise) * right.grams(groups, precise)

    def squared_norms(self) -> Tensor:
        """Return the squared norms: products of norms, squared."""
        left, right = self._sides
        return (left.norms() * right.norms()).square()

    def absolute_sums(self) -> Tensor:
        """Return the L1 norms: products of L1 norms."""
        return row_norms(self._inputs, 1) * row_norms(self._errors, 1)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        """Return the weighted sums of squares: a matrix product.

        The sides are divided by powers of 2, which rounds nothing, so that none of their squares is 0 or infinite.
        """
        left, right = (powers_of_two(side.norms()) for side in self._sides)
        step = self._step(4 * sum(self._shape), self._errors.element_size())
        sums = []
        for chunk in slices(0, self._examples, step):
            a, e = self._inputs[chunk] / left[chunk, None], self._errors[chunk] / right[chunk, None]
            sums.append((e.square_() @ weights).mul_(a.square_()).sum(dim=1))
        return torch.cat(sums) * (left * right).square()

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner products with a matrix."""
        return self.dots(vector[None])[0]

    def dots(self, vectors: Tensor) -> Tensor:
        """Return the inner products of groups with a matrix each; the smaller side is what is written out."""
        step = max(1, self._step(sum(self._shape), self._errors.element_size()) // len(vectors))
        inputs, errors = (grouped(side, len(vectors)).split(step, dim=1) for side in (self._inputs, self._errors))
        if self._shape[0] <= self._shape[1]:
            parts = [torch.bmm(a, vectors.mT).mul_(e).sum(dim=2) for a, e in zip(inputs, errors, strict=True)]
        else:
            parts = [torch.bmm(e, vectors).mul_(a).sum(dim=2) for a, e in zip(inputs, errors, strict=True)]
        return torch.cat(parts, dim=1)

    def combine(self, weights: Tensor) -> Tensor:
        """Return the weighted sum."""
        total = self._errors.new_empty(self._shape)
        self.add_to(total, 0.0, weights)
        return total

    def add_to(self, total: Tensor, scale: float, weights: Tensor) -> None:
        """Add the weighted sum: one matrix product, as in an ordinary backward pass."""
        weighted = self._errors * weights[:, None]
        total.addmm_(weighted.T, self._inputs, beta=scale)

    def combine_each(self, weights: Tensor) -> Tensor:
        """Return the weighted sums of groups: one batched product."""
        weighted = grouped(self._errors, len(weights)) * weights[..., None]
        return torch.bmm(weighted.mT, grouped(self._inputs, len(weights)))

    def add_to_each(self, totals: Tensor, scale: float, weights: Tensor) -> None:
        """Add the weighted sums of groups: one batched product."""
        weighted = grouped(self._errors, len(weights)) * weights[..., None]
        totals.baddbmm_(weighted.mT, grouped(self._inputs, len(weights)), beta=scale)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return gradients multiplied out."""
        return self._errors[start:stop, :, None] * self._inputs[start:stop, None, :]

    def part(self, start: int, stop: int) -> Factor:
        """Return some of the pairs."""
        return Dyads(self._inputs[start:stop], self._sides[1].part(start, stop), self._scratch)

    def masked(self, keep: Tensor) -> Factor:
        """Return the pairs, both sides of the others zero."""
        return Dyads(zeroed(self._inputs, keep), self._sides[1].masked(keep), self._scratch)

    def magnitudes(self) -> Tensor:
        """Return the norms: products of norms."""
        left, right = self._sides
        return without_extremes(left.norms()) * without_extremes(right.norms())

    def pair_products(self, precise: bool) -> int:
        """Return the length of both sides."""
        return sum(self._shape)
