"""The Gaussian mechanism of DP-SGD (Abadi et al. 2016, Algorithm 1), on the operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.names import AdjacencyName, CalibrationName
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Epsilon
from fedpriv.mechanisms.machinery.base import (
    BlockMechanism,
    ClipNorm,
    Contender,
    Mechanism,
    MechanismSettings,
    Multiplier,
    NoisySettings,
    Target,
    check_clip_norm,
    check_noise,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedpriv.core.randomness import NoiseStream
    from fedpriv.gradients import Block, GradientOperator, Vector
    from fedpriv.mechanisms.machinery.law import Noise
    from fedpriv.mechanisms.machinery.redistribution import Redistribution


class GaussianFamily(NoisySettings):
    """Settings of mechanisms whose noise is normal, and for which the Gaussian mechanism's theorems hold."""

    parameter: ClassVar[str] = "sigma"
    nominal: ClassVar[str] = "of one release alone, without sampling, by --calibration"
    by_dimension: ClassVar[bool] = False

    epsilon: Epsilon | None = Field(
        None, description="the whole run's at delta, by calibration; on updates each upload's own, nominal"
    )
    sigma: Multiplier | None = Field(None, description="standard deviation of the noise on the sum, over clip_norm")
    calibration: CalibrationName = Field(
        "analytic", description="on updates: from epsilon to sigma; classic: epsilon <= 1 only"
    )
    clip_norm: ClipNorm = 1.0
    adjacency: AdjacencyName = Field(
        "replace-one",
        description="which data sets must look alike: one example becomes any other; or, in Poisson batches, one that "
        "adds zero",
    )

    @model_validator(mode="after")
    def _classic_is_proven(self) -> Self:
        if self._calibrates_each_upload and self.calibration == "classic" and (self.epsilon or 0) > 1:
            proven = f"proven for epsilon <= 1, not for epsilon = {self.epsilon:g}"
            raise self.wrong("calibration", proven, "use analytic or extended")
        return self

    @property
    def effective(self) -> tuple[str, ...]:
        """All but the adjacency of updates, and the calibration where nothing is calibrated by it."""
        idle = set() if self.unit == "example" else {"adjacency"}
        idle |= set() if self._calibrates_each_upload else {"calibration"}
        return tuple(key for key in super().effective if key not in idle)

    @property
    @override
    def adjacent(self) -> AdjacencyName:
        return self.adjacency

    @property
    @override
    def target(self) -> Target | None:
        """On examples ``epsilon``, too."""
        if self.epsilon is not None and self.unit == "example":
            return Target("epsilon", self.epsilon)
        return super().target

    @property
    @override
    def single_release(self) -> CalibrationName:
        return self.calibration

    @property
    def _calibrates_each_upload(self) -> bool:
        return self.unit == "update" and self.epsilon is not None


@MECHANISMS.register
class GaussianSettings(GaussianFamily):
    """Clip in L2, add normal noise."""

    title: ClassVar[str] = "Gaussian noise"
    label: ClassVar[str] = "Gaussian"
    summary: ClassVar[str] = "Gaussian noise on a sum of gradients that are clipped in the L2 norm, as in DP-SGD."
    colours: ClassVar[tuple[str, str]] = ("#0072B3", "#56B4EA")
    marker: ClassVar[str] = "o"
    proven_by: ClassVar[str] = "fedpriv.accounting.gaussian_proof:GaussianProof"

    name: Literal["gaussian"] = Field("gaussian", description="privacy mechanism")
    clip_norm: ClipNorm = Field(1.0, description="bound of a gradient's Euclidean norm")
    clipping: Literal["flat", "layer"] = Field(
        "flat", description="the whole gradient, or each of m tensors to clip_norm / sqrt(m)"
    )

    @override
    def mechanism(self, redistribution: Redistribution | None = None) -> Mechanism:
        return GaussianMechanism(self.given_noise(), self.clip_norm, self.clipping)

    @classmethod
    @override
    def contenders(cls, whole: tuple[int, ...], small: tuple[int, ...]) -> tuple[Contender, ...]:
        return (("gaussian", whole),)


def as_normal(config: MechanismSettings, deviation: float) -> dict[str, object]:
    """Return the settings of normal noise of a deviation with a mechanism's unit and bound, as adversaries model it."""
    settings = GaussianSettings(unit=config.unit, sigma=deviation / config.bound, clip_norm=config.bound)
    return settings.model_dump(mode="json", exclude_none=True)


@dataclass(frozen=True)
class NormalNoise(BlockMechanism):
    """A mechanism whose sum gets normal noise, of one size in standardised coordinates."""

    at_once: ClassVar[bool] = True

    sigma: float  # noise multiplier, at least 0
    clip_norm: float  # bound of the norm of one example's gradient, above 0

    def __post_init__(self) -> None:
        check_noise("sigma", self.sigma)
        check_clip_norm(self.clip_norm)

    @override
    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:
        from fedpriv.mechanisms.machinery.law import Noise

        return Noise((sum(tensors),), ((self.sigma * self.clip_norm / divisor) ** 2,))

    @override
    def weight(self, squared: Tensor, dimension: int, blocks: int) -> Tensor:
        from fedpriv.mechanisms.machinery.clipping import clip_factor

        return clip_factor(squared, self.clip_norm / math.sqrt(blocks))

    @override
    def draw_products(
        self,
        grams: NDArray[np.float64],
        dimensions: Sequence[int],
        variances: Sequence[float],
        sources: NDArray[np.int64],
        rng: np.random.Generator,
    ) -> NDArray[np.float64] | None:
        from fedpriv.mechanisms.machinery.vmf_sampling import normal_products

        (gram,), (variance,) = grams, variances
        return normal_products(gram, variance, sources, rng)[None]


@dataclass(frozen=True)
class GaussianMechanism(NormalNoise):
    """Clip each finite gradient to a norm, others count as zero; the sum always gets normal noise, even if empty.

    Attributes:
        sigma: noise multiplier, at least 0: the noise of the sum has standard deviation sigma * clip_norm in each
            coordinate.
        clip_norm: bound of the Euclidean norm of one example's gradient, above 0.
    """

    name: ClassVar[str] = "gaussian"

    clipping: Literal["flat", "layer"] = "flat"  # layer: each of m tensors to clip_norm / sqrt(m)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clipping not in ("flat", "layer"):
            raise InputError(key="clipping", given=self.clipping, allowed="flat, layer")

    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        from fedpriv.mechanisms.machinery.clipping import clip_factors

        numbers = gradients.numbers(noise)
        deviation = self.sigma * self.clip_norm / batch_size
        blocks = self.blocks_of(tuple(gradients.shapes))
        bound = self.clip_norm / math.sqrt(len(blocks))
        shares = numbers.split([gradients.dimension(block) for block in blocks], dim=-1)
        for block, share in zip(blocks, shares, strict=True):
            factors = clip_factors(gradients.norms(block), gradients.roundings(block), bound)
            gradients.add_laid(share, deviation, factors / batch_size, block)
        return gradients.vector(numbers)

    @override
    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        from fedpriv.mechanisms.machinery.clipping import normal_norm

        noise = self.sigma * normal_norm(sum(tensors), 1.0, tail)
        return self.clip_norm * (examples + noise) / batch_size

    def blocks_of(self, names: Block) -> tuple[Block, ...]:
        """What is clipped together."""
        return (names,) if self.clipping == "flat" else tuple((name,) for name in names)
