"""sites.json: what uploads say of their clients as a whole; and its part of reports."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from fedpriv.core.figure import Figure, Interval
from fedpriv.core.finding import RecordFinding, RunView, Section
from fedpriv.core.numbers import count, percent
from fedpriv.core.reading import FileRecord, Record
from fedpriv.core.registry import FINDINGS


@dataclass(frozen=True)
class SiteGame(Record):
    """One question about clients, and how often it was answered correctly."""

    what: str  # is asked, in words
    uploads: int  # of a client, from which one answer is made
    right: int  # answers that are correct
    trials: int  # answers
    guess: float  # the share of correct answers of somebody who saw no upload
    low: float | None  # lower end of the interval of the share, with whole clients drawn; `None`: of a single client
    high: float | None  # upper end
    ceiling: float | None  # no attack answers correctly more often; `None`: nothing is proven
    theorem: str  # what the ceiling rests on, or why there is none

    @property
    def figure(self) -> Figure:
        """The same as a figure."""
        many = f"{self.uploads} uploads" if self.uploads > 1 else "one upload"
        measured = Interval(self.right / self.trials, self.low, self.high)
        return Figure(f"{self.what}, from {many}", measured, self.guess, None, self.ceiling, self.theorem)


class Sites(FileRecord):
    """sites.json."""

    path: ClassVar[str] = "sites.json"

    clients: int  # whose uploads were compared
    known: int  # uploads of each client whose sender the adversary knows
    games: tuple[SiteGame, ...] = ()

    @property
    def measured(self) -> tuple[Figure, ...]:
        """The games as figures."""
        return tuple(game.figure for game in self.games)


@FINDINGS.register
class SitesFinding(RecordFinding[Sites]):
    """What uploads say of clients as a whole."""

    name: ClassVar[str] = "sites"
    rank: ClassVar[int] = 35
    record: ClassVar[type[Sites]] = Sites

    @override
    def figures(self, found: Sites) -> tuple[Figure, ...]:
        return found.measured

    @override
    def section(self, found: Sites, view: RunView) -> Section:
        return Section("sites", "Sites", {"found": found, "rows": [_row(game) for game in found.games]})


def _row(game: SiteGame) -> tuple[str, ...]:
    return (
        game.what,
        count(game.uploads),
        percent(game.guess),
        f"{percent(game.right / game.trials)} ({count(game.right)} of {count(game.trials)})",
        "nothing" if game.ceiling is None else f"at most {percent(game.ceiling)}",
        game.theorem,
    )
