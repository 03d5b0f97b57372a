"""The operator of a batch whose gradients are held as one factor a parameter, whatever its form."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from typing_extensions import override

from fedpriv.gradients.factors import Factor
from fedpriv.gradients.norms import lengths
from fedpriv.gradients.operator import Block, GradientOperator, Vector, full_precision, in_double


class FactoredGradients(GradientOperator):
    """Gradients held as one factor a parameter; products keep their precision where autocast is on."""

    def __init__(
        self,
        factors: Mapping[str, Factor],
        examples: int,
        shapes: dict[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        routes: Mapping[str, str],
        chunk_bytes: int,
    ) -> None:
        super().__init__(examples, shapes, dtype, device, routes, chunk_bytes)
        self._factors = dict(factors)
        self._magnitudes: dict[Block, Tensor] = {}

    @override
    def grams(self, groups: int, block: Block | None = None, *, precise: bool = True) -> Tensor:
        return in_double(self._sum(lambda name, factor: factor.grams(groups, precise), block))

    @override
    def norms(self, block: Block | None = None) -> Tensor:
        return self._sum(lambda name, factor: factor.squared_norms(), block).clamp_(min=0).sqrt_()

    @override
    def absolute_sums(self, block: Block | None = None) -> Tensor:
        return self._sum(lambda name, factor: factor.absolute_sums(), block)

    @override
    def weighted_norms(self, weights: Vector, block: Block | None = None) -> Tensor:
        return self._sum(lambda name, factor: factor.weighted_squares(weights[name]), block).clamp_(min=0).sqrt_()

    @override
    def rows(self, start: int, stop: int, block: Block | None = None) -> Vector:
        with full_precision(self.device):
            return {name: self._factors[name].rows(start, stop) for name in self.names(block)}

    @override
    def dots(self, vectors: Vector, block: Block | None = None) -> Tensor:
        return self._sum(lambda name, factor: factor.dots(vectors[name]), block)

    @override
    def combine(self, weights: Tensor, block: Block | None = None) -> Vector:
        with full_precision(self.device):
            return {name: self._factors[name].combine(weights) for name in self.names(block)}

    @override
    def add_combination(self, vector: Vector, scale: float, weights: Tensor, block: Block | None = None) -> None:
        with full_precision(self.device):
            for name in self.names(block):
                self._factors[name].add_to(vector[name], scale, weights)

    @override
    def part(self, start: int, stop: int) -> "FactoredGradients":
        factors = {name: factor.part(start, stop) for name, factor in self._factors.items()}
        return FactoredGradients(
            factors, stop - start, self.shapes, self.dtype, self.device, self.routes, self.chunk_bytes
        )

    def combine_each(self, weights: Tensor, block: Block | None = None) -> Vector:
        """Return the sums of the gradients of G groups with weights (G, B / G), in new tensors (G, *shape)."""
        with full_precision(self.device):
            return {name: self._factors[name].combine_each(weights) for name in self.names(block)}

    def add_to_each(self, vectors: Vector, scale: float, weights: Tensor, block: Block | None = None) -> None:
        """Replace vectors (G, *shape) by ``scale`` times themselves plus those sums; they may have more names."""
        with full_precision(self.device):
            for name in self.names(block):
                self._factors[name].add_to_each(vectors[name], scale, weights)

    @override
    def magnitudes(self, block: Block | None = None) -> Tensor:
        names = tuple(self.names(block))
        if names not in self._magnitudes:
            factors = [self._factors[name].magnitudes() for name in names]
            self._magnitudes[names] = lengths(torch.stack(factors, dim=1))
        return self._magnitudes[names]

    @override
    def roundings(self, block: Block | None = None) -> Tensor:
        sums = [factor for name in self.names(block) if (factor := self._factors[name]).kept_as_sums]
        if not sums:
            return torch.zeros(self.examples, dtype=self.dtype, device=self.device)
        return lengths(torch.stack([factor.roundings() for factor in sums], dim=1))

    @override
    def masked(self, keep: Tensor) -> "FactoredGradients":
        factors = {name: factor.masked(keep) for name, factor in self._factors.items()}
        return FactoredGradients(
            factors, self.examples, self.shapes, self.dtype, self.device, self.routes, self.chunk_bytes
        )

    @override
    def pair_products(self, block: Block | None = None, *, precise: bool = True) -> int:
        return sum(self._factors[name].pair_products(precise) for name in self.names(block))

    def _sum(self, product: Callable[[str, Factor], Tensor], block: Block | None) -> Tensor:
        """Add up a product over the block's parameters."""
        first, *others = self.names(block)
        with full_precision(self.device):
            total = product(first, self._factors[first])
            for name in others:
                total = total + product(name, self._factors[name])
        return total
