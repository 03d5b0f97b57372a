"""The directional mechanism: von Mises-Fisher noise on the direction of each gradient (DirDP-SGD, Algorithm 1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpriv.gradients import Block, GradientOperator, Vector
from fedpriv.mechanisms.base import Mechanism, inverse_norm
from fedpriv.mechanisms.batch_sum import draw_sum
from fedpriv.mechanisms.block_sum import draw_block_sums
from fedpriv.mechanisms.blocks import block_length, block_runs, block_sizes
from fedpriv.mechanisms.cosine import mean_cosine
from fedpriv.mechanisms.law import Noise
from fedpriv.randomness import NoiseStream

__all__ = ["VmfMechanism"]

MOST_KAPPA = 1e7


@dataclass(frozen=True)
class VmfMechanism(Mechanism):
    """Each block of each gradient is scaled (not clipped) to a public length and turned by a von Mises-Fisher draw.

    A gradient of zero has no direction and gets a uniform one. So does a gradient that is not finite, and one of which
    only rounding errors are left (see the module ``batch_sum``); that depends on the gradient alone. The sum over the
    batch is drawn exactly from the gradients' inner products, not from B draws of K numbers; for blocks of a given
    size, which cut through layers, from draws of the blocks (see the module ``block_sum``).

    Attributes:
        kappa: concentration, from 0 (a uniform direction: no signal) to 1e7.
        blocks: whole: one draw for the whole gradient; layer: one for each parameter tensor; size:D: one for each D
            consecutive coordinates of all parameters (see ``block_sizes``).
        scale: the length of each block's draw, above 0.
    """

    name: ClassVar[str] = "vmf"

    kappa: float
    blocks: str = "whole"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.kappa <= MOST_KAPPA:
            raise ValueError(f"kappa = {self.kappa} is not allowed: it is a number from 0 to {MOST_KAPPA:g}")
        block_length(self.blocks)
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale = {self.scale} is not allowed: it is a finite number above 0")

    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        rng = noise.numpy()
        scale, names = self.scale / batch_size, tuple(gradients.shapes)
        if block_length(self.blocks) is not None:
            runs = block_runs(self.blocks, [shape.numel() for shape in gradients.shapes.values()])
            return draw_block_sums(gradients, self.kappa, scale, runs, noise, rng)
        released: Vector = {}
        for block in (names,) if self.blocks == "whole" else [(name,) for name in names]:
            released |= draw_sum(gradients, self.kappa, scale, block, noise, rng)
        return released

    def expected(self, gradient: Vector) -> Vector:
        """Return scale * A_K(kappa) * g / |g| per block, zero for a block that is zero; differentiable."""
        tensors = [value.numel() for value in gradient.values()]
        runs = block_runs(self.blocks, tensors)
        flat = torch.cat([value.reshape(-1) for value in gradient.values()])
        parts = zip(runs, flat.split([count * size for count, size in runs]), strict=True)
        means = torch.cat([self._means(part.view(-1, size)).view(-1) for (_, size), part in parts]).split(tensors)
        return {name: mean.view(value.shape) for mean, (name, value) in zip(means, gradient.items(), strict=True)}

    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        """Return the length of ``examples`` draws that all point in one direction; nothing exceeds it."""
        return examples * self.scale * math.sqrt(len(block_sizes(self.blocks, tensors))) / batch_size

    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:  # noqa: D102
        runs = block_runs(self.blocks, tensors)
        variances = [examples * (self.scale / divisor) ** 2 * self._across(size) for _, size in runs]
        return Noise(tuple(count * size for count, size in runs), tuple(variances))

    def weight(self, squared: Tensor, dimension: int, blocks: int) -> Tensor:
        """Return the length of the mean over that of the gradient; 0, and constant, where there is no direction."""
        return self._length(dimension) * inverse_norm(squared)

    def blocks_of(self, names: Block) -> tuple[Block, ...]:  # noqa: D102
        return () if block_length(self.blocks) is not None else self.directions(names)

    def directions(self, names: Block) -> tuple[Block, ...]:  # noqa: D102
        return tuple((name,) for name in names) if self.blocks == "layer" else (names,)

    def _means(self, blocks: Tensor) -> Tensor:
        """The means of draws around blocks, both (m, d)."""
        return self._length(blocks.shape[1]) * (inverse_norm(blocks.square().sum(dim=1, keepdim=True)) * blocks)

    def _length(self, dimension: int) -> float:
        return self.scale * mean_cosine(self.kappa, dimension)

    def _across(self, dimension: int) -> float:
        """The variance of a draw in each coordinate across its mean direction (see the module ``law``)."""
        return mean_cosine(self.kappa, dimension) / self.kappa if self.kappa else 1 / dimension
