"""An audit by canaries, for ``fedpriv audit DIR --canaries N``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from typing_extensions import override

from fedpriv.attacks.commands import Audit
from fedpriv.core.registry import OPTIONS

if TYPE_CHECKING:
    from fedpriv.attacks.canaries.report import CanaryAudit
    from fedpriv.core.progress import Progress
    from fedpriv.core.runs import RunFolder


@OPTIONS.register
@dataclass(frozen=True, eq=False)
class CanariesAudit(Audit["CanaryAudit"]):
    """A lower bound on epsilon from one run with canaries in place of gradients."""

    name: ClassVar[str] = "canaries"
    rank: ClassVar[int] = 30

    canaries: Annotated[
        int,
        typer.Option("--canaries", metavar="N", help="Audit the noise alone: N gradients made to be found."),
    ] = 0

    @override
    def suits(self, run: "RunFolder") -> bool:
        return self.canaries != 0

    @override
    def made(self, run: "RunFolder", progress: "Progress") -> "CanaryAudit":
        from fedpriv.attacks.canaries.audit import audit_canaries

        return audit_canaries(run, self.canaries, progress)
