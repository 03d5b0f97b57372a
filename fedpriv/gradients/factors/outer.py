"""A sum of outer products an example: a Linear layer at many positions, a convolution."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedpriv.gradients.factors.factor import Factor, Inputs
from fedpriv.gradients.factors.products import (
    LARGE,
    QUICK,
    products,
    products_of_positions,
    rows_are_cheaper,
    slices,
    zeroed,
)
from fedpriv.gradients.norms import row_norms
from fedpriv.gradients.operator import in_double, total
from fedpriv.gradients.rounding import of_products, of_sums

# Sums of outer products over more positions than this are computed in float64: rounding would cost too many digits.
LONG = 64


class _Some:
    """Inputs of some of a batch's examples, made only when they are asked for."""

    def __init__(self, inputs: Inputs, start: int, stop: int) -> None:
        self._inputs = inputs
        self._start = start
        self.shape = torch.Size((stop - start, *inputs.shape[1:]))

    def __getitem__(self, examples: slice) -> Tensor:
        """Return some of them, (n, T, in)."""
        return self._inputs[self._start + examples.start : self._start + examples.stop]


class _Masked:
    """Inputs with zeros in place of some examples', made only when they are asked for.

    Args:
        keep: which are left as they are, (B,).
    """

    def __init__(self, inputs: Inputs, keep: Tensor) -> None:
        self._inputs = inputs
        self._keep = keep
        self.shape = inputs.shape

    def __getitem__(self, examples: slice) -> Tensor:
        """Return some of them, (n, T, in)."""
        return zeroed(self._inputs[examples], self._keep[examples])


class Outer(Factor):
    """Sums of outer products: the gradient of example i is the sum over positions t of ``errors[i, t] inputs[i, t]^T``.

    This is the gradient of a weight matrix that is applied at T positions, never multiplied out for a whole batch.

    Args:
        inputs: what the weight was applied to, (B, T, in).
        errors: the gradients of the loss with respect to its results, (B, T, out).
        magnitudes: bounds of the sums over t of |errors[i, t]| |inputs[i, t]|, (B,).
    """

    kept_as_sums = True

    def __init__(self, inputs: Inputs, errors: Tensor, shape: torch.Size, scratch: int, magnitudes: Tensor) -> None:
        super().__init__(len(errors), shape, scratch)
        self._inputs = inputs
        self._errors = errors
        self._magnitudes = magnitudes
        self._positions, self._wide = inputs.shape[1:]
        self._tall = errors.shape[2]
        self._size = errors.element_size()
        self._long = self._positions > LONG

    def gram(self, precise: bool) -> Tensor:
        """Return the inner products: of products of all positions, or from gradients multiplied out piece by piece."""
        if rows_are_cheaper(self._examples, self._positions, self._wide, self._tall):
            own_type = not precise and self._is_quick
            return total(
                products(rows[None], self._scratch, own_type)[0] for rows in self._pieces(precise=not own_type)
            )
        # Positions may nearly cancel. In float32 the sum of their products would then be noise, even 0, and an example
        # with such a length would be neither clipped nor scaled; the products are exact to float32's inputs in float64.
        return self._by_pairs(self._positions, self._numbers, self.side, products_of_positions)

    def squared_norms(self) -> Tensor:
        """Return the squared norms, by the cheaper of the two ways of :meth:`gram`."""
        if self._positions * (self._wide + self._tall) >= self._wide * self._tall:
            return total(row_norms(rows).square() for rows in self._pieces(self._long)).to(self._errors)
        chunks = self._chunks(4 * self._positions**2 + 3 * self._numbers)
        pairs = ((in_double(a), in_double(e)) for a, e in chunks)
        return torch.cat([(a @ a.mT).mul_(e @ e.mT).sum(dim=(1, 2)) for a, e in pairs]).clamp_(min=0).to(self._errors)

    def absolute_sums(self) -> Tensor:
        """Return the L1 norms, from gradients multiplied out piece by piece."""
        return total(row_norms(rows, 1) for rows in self._pieces(self._long)).to(self._errors)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        """Return the weighted sums of squares, from gradients multiplied out piece by piece."""
        matrix = weights.reshape(self._tall, self._wide)
        size = 8 if self._long else self._size
        pieces = zip(self._pieces(self._long), matrix.split(self._piece(size)), strict=True)
        sums = total(row_norms(rows.mul_(part.reshape(-1).sqrt().to(rows))).square() for rows, part in pieces)
        return sums.to(self._errors)

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner products with a matrix; the smaller side is what is written out."""
        matrix = vector.reshape(self._tall, self._wide)
        chunks = self._chunks(self._numbers)
        if self._tall <= self._wide:
            return torch.cat([(a @ matrix.T).mul_(e).sum(dim=(1, 2)) for a, e in chunks])
        return torch.cat([(e @ matrix).mul_(a).sum(dim=(1, 2)) for a, e in chunks])

    def combine(self, weights: Tensor) -> Tensor:
        """Return the weighted sum."""
        total = self._errors.new_empty(self._shape)
        self.add_to(total, 0.0, weights)
        return total

    def add_to(self, total: Tensor, scale: float, weights: Tensor) -> None:
        """Add the weighted sum: one matrix product, as in an ordinary backward pass; in float64 over many positions."""
        if self._long:
            self._add_precisely(total.view(self._tall, self._wide), scale, weights)
            return
        parts = weights.split(self._step(self._numbers, self._size))
        for (a, e), weight in zip(self._chunks(self._numbers), parts, strict=True):
            weighted = (e * weight[:, None, None]).reshape(-1, self._tall).T
            total.view(self._tall, self._wide).addmm_(weighted, a.reshape(-1, self._wide), beta=scale)
            scale = 1.0

    def rows(self, start: int, stop: int) -> Tensor:
        """Return gradients multiplied out."""
        written = self.written(slice(start, stop), slice(0, self._tall), precise=False)
        return written.view(stop - start, *self._shape)

    def part(self, start: int, stop: int) -> "Outer":
        """Return the outer products of some examples."""
        inputs, magnitudes = _Some(self._inputs, start, stop), self._magnitudes[start:stop]
        return Outer(inputs, self._errors[start:stop], self._shape, self._scratch, magnitudes)

    def masked(self, keep: Tensor) -> "Outer":
        """Return the outer products, both sides of the others zero; inputs that are made on demand stay so."""
        inputs = zeroed(self._inputs, keep) if isinstance(self._inputs, Tensor) else _Masked(self._inputs, keep)
        errors, magnitudes = zeroed(self._errors, keep), zeroed(self._magnitudes, keep)
        return Outer(inputs, errors, self._shape, self._scratch, magnitudes)

    def magnitudes(self) -> Tensor:
        """Return the bounds of what is summed."""
        return self._magnitudes

    def roundings(self) -> Tensor:
        """Return what the sums over the positions may be off by, and the norms that come from products of positions."""
        share = of_sums(self._positions, torch.float64 if self._long else self._errors.dtype)
        # From 2 in * out on, norms and inner products come from gradients multiplied out, whatever the batch.
        if self._positions * (self._wide + self._tall) < 2 * self._wide * self._tall:
            share += of_products(self._positions**2 + self._wide + self._tall)
        return share * self._magnitudes

    def pair_products(self, precise: bool) -> int:
        """Return those of the cheaper of the two ways of :meth:`gram`."""
        if rows_are_cheaper(self._examples, self._positions, self._wide, self._tall):
            numbers = self._wide * self._tall
            return numbers if precise or not self._is_quick else numbers // QUICK
        return self._positions**2 * (self._wide + self._tall)

    def side(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return all inputs (n T, in) and errors (n T, out) of some examples, in float64."""
        inputs, errors = self._inputs[chunk].reshape(-1, self._wide), self._errors[chunk].reshape(-1, self._tall)
        return in_double(inputs), in_double(errors)

    def written(self, examples: slice, tall: slice, precise: bool) -> Tensor:
        """Return some rows of some examples' gradients, (n, rows, in), a new tensor, in float64 if ``precise``."""
        like = in_double(self._errors[:0]) if precise else self._errors
        written = like.new_empty(examples.stop - examples.start, tall.stop - tall.start, self._wide)
        for chunk in slices(examples.start, examples.stop, self._step(2 * self._numbers, like.element_size())):
            inputs, errors = self._inputs[chunk], self._errors[chunk, :, tall]
            inputs, errors = (in_double(inputs), in_double(errors)) if precise else (inputs, errors)
            torch.bmm(errors.mT, inputs, out=written[chunk.start - examples.start : chunk.stop - examples.start])
        return written

    @property
    def _is_quick(self) -> bool:
        """Whether inner products may come from the gradients' own type: of a matrix for which that is faster."""
        return not self._long and self._wide * self._tall >= LARGE

    @property
    def _numbers(self) -> int:
        """Of an example: its errors, and its inputs twice, which are laid out once more when made on demand."""
        return self._positions * (2 * self._wide + self._tall)

    def _chunks(self, numbers_each: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and errors of some examples at a time, of which each needs ``numbers_each`` numbers."""
        for chunk in slices(0, self._examples, self._step(numbers_each, self._size)):
            yield self._inputs[chunk], self._errors[chunk]

    def _piece(self, size: int) -> int:
        """How many rows of the matrix are multiplied out at once: half of the scratch memory is for the result."""
        return self._step(2 * self._examples * self._wide, size)

    def _pieces(self, precise: bool) -> Iterator[Tensor]:
        """The gradients multiplied out, some rows of the matrix at a time: (B, rows * in) each, new tensors."""
        for rows in slices(0, self._tall, self._piece(8 if precise else self._size)):
            yield self.written(slice(0, self._examples), rows, precise).flatten(1)

    def _add_precisely(self, total: Tensor, scale: float, weights: Tensor) -> None:
        """Add the weighted sum to a matrix (out, in), summed in float64 some rows of the matrix at a time."""
        precise = in_double(weights)
        step = self._step(4 * self._numbers, precise.element_size())
        for tall in slices(0, self._tall, self._step(4 * self._wide, precise.element_size())):
            added = precise.new_zeros(tall.stop - tall.start, self._wide)
            for chunk in slices(0, self._examples, step):
                errors = (in_double(self._errors[chunk, :, tall]) * precise[chunk, None, None]).flatten(0, 1)
                added.addmm_(errors.T, in_double(self._inputs[chunk]).reshape(-1, self._wide))
            rows = total[tall]
            rows.copy_(added if scale == 0 else added.add_(in_double(rows), alpha=scale))
