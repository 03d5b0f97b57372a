"""What uploads say of clients as a whole, for ``fedpriv audit DIR --sites N``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from typing_extensions import override

from fedpriv.attacks.commands import Audit
from fedpriv.core.registry import OPTIONS

if TYPE_CHECKING:
    from fedpriv.core.progress import Progress
    from fedpriv.core.runs import RunFolder
    from fedpriv.sites.report import Sites


@OPTIONS.register
@dataclass(frozen=True, eq=False)
class SitesAudit(Audit["Sites"]):
    """What uploads say of clients as a whole."""

    name: ClassVar[str] = "sites"
    rank: ClassVar[int] = 35

    sites: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Instead: tell from N uploads of each client, half of them with a known sender, which client sent the "
            "others, and which classes and attributes its data have much of.",
        ),
    ] = 0

    @override
    def suits(self, run: "RunFolder") -> bool:
        return self.sites != 0

    @override
    def made(self, run: "RunFolder", progress: "Progress") -> "Sites":
        from fedpriv.sites.audit import audit_sites

        return audit_sites(run, self.sites, progress)
