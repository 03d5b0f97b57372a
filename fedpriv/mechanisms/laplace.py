"""The Laplace mechanism (Dwork et al. 2006) on per-example gradients that are clipped in the L1 norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Epsilon
from fedpriv.mechanisms.machinery.base import (
    ClipNorm,
    Contender,
    Mechanism,
    Multiplier,
    NoisySettings,
    check_clip_norm,
    check_noise,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.core.randomness import NoiseStream
    from fedpriv.gradients import GradientOperator, Vector
    from fedpriv.mechanisms.machinery.law import LaplaceNoise
    from fedpriv.mechanisms.machinery.redistribution import Redistribution


@MECHANISMS.register
class LaplaceSettings(NoisySettings):
    """Clip in L1, add Laplace noise."""

    title: ClassVar[str] = "Laplace noise"
    label: ClassVar[str] = "Laplace"
    summary: ClassVar[str] = "Laplace noise on a sum of gradients that are clipped in the L1 norm."
    colours: ClassVar[tuple[str, str]] = ("#009E73", "#2FC79B")
    marker: ClassVar[str] = "s"
    proven_by: ClassVar[str] = "fedpriv.accounting.pure_proof:LaplaceProof"
    parameter: ClassVar[str] = "scale"
    nominal: ClassVar[str] = "of one participation, 1 / scale"
    by_dimension: ClassVar[bool] = False

    name: Literal["laplace"] = Field("laplace", description="privacy mechanism")
    epsilon: Epsilon | None = Field(None, description="nominal, of one participation: 1 / scale")
    scale: Multiplier | None = Field(None, description="scale of the noise on the sum, over clip_norm")
    clip_norm: ClipNorm = Field(1.0, description="bound of a gradient's L1 norm")

    @override
    def mechanism(self, redistribution: Redistribution | None = None) -> Mechanism:
        return LaplaceMechanism(self.given_noise(), self.clip_norm)

    @classmethod
    @override
    def contenders(cls, whole: tuple[int, ...], small: tuple[int, ...]) -> tuple[Contender, ...]:
        return (("laplace", whole),)


@dataclass(frozen=True)
class LaplaceMechanism(Mechanism):
    """Gradients clipped in L1, those that are not finite as zero; the sum always gets Laplace noise."""

    name: ClassVar[str] = "laplace"
    at_once: ClassVar[bool] = True

    scale: float  # at least 0: b = scale * clip_norm in the density exp(-|x| / b) / (2 b) of each coordinate
    clip_norm: float  # bound of the L1 norm of one example's gradient, above 0

    def __post_init__(self) -> None:
        check_noise("scale", self.scale)
        check_clip_norm(self.clip_norm)

    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        from fedpriv.mechanisms.machinery.clipping import clip_factors

        # The L1 norm of what rounding adds is at most the root of the number of coordinates times its Euclidean norm.
        roundings = math.sqrt(gradients.dimension()) * gradients.roundings()
        factors = clip_factors(gradients.absolute_sums(), roundings, self.clip_norm)
        released = gradients.combine(factors / batch_size)
        width = self.scale * self.clip_norm / batch_size
        for value in released.values():
            value.add_(laplace_quantile(noise.uniform(value.numel())).view(value.shape).to(value), alpha=width)
        return released

    @override
    def expected(self, gradient: Vector) -> Vector:
        import torch

        from fedpriv.mechanisms.machinery.clipping import clip_factor

        norm = torch.stack([value.abs().sum() for value in gradient.values()]).sum()
        factor = clip_factor(norm.square(), self.clip_norm)
        return {name: factor * value for name, value in gradient.items()}

    @override
    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        # A gradient's Euclidean norm is at most its L1 norm.
        return self.clip_norm * (examples + self.scale * _norm_of_noise(sum(tensors), tail)) / batch_size

    @override
    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> LaplaceNoise:
        from fedpriv.mechanisms.machinery.law import LaplaceNoise

        return LaplaceNoise((sum(tensors),), (2 * (self.scale * self.clip_norm / divisor) ** 2,))


def _norm_of_noise(dimension: int, tail: float) -> float:
    """What the Euclidean norm of Laplace noise of scale 1 exceeds with probability ``tail`` at most.

    It is at most the root of the L1 norm, a Gamma variable, times the largest coordinate, one of ``dimension``
    exponential variables; each keeps to its bound but for half of ``tail``.
    """
    from scipy.special import gammainccinv

    total = float(gammainccinv(dimension, tail / 2))
    return math.sqrt(total * math.log(2 * dimension / tail))


def laplace_quantile(uniform: Tensor) -> Tensor:
    """Map uniform numbers in [0, 1) to Laplace of scale 1, in float64: finite, and as fine in both tails."""
    twice = uniform * 2
    negative = twice >= 1
    size = (negative.to(twice) - twice).log1p().neg_()
    return (-size).where(negative, size)
