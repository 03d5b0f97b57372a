"""What uploads say of clients as a whole, for ``fedpriv audit DIR --sites N``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from typing_extensions import override

from fedpriv.attacks.commands import Audit
from fedpriv.core.cli.terminal import print_sentences
from fedpriv.core.numbers import percent
from fedpriv.core.registry import OPTIONS

if TYPE_CHECKING:
    from fedpriv.core.figure import Figure
    from fedpriv.core.progress import Progress
    from fedpriv.core.runs import RunFolder
    from fedpriv.sites.records import SiteGame, Sites


@OPTIONS.register
@dataclass(frozen=True, eq=False)
class SitesAudit(Audit["Sites"]):
    """What uploads say of clients as a whole."""

    name: ClassVar[str] = "sites"
    rank: ClassVar[int] = 35

    sites: Annotated[
        int,
        typer.Option(
            "--sites",
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

    @override
    def show(self, found: "Sites") -> None:
        print_sentences([sentence(game) for game in found.games])

    @override
    def figures(self, found: "Sites") -> "tuple[Figure, ...]":
        return found.measured


def sentence(game: "SiteGame") -> str:
    """One game in a sentence."""
    proven = "nothing is proven" if game.ceiling is None else f"proven: at most {percent(game.ceiling)}"
    figure = game.figure
    return (
        f"{figure.what[0].upper()}{figure.what[1:]}: {percent(figure.measured.value)} right "
        f"({game.right} of {game.trials}); a guess {percent(game.guess)}; {proven} ({game.theorem})."
    )
