"""The ledger of a run: one line a client, and the run's figure, which is the worst client's (not a sum)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from fedpriv.accounting.guarantees import Guarantee

__all__ = ["Ledger", "LedgerEntry"]


@dataclass(frozen=True)
class LedgerEntry:
    """One client's line.

    Attributes:
        client: the partition's number.
        examples: n_k, how many examples the client holds.
        guarantee: what is proven about its releases.
        noise: sigma, scale or kappa of its releases; noise that is calibrated may differ between clients. None without
            a mechanism.
    """

    client: int
    examples: int
    guarantee: Guarantee
    noise: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the line as plain values, the guarantee's fields with the client's."""
        own = {"client": int(self.client), "examples": int(self.examples), "noise": self.noise}
        return {**own, **_plain(self.guarantee)}


@dataclass(frozen=True)
class Ledger:
    """All lines of a run, worst client first; build it with :meth:`of`.

    Attributes:
        unit: what is protected: example or update.
        mechanism: none, gaussian or vmf.
        parameters: the mechanism's public parameters, plain values.
        entries: at least one, worst first.
    """

    unit: str
    mechanism: str
    parameters: dict[str, Any]
    entries: tuple[LedgerEntry, ...]

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("a ledger needs at least one client")

    @classmethod
    def of(cls, unit: str, mechanism: str, parameters: Mapping[str, Any], entries: Iterable[LedgerEntry]) -> Self:
        """Return the ledger with its lines sorted, worst first.

        Worst is: no finite epsilon, then the largest epsilon, the largest pure epsilon, the most participations, and
        the lowest client number.

        Raises:
            ValueError: no entries.
        """
        return cls(unit, mechanism, dict(parameters), tuple(sorted(entries, key=_badness)))

    @property
    def worst(self) -> LedgerEntry:
        """The line whose figures are the run's."""
        return self.entries[0]

    def to_json(self) -> dict[str, Any]:
        """Return the content of ledger.json: plain values, None where no figure is proven, floats unrounded."""
        return {
            "unit": self.unit,
            "mechanism": self.mechanism,
            "parameters": dict(self.parameters),
            "clients": [entry.to_json() for entry in self.entries],
            "worst": self.worst.to_json(),
        }


def _badness(entry: LedgerEntry) -> tuple[float, float, int, int]:
    proven = entry.guarantee
    return -_size(proven.epsilon), -_size(proven.pure_epsilon), -proven.participations, entry.client


def _size(figure: float | None) -> float:
    return math.inf if figure is None else figure


def _plain(guarantee: Guarantee) -> dict[str, Any]:
    return {**asdict(guarantee), "notes": list(guarantee.notes)}
