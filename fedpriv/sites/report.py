"""What uploads say of clients as a whole, in reports."""

from typing import ClassVar

from typing_extensions import override

from fedpriv.core.figure import Figure
from fedpriv.core.finding import RecordFinding, RunView, Section
from fedpriv.core.numbers import count, percent
from fedpriv.core.registry import FINDINGS
from fedpriv.sites.records import SiteGame, Sites


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
