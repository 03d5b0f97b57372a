"""The events of a run, for a listener that displays them."""

from collections.abc import Sequence

from fedpriv.core.records import RoundRecord, Stop


class Progress:
    """The listener of a run; override the methods of the events that you display."""

    def stage(self, title: str) -> None:
        """A stage begins, such as loading the data."""

    def round_finished(self, record: RoundRecord, rounds: int) -> None:
        """One of ``rounds`` rounds is finished."""

    def clients_stopped(self, round_number: int, stops: Sequence[Stop], left: int) -> None:
        """Clients are no longer selected from this round on; ``left`` go on."""

    def attack_advanced(self, name: str, done: int, total: int, loss: float) -> None:
        """An attack did ``done`` of ``total`` iterations; ``loss`` is its best mean loss so far."""

    def advanced(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` parts are finished; ``what`` names the parts, such as images."""

    def warn(self, text: str) -> None:
        """A warning to the user."""


class Silent(Progress):
    """Shows nothing."""
