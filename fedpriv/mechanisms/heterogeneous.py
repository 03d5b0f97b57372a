"""The heterogeneous Gaussian mechanism: Gaussian noise between division by sqrt(K r) and multiplication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Count, Real
from fedpriv.mechanisms.gaussian import GaussianFamily, NormalNoise
from fedpriv.mechanisms.machinery.base import ClipNorm, Mechanism, PublicModel

if TYPE_CHECKING:
    import torch

    from fedpriv.core.randomness import NoiseStream
    from fedpriv.gradients import Block, GradientOperator, Vector
    from fedpriv.mechanisms.machinery.redistribution import Redistribution


@MECHANISMS.register
class HeterogeneousGaussianSettings(GaussianFamily):
    """Clip in a weighted norm, add normal noise that public shares spread unevenly."""

    title: ClassVar[str] = "heterogeneous Gaussian noise"
    label: ClassVar[str] = "heterogeneous Gaussian"
    summary: ClassVar[str] = (
        "Gaussian noise with public shares r of its power; gradients are clipped in |x / sqrt(K r)|."
    )
    colours: ClassVar[tuple[str, str]] = ("#CC79A7", "#E6A3C7")
    marker: ClassVar[str] = "D"
    proven_by: ClassVar[str] = "fedpriv.accounting.gaussian_proof:HeterogeneousGaussianProof"

    name: Literal["hgm"] = Field("hgm", description="privacy mechanism")
    clip_norm: ClipNorm = Field(1.0, description="bound of a gradient x in the norm |x / sqrt(K r)|")
    redistribution: Literal["uniform", "layer", "public"] = Field(
        "uniform", description="r, the shares of the noise power: even, even over tensors, or from public images"
    )
    inflation: Annotated[Real, Field(gt=0, le=100)] = Field(
        1.0, description="public: power of the sensitivities that the shares follow; large: more uneven"
    )
    public_examples: Count = Field(64, description="public: test images that the shares are computed from")

    @property
    @override
    def effective(self) -> tuple[str, ...]:
        idle = () if self.redistribution == "public" else ("inflation", "public_examples")
        return tuple(key for key in super().effective if key not in idle)

    @override
    def mechanism(self, redistribution: Redistribution | None = None) -> Mechanism:
        if redistribution is None:
            raise ValueError("hgm needs r, the shares of the noise")
        return HeterogeneousGaussianMechanism(self.given_noise(), self.clip_norm, redistribution)

    def redistributed(self, parameters: Vector, public: PublicModel) -> Redistribution:
        """Return r, the same for all clients and the whole run."""
        from fedpriv.mechanisms.machinery.redistribution import layer_shares, public_shares, uniform_shares

        match self.redistribution:
            case "uniform":
                return uniform_shares(parameters)
            case "layer":
                return layer_shares(parameters)
            case "public":
                return public_shares(*public(self.public_examples), self.inflation)

    @property
    @override
    def needs_redistribution(self) -> bool:
        return True


@dataclass(frozen=True)
class HeterogeneousGaussianMechanism(NormalNoise):
    """Each finite gradient is clipped in a weighted norm, others count as zero.

    The sum gets normal noise of another size in each coordinate, always, also that of an empty batch.

    Attributes:
        sigma: noise multiplier, at least 0: the noise of the sum has standard deviation sigma * clip_norm * sqrt(K r_k)
            in coordinate k.
        clip_norm: bound of |x / sqrt(K r)|, the Euclidean norm of one example's gradient x after division, above 0.
    """

    name: ClassVar[str] = "hgm"

    redistribution: Redistribution  # r, public

    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        from fedpriv.mechanisms.machinery.clipping import clip_factors

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

    @override
    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        from fedpriv.mechanisms.machinery.clipping import normal_norm

        # The variances K r sum to K; a gradient is at most the largest sqrt(K r) times as long as its weighted norm.
        largest = max(float(value.max()) for value in self.redistribution.deviations.values())
        noise = self.sigma * normal_norm(sum(tensors), largest, tail)
        return self.clip_norm * (examples * largest + noise) / batch_size

    @override
    def deviations(self, names: Block) -> Vector:
        return {name: self.redistribution.deviations[name] for name in names}

    @staticmethod
    def _like(vector: Vector, dtype: torch.dtype, device: torch.device) -> Vector:
        return {name: value.to(device, dtype) for name, value in vector.items()}
