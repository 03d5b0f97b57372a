"""The per-example gradients of one parameter, kept in the form in which the layer's backward pass makes them.

A factor answers the operator's questions for one parameter. Which form is cheapest depends on the layer: the gradient
of a Linear weight is the outer product of the output's gradient and the input, and need never be multiplied out.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise, repeat
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.gradients.numerics import (
    lengths,
    lengths_of,
    lost,
    of_products,
    of_sums,
    row_norms,
    within,
    without_extremes,
)
from fedpriv.gradients.operator import flattened, in_double, total

# Sums and products of rows of gradients, by which factors answer.


# What is worked on at once on a processor where that would not fit into a core's cache as a whole.
CACHE_BYTES = 1 << 20

# Inner products in float32 take at most half of the time of float64; of sums, from so many numbers on.
QUICK = 2
LARGE = 1 << 14
SHORT = 16

# Gradients of at most so many numbers are answered for together.
FEW = 1 << 13

# Multiplications that take no longer than the calls of torch that would save them.
SMALL = 1 << 21

# Rows of a symmetric product that are computed together.
STRIP = 64

# A processor multiplies 16 rows or more, and rows longer than this, in twice the time that it takes for pieces of them.
LEAST_ROWS, MOST_ROWS, RUN = 8, 12, 1 << 10


def rows_are_cheaper(examples: int, positions: int, wide: int, tall: int) -> bool:
    """Tell whether the Gram matrix of sums of outer products costs less from gradients that are multiplied out."""
    of_positions = examples * positions * positions * (wide + tall)
    return (examples + positions) * wide * tall < of_positions


def slices(start: int, stop: int, step: int) -> Iterator[slice]:
    """Cut a range into parts of at most ``step``."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def grouped(rows: Tensor, groups: int) -> Tensor:
    """Rows (B, n) in groups of the same size, (G, B / G, n)."""
    return rows.unflatten(0, (groups, len(rows) // groups))


def zeroed(values: Tensor, keep: Tensor) -> Tensor:
    """Return values (B, ...) with zeros in place of those of all examples but the ones to keep, (B,); a new tensor."""
    return values.masked_fill(~keep.view(-1, *([1] * (values.ndim - 1))), 0)


def powers_of_two(norms: Tensor) -> Tensor:
    """Return for each norm a power of 2 that is about as large, for 0 a 1."""
    mantissas = torch.frexp(norms).mantissa
    return torch.where(norms > 0, norms / mantissas, 1.0)


def summed_at_first(indices: Tensor, errors: Tensor) -> Tensor:
    """Sum errors (n, T, width) over the positions of each example with the same index (n, T), at the first of these."""
    examples, positions = indices.shape
    order = indices.argsort(dim=1, stable=True)
    ordered = indices.gather(1, order)
    places = torch.arange(positions, device=indices.device).expand(examples, -1)
    repeated = functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    runs = places.masked_fill(repeated, 0).cummax(dim=1).values
    first = torch.empty_like(order).scatter_(1, order, order.gather(1, runs))
    first += positions * torch.arange(examples, device=indices.device)[:, None]
    summed = errors.new_zeros(examples * positions, errors.shape[2])
    return summed.index_add_(0, first.view(-1), errors.reshape(summed.shape)).view(errors.shape)


def products(rows: Tensor, scratch: int, own_type: bool = False) -> Tensor:
    """Inner products (G, b, b) of rows (G, b, n) within groups, in float64, or in their own type."""
    if own_type:
        short = rows.device.type != "cpu" or rows.shape[1] < LEAST_ROWS or rows.shape[2] < 8 * RUN
        if short:
            return rows @ rows.mT
        made = [_products_of_runs(group) for group in rows]
        return made[0][None] if len(made) == 1 else torch.stack(made)
    groups, examples = rows.shape[:2]
    room = min(scratch, 2 * CACHE_BYTES) if rows.device.type == "cpu" else scratch
    # Other devices are faster at all products at once than at half of them in pieces.
    if 8 * rows.numel() <= room and (examples <= STRIP or rows.device.type != "cpu"):
        precise = in_double(rows)
        return precise @ precise.mT
    strips = list(slices(0, examples, STRIP))
    products = in_double(rows[..., :0]).new_zeros(groups, examples, examples)
    for chunk in rows.split(max(1, room // (8 * max(1, groups * examples))), dim=2):
        precise = in_double(chunk)
        for strip in strips:
            products[:, strip, strip.start :].baddbmm_(precise[:, strip], precise[:, strip.start :].mT)
    for strip in strips:
        products[:, strip.stop :, strip] = products[:, strip, strip.stop :].mT
    return products


def _products_of_runs(rows: Tensor) -> Tensor:
    """Inner products (b, b) of long rows (b, n) in their own type, some rows with all later ones, run by run."""
    examples, whole = len(rows), rows.shape[1] // RUN * RUN
    runs = rows[:, :whole].unflatten(1, (-1, RUN)).transpose(0, 1)
    made: list[Tensor] = []
    for band in slices(0, examples, math.ceil(examples / math.ceil(examples / MOST_ROWS))):
        some = torch.bmm(runs[:, band], runs[:, band.start :].mT).sum(dim=0)
        if whole < rows.shape[1]:
            some.addmm_(rows[band, whole:], rows[band.start :, whole:].mT)
        made.append(torch.cat([*(strip[:, band].mT for strip in made), some], dim=1) if made else some)
    return torch.cat(made)


def products_of_positions(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """Products of inner products of inputs and of errors, (n T, m T)."""
    (inputs, errors), (other_inputs, other_errors) = left, right
    return (inputs @ other_inputs.T).mul_(errors @ other_errors.T)


def products_of_lookups(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """Inner products of errors where the same row was looked up, else 0, (n T, m T)."""
    (indices, errors), (other_indices, other_errors) = left, right
    return (errors @ other_errors.T).masked_fill_(indices[:, None] != other_indices, 0)


def summed(products: Tensor, positions: int) -> Tensor:
    """Sum products of positions (n T, m T) over each pair of examples, (n, m)."""
    return products.unflatten(1, (-1, positions)).unflatten(0, (-1, positions)).sum(dim=(1, 3))


class Memory:
    """What the gradients of a batch may take beyond the inputs and the output gradients of its layers.

    Half is for what is written out to be kept, all layers together; half for what is computed on the way, each time.

    Attributes:
        scratch: bytes for what is computed on the way.
        models: in how many ways the batch is cut; what is decided by its size is decided by one model's.
        bounds: whether rows that are sums come with bounds of what they sum; else their norms are all that is known.
        most: bytes that are kept at most, where that is less than half.
    """

    def __init__(self, chunk_bytes: int, models: int = 1, most: int | None = None, *, bounds: bool = True) -> None:
        self.scratch = chunk_bytes // 2
        self.models = models
        self.bounds = bounds
        kept = chunk_bytes - self.scratch
        self._free = models * (kept if most is None else min(kept, most))

    def reserve(self, numbers: int, like: Tensor) -> bool:
        """Tell whether so many numbers fit into what is still free to be kept, and count them as kept if they do."""
        wanted = numbers * like.element_size()
        if wanted > self._free:
            return False
        self._free -= wanted
        return True

    def rows(self, rows: Tensor, sizes: "Callable[[], Sizes] | None" = None) -> "Written":
        """Return gradients that are written out, with bounds where they are wanted; ``None``: they are no sums."""
        if not self.bounds:
            return Written(rows)
        return Written(rows, Sizes(1.0, flattened(rows)) if sizes is None else sizes())


class Sizes:
    """A bound of the norms (B,) of what a gradient sums: a number times the norms of one or two tensors (B, ...).

    A sum over positions of products of two tensors' entries is at most the product of both norms (Cauchy, Schwarz). It
    is computed when it is asked for, and of a batch's layers at once.
    """

    def __init__(self, scale: float, *sides: Tensor) -> None:
        self._scale = scale
        self._sides = sides
        self._value: Tensor | None = None

    @classmethod
    def known(cls, value: Tensor) -> "Sizes":
        """Return a bound (B,) that has been computed."""
        made = cls(1.0)
        made._value = value
        return made

    def __call__(self) -> Tensor:
        """Return the bound, (B,); NaN or infinite if a number is."""
        if self._value is None:
            self.compute([self])
        if self._value is None:
            raise ValueError("a bound of nothing")
        return self._value

    @property
    def waits(self) -> int:
        """How many bytes are kept for it, until it is computed."""
        return sum([side.nbytes for side in self._sides])

    def part(self, start: int, stop: int) -> "Sizes":
        """Return the bound of some examples."""
        part = Sizes(self._scale, *(side[start:stop] for side in self._sides))
        part._value = None if self._value is None else self._value[start:stop]
        return part

    @staticmethod
    def compute(bounds: "Iterable[Sizes]") -> None:
        """Compute those of some bounds that have not been computed."""
        open_ = [bound for bound in bounds if bound._value is None]
        if not open_:
            return
        # An error belongs to a weight and a bias: its norms are computed once. Behind them come ones, for bounds of one
        # tensor.
        sides = {id(side): side for bound in open_ for side in bound._sides}
        norms = lengths_of(list(sides.values()))
        norms = torch.cat([norms, norms.new_ones(1, norms.shape[1])])
        places = {number: place for place, number in enumerate(sides)}
        pairs = [[*(places[id(side)] for side in bound._sides), len(sides)][:2] for bound in open_]
        left, right = torch.tensor(pairs, device=norms.device).unbind(1)
        scales = torch.tensor([bound._scale for bound in open_], dtype=norms.dtype, device=norms.device)
        values = (norms[left] * norms[right]).mul_(scales[:, None]).unbind()
        for bound, value in zip(open_, values, strict=True):
            bound._value, bound._sides = value, ()


class Inputs(Protocol):
    """What a weight matrix was applied to: a tensor (B, T, in), or something that makes the examples asked for."""

    @property
    def shape(self) -> torch.Size:
        """(B, T, in)."""

    def __getitem__(self, examples: slice, /) -> Tensor:
        """Return some examples, (n, T, in)."""


class Factor(ABC):
    """The gradients of B examples with respect to one parameter."""

    rounding: float = 0.0  # what it adds to a gradient of weight 1 at most, over its magnitude; 0: no sums are kept

    def __init__(self, examples: int, shape: torch.Size, scratch: int) -> None:
        self.examples = examples
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

    def products(self, vectors: Tensor) -> Tensor:
        """Return what :meth:`grams` does, not precise, and behind it as a last column what :meth:`dots` does."""
        grams = self.grams(len(vectors), precise=False)
        return torch.cat([grams, self.dots(vectors)[..., None].to(grams)], dim=2)

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
        """Return bounds of their norms and of those of what they sum, (B,); NaN or infinite if a number is."""

    def bounds(self) -> Sequence[Sizes]:
        """Return what the magnitudes follow from, to be computed for many factors at once."""
        return ()

    @abstractmethod
    def pair_products(self, precise: bool) -> int:
        """Return about how many multiplications the inner product of two of them takes; quick ones count for less."""

    def _cut(self, groups: int) -> Sequence["Factor"]:
        """Cut the batch into groups of the same size."""
        if groups == 1:
            return (self,)
        size = self.examples // groups
        return [self.part(start, start + size) for start in range(0, self.examples, size)]

    def _step(self, numbers_each: int, size: int) -> int:
        """How many things of ``numbers_each`` numbers of ``size`` bytes fit into the scratch, at least 1."""
        return max(1, self._scratch // (max(1, numbers_each) * size))

    def _by_pairs(self, positions: int, numbers: int, side: "Side", product: "Product") -> Tensor:
        """Inner products (B, B) from products of all positions with all positions, summed over pairs of examples."""
        half = self._scratch // 16  # for two sides, for two products, all of them in float64
        step = max(1, min(math.isqrt(half // 2) // positions, half // (2 * numbers)))
        parts = list(slices(0, self.examples, step))
        strips = []
        for number, first in enumerate(parts):
            left = side(first)
            rights = (left if second is first else side(second) for second in parts[number:])
            strips.append(torch.cat([summed(product(left, right), positions) for right in rights], dim=1))
        if len(strips) == 1:
            return strips[0]
        total = strips[0].new_empty(self.examples, self.examples)
        for chunk, strip in zip(parts, strips, strict=True):
            total[chunk, chunk.start :] = strip
            total[chunk.start :, chunk] = strip.T
        return total


Side = Callable[[slice], tuple[Tensor, Tensor]]
Product = Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], Tensor]


# Rows of a table that examples look up: an embedding.


class EmbeddingRows(Factor):
    """Gradients of an embedding (words, width): example i adds ``errors[i, t]`` to the row ``indices[i, t]``."""

    def __init__(self, indices: Tensor, errors: Tensor, shape: torch.Size, scratch: int, sizes: Sizes) -> None:
        # Only one of an example's positions that look up the same row has errors: no sum is left that may cancel.
        super().__init__(len(errors), shape, scratch)
        self._indices = indices
        self._errors = errors
        self._sizes = sizes
        self.positions = indices.shape[1]
        self._words, self._width = shape

    @classmethod
    def of(cls, indices: Tensor, errors: Tensor, shape: torch.Size, scratch: int) -> "EmbeddingRows":
        """Make it from the gradients of the loss with respect to all vectors that were looked up, (B, T, width)."""
        indices = indices.to(errors.device, torch.int64)
        # At most the norm of all of an example's errors times the root of their number.
        sizes = Sizes(math.sqrt(errors.shape[1]), errors)
        made = cls(indices, errors.new_empty(errors.shape), shape, scratch, sizes)
        for chunk in slices(0, len(errors), made._chunk):
            made._errors[chunk] = summed_at_first(indices[chunk], errors[chunk])
        return made

    def gram(self, precise: bool) -> Tensor:
        """Return the inner products: two positions count when they look up the same row."""
        if self._is_common:
            return products(self._errors.flatten(1)[None], self._scratch)[0]
        return self._by_pairs(self.positions, self.positions * (self._width + 1), self.side, products_of_lookups)

    def squared_norms(self) -> Tensor:
        return lengths(self._errors.flatten(1)).square()

    def absolute_sums(self) -> Tensor:
        return row_norms(self._errors.flatten(1), 1)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        return torch.cat([row_norms(weights[i].sqrt_().mul_(e).flatten(1)).square() for i, e in self._chunks()])

    def dot(self, vector: Tensor) -> Tensor:
        return torch.cat([vector[i].mul_(e).sum(dim=(1, 2)) for i, e in self._chunks()])

    def combine(self, weights: Tensor) -> Tensor:
        total = self._errors.new_zeros(self._shape)
        for (i, e), weight in zip(self._chunks(), weights.split(self._chunk), strict=True):
            total.index_add_(0, i.reshape(-1), (e * weight[:, None, None]).reshape(-1, self._width))
        return total

    def rows(self, start: int, stop: int) -> Tensor:
        return self.add_to_rows(self._errors.new_zeros(stop - start, *self._shape), start)

    def add_to_rows(self, written: Tensor, start: int = 0) -> Tensor:
        """Add gradients ``start`` and following to what is written out (n, words, width), in place, and return it."""
        for chunk in slices(0, len(written), self._chunk):
            first = self._words * torch.arange(chunk.start, chunk.stop, device=written.device)
            places = self._indices[start + chunk.start : start + chunk.stop] + first[:, None]
            errors = self._errors[start + chunk.start : start + chunk.stop]
            written.view(-1, self._width).index_add_(0, places.reshape(-1), errors.reshape(-1, self._width))
        return written

    def part(self, start: int, stop: int) -> "EmbeddingRows":
        indices, errors, sizes = self._indices[start:stop], self._errors[start:stop], self._sizes.part(start, stop)
        return EmbeddingRows(indices, errors, self._shape, self._scratch, sizes)

    def masked(self, keep: Tensor) -> "EmbeddingRows":
        errors, sizes = zeroed(self._errors, keep), Sizes.known(zeroed(self.magnitudes(), keep))
        return EmbeddingRows(self._indices, errors, self._shape, self._scratch, sizes)

    def bounds(self) -> Sequence[Sizes]:
        return (self._sizes,)

    def magnitudes(self) -> Tensor:
        return self._sizes()

    def pair_products(self, precise: bool) -> int:
        return self._width * self.positions ** (1 if self._is_common else 2)

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
        return self._step(4 * self.positions * self._width, self._errors.element_size())

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Indices and errors of some examples at a time."""
        return zip(self._indices.split(self._chunk), self._errors.split(self._chunk), strict=True)


# A sum of outer products an example: a Linear layer at many positions, a convolution.


# Sums of outer products over more positions than this are computed in float64: rounding would cost too many digits.
LONG = 64


class _Some:
    """Inputs of some of a batch's examples, made only when they are asked for; zeros but for those to keep, (B,)."""

    def __init__(self, inputs: Inputs, start: int, stop: int, keep: Tensor | None = None) -> None:
        self._inputs, self._start, self._keep = inputs, start, keep
        self.shape = torch.Size((stop - start, *inputs.shape[1:]))

    def __getitem__(self, examples: slice) -> Tensor:
        """Return some of them, (n, T, in)."""
        some = self._inputs[self._start + examples.start : self._start + examples.stop]
        return some if self._keep is None else zeroed(some, self._keep[examples])


class Outer(Factor):
    """Sums of outer products: the gradient of example i is the sum over positions t of ``errors[i, t] inputs[i, t]^T``.

    This is the gradient of a weight matrix that is applied to inputs (B, T, in), with errors (B, T, out), never
    multiplied out for a whole batch; sizes bound the sums over t of |errors[i, t]| |inputs[i, t]|.
    """

    def __init__(self, inputs: Inputs, errors: Tensor, shape: torch.Size, scratch: int, sizes: Sizes) -> None:
        super().__init__(len(errors), shape, scratch)
        self._inputs = inputs
        self._errors = errors
        self._sizes = sizes
        self._positions, self._wide = inputs.shape[1:]
        self._tall = errors.shape[2]
        self._size = errors.element_size()
        self.dtype = errors.dtype
        self._long = self._positions > LONG
        # Of the sums over the positions, and of the norms that come from products of positions.
        self.rounding = of_sums(self._positions, torch.float64 if self._long else errors.dtype)
        # From 2 in * out on, norms and inner products come from gradients multiplied out, whatever the batch.
        if self._positions * (self._wide + self._tall) < 2 * self._wide * self._tall:
            self.rounding += of_products(self._positions**2 + self._wide + self._tall)

    @property
    def place(self) -> object:
        """What is the same of two that were applied to the same inputs."""
        inputs = self._inputs
        return (inputs.data_ptr(), inputs.shape, inputs.stride()) if isinstance(inputs, Tensor) else id(self)

    @classmethod
    def stacked(cls, parts: "Sequence[Outer]") -> "Outer":
        """Return those of several matrices that were applied to the same inputs as one, below one another, flat."""
        inputs, errors = parts[0]._inputs, torch.cat([part._errors for part in parts], dim=2)
        shape = torch.Size((errors.shape[2] * inputs.shape[2],))
        return cls(inputs, errors, shape, parts[0]._scratch, Sizes(1.0, errors, inputs[0 : len(errors)]))

    def apart(self, shapes: Sequence[torch.Size]) -> "list[Outer]":
        """Return what was stacked of matrices of these shapes."""
        inputs, parts = self._inputs[0 : self.examples], self._errors.split([shape[0] for shape in shapes], dim=2)
        pairs = zip(parts, shapes, strict=True)
        return [Outer(inputs, own, shape, self._scratch, Sizes(1.0, own, inputs)) for own, shape in pairs]

    def gram(self, precise: bool) -> Tensor:
        """Return the inner products: of products of all positions, or from gradients multiplied out piece by piece."""
        if rows_are_cheaper(self.examples, self._positions, self._wide, self._tall):
            own_type = not precise and self._is_quick
            return total(
                products(rows[None], self._scratch, own_type)[0] for rows in self._pieces(precise=not own_type)
            )
        return self._of_pairs

    def products(self, vectors: Tensor) -> Tensor:
        """Return both; a vector is one more gradient where these are multiplied out."""
        if self._is_quick and rows_are_cheaper(self.examples // len(vectors), self._positions, self._wide, self._tall):
            ends = range(0, self.examples + 1, self.examples // len(vectors))
            parts = [self.part(*pair) for pair in pairwise(ends)] if len(vectors) > 1 else [self]
            return torch.stack([own._products_with(vector) for own, vector in zip(parts, vectors, strict=True)])
        return super().products(vectors)

    def squared_norms(self) -> Tensor:
        if self._positions * (self._wide + self._tall) >= self._wide * self._tall:
            return total(row_norms(rows).square() for rows in self._pieces(self._long)).to(self._errors)
        chunks = self._chunks(4 * self._positions**2 + 3 * self._numbers)
        pairs = ((in_double(a), in_double(e)) for a, e in chunks)
        return torch.cat([(a @ a.mT).mul_(e @ e.mT).sum(dim=(1, 2)) for a, e in pairs]).clamp_(min=0).to(self._errors)

    def absolute_sums(self) -> Tensor:
        return total(row_norms(rows, 1) for rows in self._pieces(self._long)).to(self._errors)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        matrix = weights.reshape(self._tall, self._wide)
        size = 8 if self._long else self._size
        pieces = zip(self._pieces(self._long), matrix.split(self._piece(size)), strict=True)
        sums = total(row_norms(rows.mul_(part.reshape(-1).sqrt().to(rows))).square() for rows, part in pieces)
        return sums.to(self._errors)

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner products with a matrix; the smaller side is what is written out."""
        matrix = vector.reshape(self._tall, self._wide)
        chunks = self._chunks(self._numbers)
        # Rows that have gaps are copied: torch takes ten times as long for their products.
        if self._tall <= self._wide:
            pairs = (((a.reshape(-1, self._wide) @ matrix.T).view_as(e), e) for a, e in chunks)
        else:
            pairs = (((e.reshape(-1, self._tall) @ matrix).view(a.shape), a) for a, e in chunks)
        return torch.cat([made.mul_(side).sum(dim=(1, 2)) for made, side in pairs])

    def combine(self, weights: Tensor) -> Tensor:
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
        written = self.written(slice(start, stop), slice(0, self._tall), precise=False)
        return written.view(stop - start, *self._shape)

    def part(self, start: int, stop: int) -> "Outer":
        inputs, sizes = _Some(self._inputs, start, stop), self._sizes.part(start, stop)
        return Outer(inputs, self._errors[start:stop], self._shape, self._scratch, sizes)

    def masked(self, keep: Tensor) -> "Outer":
        """Return the outer products, both sides of the others zero; inputs that are made on demand stay so."""
        given = self._inputs
        inputs = zeroed(given, keep) if isinstance(given, Tensor) else _Some(given, 0, len(keep), keep)
        errors, sizes = zeroed(self._errors, keep), Sizes.known(zeroed(self.magnitudes(), keep))
        return Outer(inputs, errors, self._shape, self._scratch, sizes)

    def bounds(self) -> Sequence[Sizes]:
        return (self._sizes,)

    def magnitudes(self) -> Tensor:
        return self._sizes()

    def pair_products(self, precise: bool) -> int:
        if rows_are_cheaper(self.examples, self._positions, self._wide, self._tall):
            numbers = self._wide * self._tall
            return numbers if precise or not self._is_quick else numbers // QUICK
        return self._positions**2 * (self._wide + self._tall)

    def side(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return all inputs (n T, in) and errors (n T, out) of some examples, in float64."""
        inputs, errors = self._inputs[chunk].reshape(-1, self._wide), self._errors[chunk].reshape(-1, self._tall)
        return in_double(inputs), in_double(errors)

    def written(self, examples: slice, tall: slice, precise: bool, more: Sequence[Tensor] = ()) -> Tensor:
        """Return some rows of some examples' gradients, (n, rows, in), a new tensor, in float64 if ``precise``.

        More matrices (out, in) come behind them.
        """
        like, count = in_double(self._errors[:0]) if precise else self._errors, examples.stop - examples.start
        written = like.new_empty(count + len(more), tall.stop - tall.start, self._wide)
        for place, matrix in enumerate(more, count):
            written[place] = matrix[tall]
        for chunk in slices(examples.start, examples.stop, self._step(2 * self._numbers, like.element_size())):
            inputs, errors = self._inputs[chunk], self._errors[chunk, :, tall]
            inputs, errors = (in_double(inputs), in_double(errors)) if precise else (inputs, errors)
            torch.bmm(errors.mT, inputs, out=written[chunk.start - examples.start : chunk.stop - examples.start])
        return written

    @cached_property
    def _of_pairs(self) -> Tensor:
        # Positions may nearly cancel. In float32 the sum of their products would then be noise, even 0, and an example
        # with such a length would be neither clipped nor scaled; the products are exact to float32's inputs in float64.
        return self._by_pairs(self._positions, self._numbers, self.side, products_of_positions)

    def _products_with(self, vector: Tensor) -> Tensor:
        pieces = self._pieces(False, vector.reshape(self._tall, self._wide))
        return total(products(rows[None], self._scratch, True)[0, :-1] for rows in pieces)

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
        for chunk in slices(0, self.examples, self._step(numbers_each, self._size)):
            yield self._inputs[chunk], self._errors[chunk]

    def _piece(self, size: int) -> int:
        """How many rows of the matrix are multiplied out at once: half of the scratch memory is for the result."""
        return self._step(2 * self.examples * self._wide, size)

    def _pieces(self, precise: bool, *more: Tensor) -> Iterator[Tensor]:
        """The gradients, and more matrices, some rows of these at a time: (B, rows * in) each, new tensors."""
        for rows in slices(0, self._tall, self._piece(8 if precise else self._size)):
            yield self.written(slice(0, self.examples), rows, precise, more).flatten(1)

    def _add_precisely(self, total: Tensor, scale: float, weights: Tensor) -> None:
        """Add the weighted sum to a matrix (out, in), summed in float64 some rows of the matrix at a time."""
        precise = in_double(weights)
        step = self._step(4 * self._numbers, precise.element_size())
        for tall in slices(0, self._tall, self._step(4 * self._wide, precise.element_size())):
            added = precise.new_zeros(tall.stop - tall.start, self._wide)
            for chunk in slices(0, self.examples, step):
                errors = (in_double(self._errors[chunk, :, tall]) * precise[chunk, None, None]).flatten(0, 1)
                added.addmm_(errors.T, in_double(self._inputs[chunk]).reshape(-1, self._wide))
            rows = total[tall]
            rows.copy_(added if scale == 0 else added.add_(in_double(rows), alpha=scale))


# Gradients written out, one row an example.


class Written(NamedTuple):
    """Gradients of one parameter that are written out, to be laid beside those of others."""

    rows: Tensor  # (B, *shape)
    sizes: Sizes | None = None  # of what was summed to make them; None: their norms are enough

    def bounds(self) -> Sequence[Sizes]:
        """Return the bound of what is summed."""
        return () if self.sizes is None else (self.sizes,)

    def factor(self, scratch: int) -> "Rows":
        """Return them as a factor of their own."""
        return Rows(self.rows, scratch, self.bounds())


class Rows(Factor):
    """Gradients written out: ``rows`` of shape (B, *shape); their numbers are used in the order in which they lie.

    Sizes bound what was summed to make them, one for each parameter; none: they are no sums, or their norms are enough.
    """

    def __init__(self, rows: Tensor, scratch: int, sizes: Sequence[Sizes] = (), *, side: bool = False) -> None:
        shape = rows.shape
        super().__init__(shape[0], shape[1:], scratch)
        self._order: Sequence[int] = range(len(shape) - 1)
        self._is_usual = rows.is_contiguous()
        if not self._is_usual:
            strides = rows.stride()
            self._order = sorted(self._order, key=lambda axis: -strides[axis + 1])
            self._is_usual = self._order == sorted(self._order)
            rows = rows.permute(0, *(axis + 1 for axis in self._order))
        # A new tensor from here on only where the rows have gaps.
        numbers = self._shape.numel()
        self._rows = rows if len(shape) == 2 else rows.reshape(self.examples, numbers)
        self._sizes = sizes
        self._side = side
        self._grams: dict[tuple[int, bool], Tensor] = {}
        self._norms: Tensor | None = None

    def gram(self, precise: bool) -> Tensor:
        return self.grams(1, precise)[0]

    def grams(self, groups: int, precise: bool) -> Tensor:
        """Return the inner products within groups, B^2 n / G operations for n coordinates the first time."""
        if (groups, precise) not in self._grams:
            rows = grouped(self._rows, groups)
            made = products(rows, self._scratch, own_type=not precise)
            if self._side and not precise and not within(made.diagonal(dim1=1, dim2=2), lost(rows.dtype), math.inf):
                made = products(rows, self._scratch)
            self._grams[groups, precise] = made
        return self._grams[groups, precise]

    def norms(self) -> Tensor:
        """Return the norms, (B,); computed once, not to be changed."""
        if self._norms is None:
            self._norms = lengths(self._rows)
        return self._norms

    def squared_norms(self) -> Tensor:
        return self.norms().square()

    def absolute_sums(self) -> Tensor:
        return row_norms(self._rows, 1)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        step = self._step(self.examples, self._rows.element_size())
        parts = zip(self._rows.split(step, dim=1), self._laid_out(weights).split(step), strict=True)
        return total(row_norms(columns * chosen.sqrt()).square() for columns, chosen in parts)

    def dot(self, vector: Tensor) -> Tensor:
        return self.dots(vector[None])[0]

    def dots(self, vectors: Tensor) -> Tensor:
        order = (0, *(axis + 1 for axis in self._order))
        laid_out = vectors.permute(order).reshape(len(vectors), 1, self._shape.numel())
        # Vectors from the left: from the right a batched product takes ten times as long.
        return torch.bmm(laid_out, grouped(self._rows, len(vectors)).mT)[:, 0]

    def combine(self, weights: Tensor) -> Tensor:
        return self._shaped(torch.mv(self._rows.T, weights)[None])[0].contiguous()

    def add_to(self, total: Tensor, scale: float, weights: Tensor) -> None:
        if self._is_usual and total.is_contiguous():
            total.view(-1).addmv_(self._rows.T, weights, beta=scale)
        else:
            super().add_to(total, scale, weights)

    def combine_each(self, weights: Tensor) -> Tensor:
        return self._shaped(torch.bmm(weights[:, None], grouped(self._rows, len(weights)))[:, 0]).contiguous()

    def rows(self, start: int, stop: int) -> Tensor:
        return self._shaped(self._rows if stop - start == self.examples else self._rows[start:stop])

    def apart(self, shapes: Sequence[torch.Size]) -> list[Written]:
        """Return what lies end to end as several parameters of these shapes."""
        columns = self._rows.split([shape.numel() for shape in shapes], dim=1)
        parts = zip(columns, shapes, self._sizes or repeat(None), strict=False)
        return [Written(own.view(len(own), *shape), sizes) for own, shape, sizes in parts]

    def part(self, start: int, stop: int) -> "Rows":
        part = copy(self)
        part.examples, part._rows, part._grams = stop - start, self._rows[start:stop], {}
        part._sizes = [sizes.part(start, stop) for sizes in self._sizes]
        part._norms = None if self._norms is None else self._norms[start:stop]
        return part

    def masked(self, keep: Tensor) -> "Rows":
        sizes = [Sizes.known(zeroed(own(), keep)) for own in self._sizes]
        return Rows(self._shaped(zeroed(self._rows, keep)), self._scratch, sizes, side=self._side)

    def bounds(self) -> Sequence[Sizes]:
        return self._sizes

    def magnitudes(self) -> Tensor:
        each = [sizes() for sizes in self._sizes]
        return lengths(torch.stack(each, dim=1)) if len(each) > 1 else each[0] if each else self.norms()

    def pair_products(self, precise: bool) -> int:
        return self._rows.shape[1] if precise else self._rows.shape[1] // QUICK

    def _laid_out(self, vector: Tensor) -> Tensor:
        """A tensor of the parameter's shape as a row."""
        return vector.permute(tuple(self._order)).reshape(-1)

    def _shaped(self, rows: Tensor) -> Tensor:
        """Rows as tensors of the parameter's shape."""
        if self._is_usual:
            return rows if len(self._shape) == 1 else rows.view(rows.shape[0], *self._shape)
        lying = rows.view(len(rows), *(self._shape[axis] for axis in self._order))
        return lying.permute(0, *(self._order.index(axis) + 1 for axis in range(len(self._shape))))


# One outer product an example: a Linear layer without further positions.


class Dyads(Factor):
    """Outer products: the gradient of example i is ``errors[i] inputs[i]^T``.

    This is the gradient of a weight matrix that is applied once an example, to inputs (B, in), never multiplied out for
    a whole batch; the errors (B, out) are the bias's gradients, too.
    """

    def __init__(self, inputs: Tensor, errors: Rows, scratch: int) -> None:
        values = errors.rows(0, len(inputs))
        super().__init__(len(inputs), torch.Size((values.shape[1], inputs.shape[1])), scratch)
        self._inputs, self._errors = inputs, values
        self._sides = Rows(inputs, scratch, side=True), errors

    def gram(self, precise: bool) -> Tensor:
        return self.grams(1, precise)[0]

    def grams(self, groups: int, precise: bool) -> Tensor:
        left, right = self._sides
        return left.grams(groups, precise) * right.grams(groups, precise)

    def squared_norms(self) -> Tensor:
        left, right = self._sides
        return (left.norms() * right.norms()).square()

    def absolute_sums(self) -> Tensor:
        return row_norms(self._inputs, 1) * row_norms(self._errors, 1)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        """Return the weighted sums of squares: a product of sides divided by powers of 2, which rounds nothing."""
        left, right = (powers_of_two(side.norms()) for side in self._sides)
        step = self._step(4 * sum(self._shape), self._errors.element_size())
        sums = []
        for chunk in slices(0, self.examples, step):
            a, e = self._inputs[chunk] / left[chunk, None], self._errors[chunk] / right[chunk, None]
            sums.append((e.square_() @ weights).mul_(a.square_()).sum(dim=1))
        return torch.cat(sums) * (left * right).square()

    def dot(self, vector: Tensor) -> Tensor:
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
        total = self._errors.new_empty(self._shape)
        self.add_to(total, 0.0, weights)
        return total

    def add_to(self, total: Tensor, scale: float, weights: Tensor) -> None:
        weighted = self._errors * weights[:, None]
        total.addmm_(weighted.T, self._inputs, beta=scale)

    def combine_each(self, weights: Tensor) -> Tensor:
        weighted = grouped(self._errors, len(weights)) * weights[..., None]
        return torch.bmm(weighted.mT, grouped(self._inputs, len(weights)))

    def add_to_each(self, totals: Tensor, scale: float, weights: Tensor) -> None:
        weighted = grouped(self._errors, len(weights)) * weights[..., None]
        totals.baddbmm_(weighted.mT, grouped(self._inputs, len(weights)), beta=scale)

    def rows(self, start: int, stop: int) -> Tensor:
        return self._errors[start:stop, :, None] * self._inputs[start:stop, None, :]

    def part(self, start: int, stop: int) -> Factor:
        return Dyads(self._inputs[start:stop], self._sides[1].part(start, stop), self._scratch)

    def masked(self, keep: Tensor) -> Factor:
        return Dyads(zeroed(self._inputs, keep), self._sides[1].masked(keep), self._scratch)

    def magnitudes(self) -> Tensor:
        left, right = self._sides
        return without_extremes(left.norms()) * without_extremes(right.norms())

    def pair_products(self, precise: bool) -> int:
        return sum(self._shape)


# Several factors of one parameter that a model uses more than once.


class Stacked(Factor):
    """A parameter whose first axis is cut into parts of one size, each with a factor of its own: groups of channels."""

    def __init__(self, parts: Sequence[Outer], examples: int, shape: torch.Size, scratch: int) -> None:
        super().__init__(examples, shape, scratch)
        self._parts = tuple(parts)
        self.rounding = max(part.rounding for part in parts)

    def gram(self, precise: bool) -> Tensor:
        return total(part.gram(precise) for part in self._parts)

    def squared_norms(self) -> Tensor:
        return total(part.squared_norms() for part in self._parts)

    def absolute_sums(self) -> Tensor:
        return total(part.absolute_sums() for part in self._parts)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        return total(part.weighted_squares(share) for part, share in self._with(weights))

    def dot(self, vector: Tensor) -> Tensor:
        return total(part.dot(share) for part, share in self._with(vector))

    def combine(self, weights: Tensor) -> Tensor:
        return torch.cat([part.combine(weights) for part in self._parts])

    def add_to(self, total: Tensor, scale: float, weights: Tensor) -> None:
        for part, share in self._with(total):
            part.add_to(share, scale, weights)

    def rows(self, start: int, stop: int) -> Tensor:
        return torch.cat([part.rows(start, stop) for part in self._parts], dim=1)

    def part(self, start: int, stop: int) -> Factor:
        parts = [part.part(start, stop) for part in self._parts]
        return Stacked(parts, stop - start, self._shape, self._scratch)

    def masked(self, keep: Tensor) -> Factor:
        return Stacked([part.masked(keep) for part in self._parts], self.examples, self._shape, self._scratch)

    def bounds(self) -> Sequence[Sizes]:
        return [bound for part in self._parts for bound in part.bounds()]

    def magnitudes(self) -> Tensor:
        return lengths(torch.stack([part.magnitudes() for part in self._parts], dim=1))

    def pair_products(self, precise: bool) -> int:
        return sum(part.pair_products(precise) for part in self._parts)

    def _with(self, vector: Tensor) -> Iterator[tuple[Factor, Tensor]]:
        """The parts with their share of a tensor of the parameter's shape."""
        return zip(self._parts, vector.view(self._shape).chunk(len(self._parts)), strict=True)


# A table that is looked up and multiplied with: input and output embeddings of a language model that are one.


class Tied(Factor):
    """Sums of what an embedding and what a Linear layer give the same weight (Press and Wolf 2017).

    With looked-up rows v_t and their errors d_t, inputs a_s and errors e_s, an example's squared norm is that of both
    gradients plus twice the sum over t and s of (a_s . d_t) e_s[v_t]; so are inner products. All in float64, since the
    two may cancel.
    """

    def __init__(
        self, looked_up: EmbeddingRows, multiplied: Outer, sizes: tuple[int, int, int, int], examples: int, scratch: int
    ) -> None:
        self._words, self._width, self._positions, self._lookups = self._sizes = sizes
        super().__init__(examples, torch.Size(sizes[:2]), scratch)
        self._looked_up = looked_up
        self._multiplied = multiplied
        # As of outer products alone.
        terms = self._positions + self._lookups
        self.rounding = of_sums(terms, multiplied.dtype)
        if self._positions * (self._width + self._words) < 2 * self._width * self._words:
            self.rounding += of_products(terms**2 + self._width + self._words)

    def gram(self, precise: bool) -> Tensor:
        """Return the inner products: of both gradients with both, or from gradients multiplied out piece by piece."""
        if rows_are_cheaper(self.examples, self._positions, self._width, self._words):
            return total(products(rows[None], self._scratch)[0] for rows in self._pieces())
        strips = []
        for chunk in self._chunks():
            left = self._looked_up.side(chunk)
            crossed = [self._crossed(left, self._multiplied.side(other)) for other in self._chunks()]
            strips.append(torch.cat(crossed, dim=1))
        across = torch.cat(strips)
        return self._looked_up.gram(True) + self._multiplied.gram(True) + across + across.T

    def squared_norms(self) -> Tensor:
        if self._positions * (self._width + self._words) >= self._width * self._words:
            return total(row_norms(rows).square() for rows in self._pieces()).to(self._like)
        one_by_one = [slice(example, example + 1) for example in range(self.examples)]
        return torch.cat([self._own(chunk) for chunk in one_by_one]).clamp_(min=0).to(self._like)

    def absolute_sums(self) -> Tensor:
        return total(row_norms(rows, 1) for rows in self._pieces()).to(self._like)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        parts = zip(self._pieces(), weights.split(self._piece), strict=True)
        sums = total(row_norms(rows.mul_(part.reshape(-1).sqrt().to(rows))).square() for rows, part in parts)
        return sums.to(self._like)

    def dot(self, vector: Tensor) -> Tensor:
        return self._looked_up.dot(vector) + self._multiplied.dot(vector)

    def combine(self, weights: Tensor) -> Tensor:
        return self._multiplied.combine(weights).add_(self._looked_up.combine(weights))

    def rows(self, start: int, stop: int) -> Tensor:
        return self._looked_up.rows(start, stop).add_(self._multiplied.rows(start, stop))

    def part(self, start: int, stop: int) -> Factor:
        looked_up, multiplied = self._looked_up.part(start, stop), self._multiplied.part(start, stop)
        return Tied(looked_up, multiplied, self._sizes, stop - start, self._scratch)

    def masked(self, keep: Tensor) -> Factor:
        looked_up, multiplied = self._looked_up.masked(keep), self._multiplied.masked(keep)
        return Tied(looked_up, multiplied, self._sizes, self.examples, self._scratch)

    def bounds(self) -> Sequence[Sizes]:
        return (*self._looked_up.bounds(), *self._multiplied.bounds())

    def magnitudes(self) -> Tensor:
        return self._looked_up.magnitudes() + self._multiplied.magnitudes()

    def pair_products(self, precise: bool) -> int:
        across = self._positions * self._lookups * self._width
        return self._looked_up.pair_products(True) + self._multiplied.pair_products(True) + 2 * across

    @property
    def _like(self) -> Tensor:
        """Nothing, of the gradients' type and device."""
        return self._multiplied.magnitudes()[:0]

    @property
    def _piece(self) -> int:
        """How many rows of the table are multiplied out at once for all examples, in float64."""
        return self._step(2 * self.examples * self._width, 8)

    def _pieces(self) -> Iterator[Tensor]:
        """The gradients multiplied out, some rows of the table at a time: (B, rows * width) each, in float64."""
        for words in slices(0, self._words, self._piece):
            rows = self._multiplied.written(slice(0, self.examples), words, precise=True)
            yield self._looked_up.add_rows(rows, words).flatten(1)

    def _chunks(self) -> Iterator[slice]:
        """Examples of which two lots fit, in float64, with the products of their positions."""
        each = 2 * self._positions * (self._words + self._width) + self._lookups * self._width
        most = max(1, int((self._scratch / (32 * self._positions * self._lookups)) ** 0.5))
        return slices(0, self.examples, min(most, self._step(2 * each, 8)))

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


# A parameter that no example uses.


class Zero(Factor):
    """No gradient at all: the parameter was not used."""

    def __init__(self, parameter: Tensor, examples: int) -> None:
        super().__init__(examples, parameter.shape, 0)
        self._parameter = parameter

    def gram(self, precise: bool) -> Tensor:
        return in_double(self._parameter.new_zeros(self.examples, self.examples))

    def squared_norms(self) -> Tensor:
        return self._parameter.new_zeros(self.examples)

    absolute_sums = magnitudes = squared_norms

    def weighted_squares(self, weights: Tensor) -> Tensor:
        return self.squared_norms()

    def dot(self, vector: Tensor) -> Tensor:
        return self.squared_norms()

    def combine(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(self._parameter)

    def rows(self, start: int, stop: int) -> Tensor:
        return self._parameter.new_zeros(stop - start, *self._shape)

    def part(self, start: int, stop: int) -> Factor:
        return Zero(self._parameter, stop - start)

    def masked(self, keep: Tensor) -> Factor:
        return self

    def pair_products(self, precise: bool) -> int:
        return 0
