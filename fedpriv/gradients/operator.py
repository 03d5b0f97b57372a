"""The abstract operator: the interface of a batch's per-example gradients for mechanisms.

A batch of B examples has the per-example gradients g_1..g_B, the columns of a matrix M with one row a parameter. The
matrix itself is not asked for: a few products with it are enough for nearly every mechanism, and they can be computed
without it. Only noise on blocks of coordinates that cut through a layer needs gradients written out, some at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor

from fedpriv.core.randomness import NoiseStream
from fedpriv.gradients.normal import standard_normal

Vector = dict[str, Tensor]
"""A vector in parameter space: the parameter's name -> a tensor of its shape, in the model's order."""

Block = tuple[str, ...]
"""A part of the parameters, by name, that gets its own noise."""

DEFAULT_CHUNK_BYTES = 1 << 28
"""What per-example gradients may take, in bytes, beyond their result: 256 MiB."""


class GradientOperator(ABC):
    """The matrix M of per-example gradients, as a linear operator.

    Every call takes a ``block``: the names of the parameters it is about; ``None`` means all of them.

    Attributes:
        examples: B, the number of examples; 0 for an empty batch.
        shapes: the shape of each parameter, in the model's order.
        dtype: of the parameters and of everything that is returned but the inner products: float32 or float64.
        device: where the parameters are, and everything that is returned.
        routes: layer's name -> how its gradients are computed and, where that is slow, why; for people. ``print``
            shows them one a line. The name is empty for the model as a whole.
        chunk_bytes: what a call may take beyond what it returns; whoever asks for rows asks for no more at once.
    """

    def __init__(
        self,
        examples: int,
        shapes: dict[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        routes: Mapping[str, str],
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        if not shapes:
            raise ValueError("a gradient needs at least one parameter")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"gradients are of type {dtype}; allowed: torch.float32, torch.float64")
        self.examples = examples
        self.shapes = shapes
        self._names = tuple(shapes)
        self._numbers = {name: shape.numel() for name, shape in shapes.items()}
        self.dtype = dtype
        self.device = device
        self.routes = dict(routes)
        self.chunk_bytes = chunk_bytes

    def __str__(self) -> str:
        lines = [f"gradients of {self.examples} examples, {self.dimension()} parameters each"]
        lines += [f"  {name or 'the model'}: {route}" for name, route in self.routes.items()]
        return "\n".join(lines)

    @abstractmethod
    def grams(self, groups: int, block: Block | None = None, *, precise: bool = True) -> Tensor:
        """Return the inner products of the gradients within groups, (G, B / G, B / G), in float64; not to be changed.

        They are on any device.

        Args:
            groups: G, how many groups of the same number of consecutive examples there are; it divides B.
            block: the coordinates.
            precise: computed in float64. If not, some may come from the gradients' own type, where that is faster.
        """

    def gram(self, block: Block | None = None) -> Tensor:
        """Return M^T M, the inner products of the gradients, (B, B), in float64, on any device; not to be changed."""
        return self.grams(1, block)[0]

    @abstractmethod
    def norms(self, block: Block | None = None) -> Tensor:
        """Return the Euclidean norms of the gradients, of shape (B,)."""

    @abstractmethod
    def absolute_sums(self, block: Block | None = None) -> Tensor:
        """Return the L1 norms of the gradients, of shape (B,)."""

    @abstractmethod
    def weighted_norms(self, weights: Vector, block: Block | None = None) -> Tensor:
        """Return sqrt(sum over k of w_k g_ik^2), of shape (B,), for weights w >= 0, one a coordinate."""

    @abstractmethod
    def rows(self, start: int, stop: int, block: Block | None = None) -> Vector:
        """Return gradients ``start`` to ``stop`` - 1 written out, (stop - start, *shape); not to be changed.

        For 0 <= start <= stop <= B. The caller keeps stop - start small enough for the memory that there is.
        """

    @abstractmethod
    def dots(self, vectors: Vector, block: Block | None = None) -> Tensor:
        """Return the inner products of the gradients of G groups with one vector each, (G, B / G).

        Args:
            vectors: (G, *shape) each, G a divisor of B; it may have more names than the block.
            block: the coordinates.
        """

    def dot(self, vector: Vector, block: Block | None = None) -> Tensor:
        """Return M^T v, of shape (B,), the inner products with ``vector``, which may have more names than the block."""
        return self.dots({name: vector[name][None] for name in self.names(block)}, block)[0]

    @abstractmethod
    def combine(self, weights: Tensor, block: Block | None = None) -> Vector:
        """Return M w, the sum of the gradients with ``weights`` (B,), in new tensors; only the block's names."""

    @abstractmethod
    def add_combination(self, vector: Vector, scale: float, weights: Tensor, block: Block | None = None) -> None:
        """Replace ``vector`` by ``scale`` times itself plus M w, in place; it may have more names than the block."""

    @abstractmethod
    def part(self, start: int, stop: int) -> "GradientOperator":
        """Return the gradients ``start`` to ``stop`` - 1 as an operator of its own; nothing is copied.

        For 0 <= start < stop <= B.
        """

    @abstractmethod
    def magnitudes(self, block: Block | None = None) -> Tensor:
        """Return bounds of the Euclidean norms of the gradients and of what is summed to make them, (B,).

        Of a gradient that is a sum over positions t of products e_t a_t^T it bounds the sum of |e_t| |a_t|. A bound is
        NaN or infinite if a number is that goes into the gradient, also one that is multiplied by 0.
        """

    @abstractmethod
    def roundings(self, block: Block | None = None) -> Tensor:
        """Return bounds, (B,), of the norm of what rounding adds to a gradient that is combined with a weight of 1.

        Beside a few roundings of each of its numbers. It is 0 but for gradients that are kept as sums, whose terms may
        cancel. Norms above a thousand times this are right to a thousandth (``ACCURACY`` in ``numerics``).
        """

    @abstractmethod
    def masked(self, keep: Tensor) -> "GradientOperator":
        """Return the gradients with zeros in place of all but those to keep, (B,) on their device.

        The zeros come before any product, so that nothing is left of the others, whatever they are.
        """

    @abstractmethod
    def pair_products(self, block: Block | None = None, *, precise: bool = True) -> int:
        """Return about how many multiplications in float64 take as long as :meth:`grams` does for each pair."""

    def draw(self, noise: NoiseStream, block: Block | None = None) -> Vector:
        """Return the vector of :meth:`numbers`."""
        return self.vector(self.numbers(noise, block), block)

    def numbers(self, noise: NoiseStream, block: Block | None = None) -> Tensor:
        """Return a standard normal vector, drawn at once for the block's names laid end to end, (K,).

        The numbers depend on the stream's state, not on where the gradients are but for rounding.
        """
        return standard_normal(self.dimension(block), noise, self.dtype, self.device)

    def dots_laid(self, numbers: Tensor, block: Block | None = None) -> Tensor:
        """Return what :meth:`dots` does, of vectors laid end to end, (G, K)."""
        return self.dots(self.vector(numbers, block), block)

    def products(self, numbers: Tensor, block: Block | None = None) -> tuple[Tensor, Tensor]:
        """Return what :meth:`grams`, not precise, and :meth:`dots_laid` do; both together cost less."""
        return self.grams(len(numbers), block, precise=False), self.dots_laid(numbers, block)

    def add_laid(self, numbers: Tensor, scale: float, weights: Tensor, block: Block | None = None) -> None:
        """Do what :meth:`add_combination` does, to a vector laid end to end on the gradients' device, (K,)."""
        self.add_combination(self.vector(numbers, block), scale, weights, block)

    def vector(self, numbers: Tensor, block: Block | None = None) -> Vector:
        """Return numbers (..., K), the parameters of a block laid end to end, as tensors (..., *shape) of the same.

        They are on the parameters' device, and the same memory if they were there before.
        """
        names, first = self.names(block), numbers.shape[:-1]
        parts = numbers.to(self.device).split([self._numbers[name] for name in names], dim=-1)
        shaped = zip(names, parts, map(self.shapes.__getitem__, names), strict=True)
        return {name: part if len(shape) == 1 else part.view(first + shape) for name, part, shape in shaped}

    def dimension(self, block: Block | None = None) -> int:
        """Return K, the number of coordinates."""
        return sum([self._numbers[name] for name in self.names(block)])

    def names(self, block: Block | None = None) -> Block:
        """Return the names of the block's parameters."""
        return self._names if block is None else block


def flattened(rows: Tensor, axes: int = 1) -> Tensor:
    """Lay the numbers behind the first axes end to end: (N, *shape) -> (N, numbers), also where the shape is empty."""
    return rows if rows.ndim == axes + 1 else rows.reshape(*rows.shape[:axes], rows.shape[axes:].numel())


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switch off autocast inside the block, so that products keep the precision of what is multiplied."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def total(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of at least one tensor, one after the other."""
    return reduce(torch.add, parts)


def wide_type(values: Tensor) -> torch.dtype:
    """Float64, where the numbers' device has that; else their own type."""
    return values.dtype if values.device.type == "mps" else torch.float64


def wide(values: Tensor) -> Tensor:
    """Return the numbers in float64, where their device has that."""
    return values.to(wide_type(values))


def in_double(values: Tensor) -> Tensor:
    """Return the numbers in float64, on the CPU when their device has no float64."""
    return values.cpu().double() if values.device.type == "mps" else values.double()
