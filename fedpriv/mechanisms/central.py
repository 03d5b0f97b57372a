"""Central noise: clients clip, and a trusted server adds normal noise to the sum (McMahan et al. 2018, DP-FedAvg)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.names import AdjacencyName
from fedpriv.core.registry import MECHANISMS
from fedpriv.mechanisms.gaussian import GaussianFamily, GaussianMechanism
from fedpriv.mechanisms.machinery.base import ClipNorm, Mechanism, NoiseAt

if TYPE_CHECKING:
    from fedpriv.mechanisms.machinery.redistribution import Redistribution


class CentralFamily(GaussianFamily):
    """Settings of mechanisms whose normal noise a trusted server adds to a round's sum."""

    noise_at: ClassVar[NoiseAt] = "server"

    target_ceiling: None = Field(None, description="not set: an upload has no noise before the server adds it")
    clip_norm: ClipNorm = Field(1.0, description="bound of an update's Euclidean norm")
    adjacency: AdjacencyName = Field(
        "replace-one",
        description="which data sets must look alike: one client's update becomes any other, or counts as zero",
    )

    @property
    @override
    def effective(self) -> tuple[str, ...]:
        return (*super().effective, "adjacency")

    @override
    def mechanism(self, redistribution: Redistribution | None = None) -> Mechanism:
        """Return what leaves a client: its clipped update, without noise."""
        self.given_noise()
        return GaussianMechanism(0.0, self.clip_norm)

    @property
    @override
    def bound(self) -> float:
        return self.clip_norm

    @override
    def noise_on_mean(self, clients: int, divisor: float) -> float:
        return self.given_noise() * self.clip_norm / divisor


@MECHANISMS.register
class CentralSettings(CentralFamily):
    """Clip each client's update, and add noise to the sum at the server."""

    title: ClassVar[str] = "central Gaussian noise"
    label: ClassVar[str] = "central"
    summary: ClassVar[str] = (
        "Gaussian noise that a trusted server adds to the sum of clipped updates, as in DP-FedAvg; uploads are in the "
        "clear."
    )
    colours: ClassVar[tuple[str, str]] = ("#332288", "#8F7FE5")
    marker: ClassVar[str] = "D"
    proven_by: ClassVar[str] = "fedpriv.accounting.gaussian_proof:CentralProof"

    name: Literal["central"] = Field("central", description="privacy mechanism")
    unit: Literal["update"] = Field("update", description="whole updates, once a round")
