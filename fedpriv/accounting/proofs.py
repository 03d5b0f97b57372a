"""What a proof about one mechanism has to provide, and what all of them share: claims, adjacencies, words."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.accounting.release import Release

__all__ = ["CLIENTS", "NO_NOMINAL", "Claim", "NoProof", "Proof", "smallest"]

CLIENTS = "No amplification by the sampling of clients is claimed: the server sees who uploads."
NO_NOMINAL = "this mechanism's papers print no figure beside the proven one"

_REPLACE_EXAMPLE = "replace-one: one example of this client is replaced by any other"
_REPLACE_UPDATE = "replace-one-update: this client's whole update is replaced by any other"


@dataclass(frozen=True)
class Claim:
    """An epsilon and the theorem that gives it; infinity and the reason where none does."""

    epsilon: float
    theorem: str


def smallest(claims: Sequence[Claim]) -> Claim:
    """Return the claim with the smallest epsilon, the first of equal ones."""
    return min(claims, key=lambda claim: claim.epsilon)


@dataclass(frozen=True)
class Proof(ABC):
    """What is known about one client's releases by one mechanism.

    Attributes:
        release: what the mechanism did; at least one participation.
    """

    release: Release

    @property
    def adjacency(self) -> str:
        """Which two data sets must look alike, in words."""
        return _REPLACE_UPDATE if self.release.unit == "update" else _REPLACE_EXAMPLE

    @abstractmethod
    def nominal(self) -> Claim:
        """The figure as the mechanism's paper prints it."""

    @abstractmethod
    def pure(self) -> Claim:
        """Pure epsilon-DP of all releases together."""

    @abstractmethod
    def cheap_claims(self) -> list[Claim]:
        """Every (epsilon, delta) claim by closed forms and Renyi accounting; at least one, a few milliseconds."""

    def numerical_claims(self, known: float) -> list[Claim]:
        """Claims that take longer, and may be smaller.

        Args:
            known: an epsilon that is proven already, finite.
        """
        return []

    def notes(self) -> tuple[str, ...]:
        """What a reader must know beside the figures. Heuristics are labelled so."""
        shuffled = "Shuffled passes: a pass is one participation (parallel composition); no amplification is claimed."
        return (CLIENTS, shuffled) if self.release.sampling == "shuffled" else (CLIENTS,)


class NoProof(Proof):
    """Mechanism none."""

    def nominal(self) -> Claim:  # noqa: D102
        return Claim(math.inf, NO_NOMINAL)

    def pure(self) -> Claim:  # noqa: D102
        return Claim(
            math.inf, "nothing is proven: without noise the upload is a fixed function of the data that went into it"
        )

    def cheap_claims(self) -> list[Claim]:  # noqa: D102
        return [self.pure()]

    def notes(self) -> tuple[str, ...]:  # noqa: D102
        return ()
