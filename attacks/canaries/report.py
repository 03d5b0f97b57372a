"""What one run with canaries shows of epsilon, in reports."""

from typing import ClassVar

from typing_extensions import override

from fedpriv.attacks.canaries.records import CanaryAudit
from fedpriv.core.figure import Figure
from fedpriv.core.finding import RecordFinding, RunView, Section
from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.registry import FINDINGS


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
            ("Based on", f"{count(bound.trials)} canaries of {count(found.clients)} clients, {bound.method}"),
        ]

    @override
    def section(self, found: CanaryAudit, view: RunView) -> Section:
        return Section("canaries", "Canaries", {"found": found, "facts_of": self.facts(found)})
