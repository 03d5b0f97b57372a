"""No mechanism: the mean gradient as it is. The baseline, without any privacy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpriv.gradients import GradientOperator, Vector
from fedpriv.mechanisms.base import Mechanism
from fedpriv.mechanisms.law import Noise
from fedpriv.randomness import NoiseStream

__all__ = ["NoMechanism"]


@dataclass(frozen=True)
class NoMechanism(Mechanism):
    """The sum of the gradients over the public batch size; a gradient that is not finite shows in the result."""

    name: ClassVar[str] = "none"
    protects: ClassVar[bool] = False

    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        weights = torch.full((gradients.examples,), 1 / batch_size, dtype=gradients.dtype, device=gradients.device)
        return gradients.combine(weights)

    def _admitted(self, gradients: GradientOperator) -> GradientOperator:
        """All gradients, as they are."""
        return gradients

    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        """Return infinity: nothing bounds a gradient."""
        return math.inf

    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:  # noqa: D102
        return Noise((sum(tensors),), (0.0,))

    def weight(self, squared: Tensor, dimension: int, blocks: int) -> Tensor:  # noqa: D102
        return torch.ones_like(squared)
