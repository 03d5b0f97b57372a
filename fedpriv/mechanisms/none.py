"""No mechanism: the mean gradient as it is. The baseline, without any privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MECHANISMS
from fedpriv.mechanisms.machinery.base import BlockMechanism, Mechanism, MechanismSettings

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.core.randomness import NoiseStream
    from fedpriv.gradients import GradientOperator, Vector
    from fedpriv.mechanisms.machinery.law import Noise
    from fedpriv.mechanisms.machinery.redistribution import Redistribution


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
    @override
    def effective(self) -> tuple[str, ...]:
        return ()

    @override
    def mechanism(self, redistribution: Redistribution | None = None) -> Mechanism:
        return NoMechanism()


@dataclass(frozen=True)
class NoMechanism(BlockMechanism):
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

    @override
    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:
        from fedpriv.mechanisms.machinery.law import Noise

        return Noise((sum(tensors),), (0.0,))

    @override
    def weight(self, squared: Tensor, dimension: int, blocks: int) -> Tensor:
        return squared.new_ones(squared.shape)
