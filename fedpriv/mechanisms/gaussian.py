"""The Gaussian mechanism of DP-SGD (Abadi et al. 2016, Algorithm 1), on the operator."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedpriv.gradients import Block, GradientOperator, Vector
from fedpriv.mechanisms.base import (
    Mechanism,
    check_clip_norm,
    check_noise,
    clip_factor,
    clip_factors,
    normal_norm,
)
from fedpriv.mechanisms.law import Noise
from fedpriv.randomness import NoiseStream

__all__ = ["GaussianMechanism"]


@dataclass(frozen=True)
class GaussianMechanism(Mechanism):
    """Each finite gradient is clipped to a norm, others count as zero.

    The sum gets normal noise, always, also that of an empty batch.

    Attributes:
        sigma: noise multiplier, at least 0: the noise of the sum has standard deviation sigma * clip_norm in each
            coordinate.
        clip_norm: bound of the Euclidean norm of one example's gradient, above 0.
        clipping: flat: the whole gradient is clipped to clip_norm; layer: each of its m parameter tensors to
            clip_norm / sqrt(m), so that the whole has norm clip_norm at most (McMahan et al. 2018, Section 3).
    """

    name: ClassVar[str] = "gaussian"

    sigma: float
    clip_norm: float
    clipping: Literal["flat", "layer"] = "flat"

    def __post_init__(self) -> None:
        check_noise("sigma", self.sigma)
        check_clip_norm(self.clip_norm)
        if self.clipping not in ("flat", "layer"):
            raise ValueError(f"clipping = {self.clipping!r} is not allowed: flat, layer")

    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        released = gradients.draw(noise)
        deviation = self.sigma * self.clip_norm / batch_size
        blocks = self._blocks(tuple(gradients.shapes))
        for block in blocks:
            factors = clip_factors(gradients.norms(block), gradients.roundings(block), self._bound(blocks))
            gradients.add_combination(released, deviation, factors / batch_size, block)
        return released

    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:  # noqa: D102
        noise = self.sigma * normal_norm(sum(tensors), 1.0, tail)
        return self.clip_norm * (examples + noise) / batch_size

    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:  # noqa: D102
        return Noise((sum(tensors),), ((self.sigma * self.clip_norm / divisor) ** 2,))

    def weight(self, squared: Tensor, dimension: int, blocks: int) -> Tensor:  # noqa: D102
        return clip_factor(squared, self.clip_norm / math.sqrt(blocks))

    def blocks_of(self, names: Block) -> tuple[Block, ...]:  # noqa: D102
        return self._blocks(names)

    def _blocks(self, names: Block) -> tuple[Block, ...]:
        """What is clipped together."""
        return (names,) if self.clipping == "flat" else tuple((name,) for name in names)

    def _bound(self, blocks: tuple[Block, ...]) -> float:
        return self.clip_norm / math.sqrt(len(blocks))
