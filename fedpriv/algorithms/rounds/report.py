"""The accuracy of each client on its own test examples, in reports and tables of sweeps."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.core.figure import Interval
from fedpriv.core.finding import Column, Columns, Finding, RunView, Section
from fedpriv.core.numbers import count, percent
from fedpriv.core.records import ClientAccuracy, RoundRecord, last_evaluated
from fedpriv.core.registry import FINDINGS

if TYPE_CHECKING:
    from fedpriv.core.runs import RunFolder


_MEANING = "Clients", "Accuracy of each client on its own test examples: the median client, and the worst."


class ClientColumns(Columns):
    """What accuracy per client adds to the record of a trial."""

    client_median: float | None = Field(None, description="median accuracy of clients on their own test examples")
    client_worst: float | None = Field(None, description="accuracy of the worst client on its own test examples")


@FINDINGS.register
class ClientAccuracyFinding(Finding[RoundRecord]):
    """The last evaluated round of a run with federation.evaluate = "clients"."""

    name: ClassVar[str] = "client-accuracy"
    rank: ClassVar[int] = 5
    columns: ClassVar[type[Columns] | None] = ClientColumns

    @override
    def read(self, folder: "RunFolder") -> RoundRecord | None:
        last = last_evaluated(folder.rounds())
        return last if last is not None and _groups(last) else None

    @override
    def section(self, found: RoundRecord, view: RunView) -> Section:
        rows = [(who, *map(percent, _figures(group)), count(group.clients)) for who, group in _groups(found)]
        return Section("clients", "Accuracy of clients", {"rows": rows, "round": count(found.round)})

    @override
    def sentences(self, found: RoundRecord) -> tuple[str, ...]:
        return tuple(
            f"On their own test examples {count(group.clients)} {who} have accuracy {percent(group.median)} in the "
            f"median, {percent(group.low)} and {percent(group.high)} at 10 % and 90 %, {percent(group.worst)} at worst."
            for who, group in _groups(found)
        )

    @override
    def trial(self, found: RoundRecord) -> Mapping[str, Any]:
        group = found.client_accuracy
        return {} if group is None else {"client_median": group.median, "client_worst": group.worst}

    @override
    def table(self, trials: Sequence[ClientColumns], chosen: str) -> tuple[Column, ...]:
        columns = (
            _column("clients\nmedian", [trial.client_median for trial in trials], _MEANING),
            _column("clients\nworst", [trial.client_worst for trial in trials]),
        )
        return tuple(column for column in columns if any(column.texts))


def _column(heading: str, shares: Sequence[float | None], meaning: tuple[str, str] = ("", "")) -> Column:
    values = [None if share is None else Interval(share, None, None) for share in shares]
    return Column.of_shares(heading, heading.capitalize().replace("\n", ", "), values, meaning)


def _groups(record: RoundRecord) -> list[tuple[str, ClientAccuracy]]:
    groups = (("clients", record.client_accuracy), ("keys that take no part", record.other_accuracy))
    return [(who, group) for who, group in groups if group is not None]


def _figures(group: ClientAccuracy) -> tuple[float, ...]:
    return group.worst, group.low, group.median, group.high
