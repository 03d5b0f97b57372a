"""The heterogeneous Gaussian mechanism (Phan et al. 2019, Theorem 3) on per-example gradients.

Divide every coordinate k by sqrt(K r_k), apply the Gaussian mechanism, and multiply by sqrt(K r_k) again: what is
proven for the Gaussian mechanism holds, because the division does not depend on the data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
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
from fedpriv.mechanisms.redistribution import Redistribution
from fedpriv.randomness import NoiseStream

__all__ = ["HeterogeneousGaussianMechanism"]


@dataclass(frozen=True)
class HeterogeneousGaussianMechanism(Mechanism):
    """Each finite gradient is clipped in a weighted norm, others count as zero.

    The sum gets normal noise of another size in each coordinate, always, also that of an empty batch.

    Attributes:
        sigma: noise multiplier, at least 0: the noise of the sum has standard deviation
            sigma * clip_norm * sqrt(K r_k) in coordinate k.
        clip_norm: bound of |x / sqrt(K r)|, the Euclidean norm of one example's gradient x after division, above 0.
        redistribution: r, public.
    """

    name: ClassVar[str] = "hgm"

    sigma: float
    clip_norm: float
    redistribution: Redistribution

    def __post_init__(self) -> None:
        check_noise("sigma", self.sigma)
        check_clip_norm(self.clip_norm)

    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        norms = gradients.weighted_norms(self._like(self.redistribution.weights, gradients.dtype, gradients.device))
        # The weighted norm of what rounding adds is at most the root of the largest weight times its Euclidean norm.
        roundings = self.redistribution.steepest * gradients.roundings()
        released = gradients.combine(clip_factors(norms, roundings, self.clip_norm) / batch_size)
        deviations = self._like(self.redistribution.deviations, gradients.dtype, gradients.device)
        for name, drawn in gradients.draw(noise).items():
            released[name].addcmul_(drawn, deviations[name], value=self.sigma * self.clip_norm / batch_size)
        return released

    def standardise(self, released: Vector) -> Vector:
        """Divide each coordinate by sqrt(K r_k)."""
        return {name: value / self.redistribution.deviations[name].to(value) for name, value in released.items()}

    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:  # noqa: D102
        # The variances K r sum to K; a gradient is at most the largest sqrt(K r) times as long as its weighted norm.
        largest = max(float(value.max()) for value in self.redistribution.deviations.values())
        noise = self.sigma * normal_norm(sum(tensors), largest, tail)
        return self.clip_norm * (examples * largest + noise) / batch_size

    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:  # noqa: D102
        return Noise((sum(tensors),), ((self.sigma * self.clip_norm / divisor) ** 2,))

    def weight(self, squared: Tensor, dimension: int, blocks: int) -> Tensor:  # noqa: D102
        return clip_factor(squared, self.clip_norm)

    def deviations(self, names: Block) -> Vector:  # noqa: D102
        return {name: self.redistribution.deviations[name] for name in names}

    @staticmethod
    def _like(vector: Vector, dtype: torch.dtype, device: torch.device) -> Vector:
        return {name: value.to(device, dtype) for name, value in vector.items()}
