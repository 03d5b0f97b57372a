"""canaries.json: what one run with canaries shows of epsilon, and how reports show it."""

from typing import ClassVar

from typing_extensions import override

from fedpriv.core.figure import EpsilonBound, Figure, Interval
from fedpriv.core.finding import RecordFinding, RunView, Section
from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.reading import FileRecord
from fedpriv.core.registry import FINDINGS


class CanaryAudit(FileRecord):
    """canaries.json."""

    path: ClassVar[str] = "canaries.json"

    game: str = ""  # what a canary is, and what the adversary adds up
    clients: int  # that had canaries
    epsilon_bound: EpsilonBound
    # the same with a confidence at which a bound above what is proven is an error, and not chance
    surer_bound: EpsilonBound
    proven_epsilon: float | None  # the ledger's, of its worst client; `None`: nothing is proven
    adjacency: str | None  # the ledger's, which the canaries keep to

    @property
    def figure(self) -> Figure:
        """The bound between 0 and what the ledger claims."""
        bound, proven = self.epsilon_bound, self.proven_epsilon
        measured = Interval(bound.epsilon, bound.epsilon, None, bound.confidence)
        holds = proven is None or self.surer_bound.epsilon <= proven
        return Figure("ε", measured, 0.0, ceiling=proven, theorem=bound.method, unit="number", holds=holds)


@FINDINGS.register
class CanaryFinding(RecordFinding[CanaryAudit]):
    """What one run with canaries shows of epsilon."""

    name: ClassVar[str] = "canaries"
    rank: ClassVar[int] = 15
    record: ClassVar[type[CanaryAudit]] = CanaryAudit

    @override
    def figures(self, found: CanaryAudit) -> tuple[Figure, ...]:
        return (found.figure,)

    @override
    def facts(self, found: CanaryAudit) -> list[tuple[str, str]]:
        bound, surer, proven = found.epsilon_bound, found.surer_bound, found.proven_epsilon
        return [
            ("Measured", f"ε is at least {figure(bound.epsilon, 3)}, with {percent(bound.confidence, 0)} confidence"),
            ("More surely", f"ε is at least {figure(surer.epsilon, 3)}, with {percent(surer.confidence)} confidence"),
            ("Proven", "nothing" if proven is None else f"ε is at most {figure(proven)}"),
            ("Adjacency", found.adjacency or "none"),
            ("At δ", figure(bound.delta)),
            (
                "Based on",
                f"{count(bound.trials)} canaries of {count(found.clients)} clients (one after the other, until all "
                f"have a place, the least protected first), {bound.method}",
            ),
        ]

    @override
    def section(self, found: CanaryAudit, view: RunView) -> Section:
        return Section("canaries", "Canaries", {"found": found, "facts_of": self.facts(found)})
