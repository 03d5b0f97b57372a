"""Several factors of one parameter that a model uses more than once."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedpriv.gradients.factors.factor import Factor
from fedpriv.gradients.factors.outer import Outer
from fedpriv.gradients.norms import lengths
from fedpriv.gradients.operator import total


class Stacked(Factor):
    """A parameter whose first axis is cut into parts of one size, each with a factor of its own: groups of channels."""

    kept_as_sums = True

    def __init__(self, parts: Sequence[Outer], examples: int, shape: torch.Size, scratch: int) -> None:
        super().__init__(examples, shape, scratch)
        self._parts = tuple(parts)

    def gram(self, precise: bool) -> Tensor:
        """Return the sum of the parts'."""
        return total(part.gram(precise) for part in self._parts)

    def squared_norms(self) -> Tensor:
        """Return the sum of the parts'."""
        return total(part.squared_norms() for part in self._parts)

    def absolute_sums(self) -> Tensor:
        """Return the sum of the parts'."""
        return total(part.absolute_sums() for part in self._parts)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        """Return the sum of the parts'."""
        return total(part.weighted_squares(share) for part, share in self._with(weights))

    def dot(self, vector: Tensor) -> Tensor:
        """Return the sum of the parts'."""
        return total(part.dot(share) for part, share in self._with(vector))

    def combine(self, weights: Tensor) -> Tensor:
        """Return the parts', one after the other."""
        return torch.cat([part.combine(weights) for part in self._parts])

    def add_to(self, total: Tensor, scale: float, weights: Tensor) -> None:
        """Add the parts', one after the other."""
        for part, share in self._with(total):
            part.add_to(share, scale, weights)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the parts', one after the other."""
        return torch.cat([part.rows(start, stop) for part in self._parts], dim=1)

    def part(self, start: int, stop: int) -> Factor:
        """Return the parts' parts."""
        parts = [part.part(start, stop) for part in self._parts]
        return Stacked(parts, stop - start, self._shape, self._scratch)

    def masked(self, keep: Tensor) -> Factor:
        """Return the parts', the others zero."""
        return Stacked([part.masked(keep) for part in self._parts], self._examples, self._shape, self._scratch)

    def magnitudes(self) -> Tensor:
        """Return those of all parts together."""
        return lengths(torch.stack([part.magnitudes() for part in self._parts], dim=1))

    def roundings(self) -> Tensor:
        """Return those of all parts together."""
        return lengths(torch.stack([part.roundings() for part in self._parts], dim=1))

    def pair_products(self, precise: bool) -> int:
        """Return the sum of the parts'."""
        return sum(part.pair_products(precise) for part in self._parts)

    def _with(self, vector: Tensor) -> Iterator[tuple[Factor, Tensor]]:
        """The parts with their share of a tensor of the parameter's shape."""
        return zip(self._parts, vector.view(self._shape).chunk(len(self._parts)), strict=True)
