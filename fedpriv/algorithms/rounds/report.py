"""The accuracy of each client on its own test examples, in reports."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.core.finding import Finding, RunView, Section
from fedpriv.core.numbers import count, percent
from fedpriv.core.records import ClientAccuracy, RoundRecord, last_evaluated
from fedpriv.core.registry import FINDINGS

if TYPE_CHECKING:
    from fedpriv.core.runs import RunFolder


@FINDINGS.register
class ClientAccuracyFinding(Finding[RoundRecord]):
    """The last evaluated round of a run with federation.evaluate = "clients"."""

    name: ClassVar[str] = "client-accuracy"
    rank: ClassVar[int] = 5

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


def _groups(record: RoundRecord) -> list[tuple[str, ClientAccuracy]]:
    groups = (("clients", record.client_accuracy), ("keys that take no part", record.other_accuracy))
    return [(who, group) for who, group in groups if group is not None]


def _figures(group: ClientAccuracy) -> tuple[float, ...]:
    return group.worst, group.low, group.median, group.high
