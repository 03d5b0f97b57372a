"""Which sizes of perturbations a table shows: one statement a column, the same for all trials."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.sweep.record import EVERY, CertifiedFigures, EvasionFigures, TrialRecord


@dataclass(frozen=True)
class Size:
    """Of perturbations.

    Attributes:
        norm: l2 or linf.
        value: pixels from 0 to 1.
    """

    norm: str
    value: float

    def __str__(self) -> str:
        return f"{self.norm} {self.value:g}"


def certified_size(records: Sequence[TrialRecord]) -> Size | None:
    """The middle size, Euclidean if there is one, of the first trial that was certified; ``None``: there is none."""
    certified = next((record.certified for record in records if record.certified), ())
    norm = next((each.norm for each in certified), "")  # l2 comes first
    return _middle(norm, [each.size for each in certified if each.norm == norm])


def right_size(records: Sequence[TrialRecord]) -> Size | None:
    """The middle size of the first trial that was attacked; ``None``: there is none."""
    evasions = next((record.evasions for record in records if record.evasions), ())
    every = [each for each in evasions if each.attack == EVERY]
    return _middle(every[0].norm if every else "", [each.size for each in every])


def certified_at(record: TrialRecord, size: Size | None) -> CertifiedFigures | None:
    """What is proven in a trial about perturbations of this size; ``None``: it was not asked."""
    return next((each for each in record.certified if Size(each.norm, each.size) == size), None)


def right_at(record: TrialRecord, size: Size | None) -> EvasionFigures | None:
    """What every attack up to this size left right in a trial; ``None``: it was not attacked so."""
    every = (each for each in record.evasions if each.attack == EVERY)
    return next((each for each in every if Size(each.norm, each.size) == size), None)


def _middle(norm: str, sizes: Sequence[float]) -> Size | None:
    return Size(norm, sizes[len(sizes) // 2]) if sizes else None
