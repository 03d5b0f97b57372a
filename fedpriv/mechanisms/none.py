"""No mechanism: the mean gradient as it is. The baseline, without any privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedpriv.mechanisms.machinery.base import Mechanism
from fedpriv.mechanisms.machinery.settings import MechanismSettings
from fedpriv.registry import MECHANISMS

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.gradients import GradientOperator, Vector
    from fedpriv.mechanisms.machinery.law import Noise
    from fedpriv.mechanisms.machinery.redistribution import Redistribution
    from fedpriv.randomness import NoiseStream

__all__ = ["NoMechanism", "NoneSettings"]


@MECHANISMS.register
class NoneSettings(MechanismSettings):
    """Uploads go out as they are."""

    title: ClassVar[str] = "no mechanism"
    label: ClassVar[str] = "no mechanism"
    colours: ClassVar[tuple[str, str]] = ("#1d2127", "#e8e6e2")
    marker: ClassVar[str] = "X"
    protects: ClassVar[bool] = False

    name: Literal["none"] = Field("none", description="privacy mechanism")

    @property
    def effective(self) -> tuple[str, ...]:  # noqa: D102
        return ()

    def mechanism(self, redistribution: Redistribution | None = None) -> Mechanism:  # noqa: D102
        return NoMechanism()


@dataclass(frozen=True)
class NoMechanism(Mechanism):
    """The sum of the gradients over the public batch size; a gradient that is not finite shows in the result."""

    name: ClassVar[str] = "none"
    protects: ClassVar[bool] = False

    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        import torch

        weights = torch.full((gradients.examples,), 1 / batch_size, dtype=gradients.dtype, device=gradients.device)
        return gradients.combine(weights)

    def _admitted(self, gradients: GradientOperator) -> GradientOperator:
        """All gradients, as they are."""
        return gradients

    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        """Return infinity: nothing bounds a gradient."""
        return math.inf

    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:  # noqa: D102
        from fedpriv.mechanisms.machinery.law import Noise

        return Noise((sum(tensors),), (0.0,))

    def weight(self, squared: Tensor, dimension: int, blocks: int) -> Tensor:  # noqa: D102
        return squared.new_ones(squared.shape)
