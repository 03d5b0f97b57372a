"""A parameter that no example uses."""

import torch
from torch import Tensor

from fedpriv.gradients.factors.factor import Factor
from fedpriv.gradients.operator import in_double


class Zero(Factor):
    """No gradient at all: the parameter was not used."""

    def __init__(self, parameter: Tensor, examples: int) -> None:
        super().__init__(examples, parameter.shape, 0)
        self._parameter = parameter

    def gram(self, precise: bool) -> Tensor:
        """Return zeros, (B, B)."""
        return in_double(self._parameter.new_zeros(self._examples, self._examples))

    def squared_norms(self) -> Tensor:
        """Return zeros, (B,)."""
        return self._parameter.new_zeros(self._examples)

    def absolute_sums(self) -> Tensor:
        """Return zeros, (B,)."""
        return self.squared_norms()

    def weighted_squares(self, weights: Tensor) -> Tensor:
        """Return zeros, (B,)."""
        return self.squared_norms()

    def dot(self, vector: Tensor) -> Tensor:
        """Return zeros, (B,)."""
        return self.squared_norms()

    def combine(self, weights: Tensor) -> Tensor:
        """Return zeros of the parameter's shape."""
        return torch.zeros_like(self._parameter)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return zeros."""
        return self._parameter.new_zeros(stop - start, *self._shape)

    def part(self, start: int, stop: int) -> Factor:
        """Return zeros."""
        return Zero(self._parameter, stop - start)

    def masked(self, keep: Tensor) -> Factor:
        """Return zeros."""
        return self

    def magnitudes(self) -> Tensor:
        """Return zeros, (B,)."""
        return self.squared_norms()

    def pair_products(self, precise: bool) -> int:
        """Return 0."""
        return 0
