"""The events of a run, for a listener that shows them."""

from collections.abc import Sequence

from fedpriv.core.records import RoundRecord, Stop


class Progress:
    """The listener of a run: overrides what it shows."""

    def stage(self, title: str) -> None:
        """A stage begins, such as loading the data."""

    def round_finished(self, record: RoundRecord, rounds: int) -> None:
        """A round of ``rounds`` is over."""

    def clients_stopped(self, round_number: int, stops: Sequence[Stop], left: int) -> None:
        """Clients are no longer selected from this round on; ``left`` go on."""

    def attack_advanced(self, name: str, done: int, total: int, loss: float) -> None:
        """An attack did ``done`` of ``total`` iterations; ``loss`` is its best mean loss so far."""

    def advanced(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` parts of a piece of work are over; ``what``: the parts, such as images."""

    def warn(self, text: str) -> None:
        """Something the user should know."""


class Silent(Progress):
    """Shows nothing."""
