"""Distributed noise: each client adds a share, and under secure aggregation the server sees the noisy sum alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.names import AdjacencyName
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Count, Real
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.machinery.base import ClipNorm, NoiseAt, NoisySettings

if TYPE_CHECKING:
    from fedpriv.core.randomness import NoiseStream
    from fedpriv.gradients import GradientOperator, Vector
    from fedpriv.mechanisms.machinery.redistribution import Redistribution


@MECHANISMS.register
class DistributedSettings(NoisySettings):
    """Clip each client's update, round it to whole numbers, and add a share of Skellam noise before it is masked."""

    title: ClassVar[str] = "distributed Skellam noise"
    label: ClassVar[str] = "distributed"
    summary: ClassVar[str] = (
        "Shares of Skellam noise that clients add to rounded updates under secure aggregation: only the sum has "
        "the whole noise."
    )
    colours: ClassVar[tuple[str, str]] = ("#117733", "#66C28A")
    marker: ClassVar[str] = "X"
    proven_by: ClassVar[str] = "fedpriv.accounting.skellam:SkellamProof"
    noise_at: ClassVar[NoiseAt] = "sum"
    parameter: ClassVar[str] = "sigma"
    nominal: ClassVar[str] = "this mechanism has none; give sigma or target_epsilon"

    name: Literal["distributed"] = Field("distributed", description="privacy mechanism")
    unit: Literal["update"] = Field("update", description="whole updates, once a round")
    epsilon: None = Field(None, description="not set: no paper prints another figure than the proven one")
    target_ceiling: None = Field(None, description="not set: no ceiling is known for noise on a sum")
    sigma: Annotated[Real, Field(ge=1e-2, le=1024)] | None = Field(
        None, description="standard deviation of the noise on the sum, over clip_norm"
    )
    clip_norm: ClipNorm = Field(1.0, description="bound of an update's Euclidean norm")
    adjacency: AdjacencyName = Field(
        "replace-one",
        description="which data sets must look alike: one client's update becomes any other, or counts as zero",
    )
    survivors: Count | None = Field(
        None,
        description="clients whose shares add up to the whole noise; no sum of fewer is unmasked. Default: as many as "
        "secure aggregation needs, more than two thirds of a round",
    )

    @property
    @override
    def adjacent(self) -> AdjacencyName:
        return self.adjacency

    @override
    def shared_by(self, clients: int) -> Self:
        from fedpriv.mechanisms.machinery.whole_numbers import least_survivors

        least = least_survivors(clients)
        survivors = least if self.survivors is None else self.survivors
        if not least <= survivors <= clients:
            raise InputError(
                key="mechanism.survivors",
                given=survivors,
                allowed=f"of the {clients} clients of a round, secure aggregation needs {least} or more in a "
                f"sum; allowed are {least} to {clients}",
            )
        return self.model_copy(update={"survivors": survivors})

    @property
    @override
    def least_in_sum(self) -> int:
        return self.survivors or 0

    @override
    def mechanism(self, redistribution: Redistribution | None = None) -> ShareOfNoise:
        return ShareOfNoise(self.given_noise() / math.sqrt(self.survivors or 1), self.clip_norm)

    @property
    @override
    def bound(self) -> float:
        return self.clip_norm

    @override
    def noise_on_mean(self, clients: int, divisor: float) -> float:
        return self.mechanism().sigma * self.clip_norm * math.sqrt(clients) / divisor


class ShareOfNoise(GaussianMechanism):
    """A clipped update for quantisation.py, which adds the share; its law is taken as normal by attacks."""

    @override
    def _release(self, gradients: GradientOperator, batch_size: int, noise: NoiseStream) -> Vector:
        return GaussianMechanism(0.0, self.clip_norm)._release(gradients, batch_size, noise)
