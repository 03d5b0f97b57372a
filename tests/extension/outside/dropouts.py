"""Dropouts: how many uploads a run asked for and did not use."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from fedpriv.core.figure import Interval
from fedpriv.core.finding import Column, Columns, Finding, RunView, Section
from fedpriv.core.runs import RunFolder


class DropoutColumns(Columns):
    """What a sweep keeps of each trial."""

    dropouts: int | None = Field(None, description="uploads that were asked for and not used")


class Dropouts(Finding[int]):
    """Uploads that were asked for and not used, over all rounds."""

    name: ClassVar[str] = "dropouts"
    rank: ClassVar[int] = 90
    columns: ClassVar[type[Columns] | None] = DropoutColumns

    def read(self, folder: RunFolder) -> int | None:
        """Count them; ``None``: no round has ended."""
        rounds = folder.rounds()
        return sum(len(record.clients) - len(record.used) for record in rounds) if rounds else None

    def section(self, found: int, view: RunView) -> Section:
        """Its section in the report, laid out by report.html beside this file."""
        return Section("dropouts", "Dropouts", {"dropouts": found})

    def sentences(self, found: int) -> tuple[str, ...]:
        """What the verdict on the terminal and in the report says."""
        return (f"{found} uploads that were asked for were not used.",)

    def trial(self, found: int) -> Mapping[str, Any]:
        """Its cell in the table of a sweep."""
        return {"dropouts": found}

    def table(self, trials: Sequence[DropoutColumns], chosen: str) -> tuple[Column, ...]:
        """Its column when trials are listed or compared."""
        counts = [trial.dropouts for trial in trials]
        values = tuple(None if count is None else Interval(count, None, None) for count in counts)
        return (Column("dropouts", "Dropouts", "figure", values, tuple("" if n is None else str(n) for n in counts)),)
