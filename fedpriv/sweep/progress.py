"""What a sweep tells while it runs; whoever shows it decides how."""

from collections.abc import Sequence

from fedpriv.sweep.record import TrialRecord
from fedpriv.sweep.settings import Trial


class SweepProgress:
    """The listener of a sweep: overrides what it shows."""

    def found(self, records: Sequence[TrialRecord]) -> None:
        """These trials were over before."""

    def started(self, trial: Trial) -> None:
        """A trial runs."""

    def ended(self, record: TrialRecord) -> None:
        """A trial is over."""

    def tick(self) -> None:
        """Time has passed."""
