"""A mechanism of somebody else: clip each gradient, round the sum. Nothing is proven about it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field

from fedpriv.core.randomness import NoiseStream
from fedpriv.core.settings import Positive
from fedpriv.gradients import GradientOperator, Vector
from fedpriv.mechanisms import MechanismSettings
from fedpriv.mechanisms.machinery.base import BlockMechanism, Mechanism
from fedpriv.mechanisms.machinery.clipping import clip_factor, clip_factors
from fedpriv.mechanisms.machinery.law import Noise


class RoundedSettings(MechanismSettings):
    """Clip in L2, round to multiples of a step."""

    title: ClassVar[str] = "rounding"

    name: Literal["rounded"] = Field("rounded", description="privacy mechanism")
    clip_norm: Positive = Field(1.0, description="bound of a gradient's Euclidean norm")
    step: Positive = Field(0.01, description="distance of the values that a number may have, over clip_norm")

    def mechanism(self, redistribution: object = None) -> Mechanism:
        return Rounded(self.clip_norm, self.step)


@dataclass(frozen=True)
class Rounded(BlockMechanism):
    name: ClassVar[str] = "rounded"

    clip_norm: float
    step: float

    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        factors = clip_factors(gradients.norms(), gradients.roundings(), self.clip_norm)
        width = self.step * self.clip_norm
        released = gradients.combine(factors)
        return {name: (value / width).round() * width / batch_size for name, value in released.items()}

    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        return self.clip_norm * (examples + self.step * math.sqrt(sum(tensors))) / batch_size

    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:
        # Rounding errors as if they were drawn: of an even distribution.
        return Noise((sum(tensors),), ((self.step * self.clip_norm / divisor) ** 2 / 12,))

    def weight(self, squared: torch.Tensor, dimension: int, blocks: int) -> torch.Tensor:
        return clip_factor(squared, self.clip_norm)
