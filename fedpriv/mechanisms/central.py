"""Noise that a trusted server adds to the sum of clipped updates: central (DP-FedAvg) and correlated (DP-FTRL).

Central noise is drawn anew in each round (McMahan et al. 2018); correlated noise cancels that of earlier sums in part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.names import AdjacencyName
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import Count
from fedpriv.mechanisms.gaussian import GaussianFamily, GaussianMechanism
from fedpriv.mechanisms.machinery.base import ClipNorm, Mechanism, NoiseAt

if TYPE_CHECKING:
    from fedpriv.accounting.release import Correlation
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


@MECHANISMS.register
class CorrelatedSettings(CentralFamily):
    """As central noise, but a sum of several rounds has less of it than independent noise would add up to."""

    title: ClassVar[str] = "correlated Gaussian noise"
    label: ClassVar[str] = "correlated"
    summary: ClassVar[str] = (
        "Gaussian noise that a trusted server adds to the sums of rounds, and that partly cancels over rounds, as in "
        "DP-FTRL; uploads are in the clear."
    )
    colours: ClassVar[tuple[str, str]] = ("#882255", "#D97BA6")
    marker: ClassVar[str] = "d"
    proven_by: ClassVar[str] = "fedpriv.accounting.correlated:CorrelatedProof"
    nominal: ClassVar[str] = "this mechanism has none; give sigma or target_epsilon"

    name: Literal["correlated"] = Field("correlated", description="privacy mechanism")
    unit: Literal["example", "update"] = Field(
        "update", description="whole updates, or with fedsgd single examples, of which clients clip the gradients"
    )
    epsilon: None = Field(None, description="not set: one release alone is none of the mechanism's")
    band: Count | None = Field(
        None,
        description="of how many rounds a sum has noise, and so how many noise vectors are kept; 1: independent noise; "
        "unset: as many as separation, and rounds at most",
    )
    separation: Count | None = Field(
        None,
        description="a client, and so an example of it, is in at most one of so many rounds in a row; unset: as the "
        "choice of clients keeps it, federation.clients / clients_per_round with client_sampling = 'turns'",
    )
    participations: Count | None = Field(
        None, description="a client is in so many rounds at most; unset: as many as the choice of clients leads to"
    )

    @override
    def correlation(self, rounds: int, separation: int, participations: int) -> Correlation:
        from fedpriv.accounting.release import Correlation

        if (self.separation or 1) > separation:
            raise InputError(
                key="mechanism.separation",
                given=self.separation,
                allowed=f"at most {separation}: the choice of clients may take a client again after so many rounds",
                hint="federation.client_sampling = 'turns' takes each every clients / clients_per_round rounds",
            )
        if self.participations is not None and self.participations < participations:
            raise InputError(
                key="mechanism.participations",
                given=self.participations,
                allowed=f"at least {participations}: the choice of clients may take a client that often",
            )
        if (self.band or 1) > rounds:
            raise InputError(key="mechanism.band", given=self.band, allowed=f"at most federation.rounds = {rounds}")
        apart = min(self.separation or separation, rounds)
        most = min(self.participations or participations, -(-rounds // apart))
        return Correlation(self.band or apart, apart, most, rounds)
