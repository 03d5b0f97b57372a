"""What a language model remembers of its texts, for ``fedpriv audit DIR``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.table import Table
from typing_extensions import override

from fedpriv.attacks.commands import Audit
from fedpriv.core.cli.terminal import table_of
from fedpriv.core.registry import OPTIONS

if TYPE_CHECKING:
    from fedpriv.attacks.memorisation.report import Memorisation
    from fedpriv.core.progress import Progress
    from fedpriv.core.runs import RunFolder


@OPTIONS.register
@dataclass(frozen=True, eq=False)
class MemorisationAudit(Audit["Memorisation"]):
    """What a language model remembers."""

    name: ClassVar[str] = "memorisation"
    rank: ClassVar[int] = 20

    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=10, help="Language models: texts that the model writes.")
    ] = 200
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens", metavar="N", help="Language models: tokens in a row that count as memorised, not as chance."
        ),
    ] = 16

    @override
    def suits(self, run: "RunFolder") -> bool:
        return run.experiment().data.is_text

    @override
    def made(self, run: "RunFolder", progress: "Progress") -> "Memorisation":
        from fedpriv.attacks.memorisation.audit import audit_memorisation

        return audit_memorisation(run, self.samples, self.tokens, progress)

    @override
    def table(self, found: "Memorisation") -> Table | None:
        return _exposures(found) if found.groups else None

    @override
    def facts(self, found: "Memorisation") -> list[tuple[str, str]]:
        from fedpriv.attacks.memorisation.report import ranking

        of_texts = super().facts(found)
        if not found.groups:
            return [*of_texts]
        exposure = f"log2 of the number of secrets over the rank, at most {found.bits:.1f}. {ranking(found)}"
        return [("Exposure", exposure), ("Proven of the exposure", found.theorem), *of_texts]


def _exposures(found: "Memorisation") -> Table:
    """One row for each number of copies: guess, measured, proven; in 80 columns."""
    rows = []
    for group in found.groups:
        ceiling = "nothing" if group.ceiling is None else f"{group.ceiling:.2f}"
        first = "unknown" if group.first is None else f"{group.first} of {group.canaries}"
        figures = (f"{found.guess:.2f}", f"{group.exposure:.2f}", ceiling, first, f"{group.written}")
        rows.append((str(group.copies), str(group.canaries), *figures))
    heads = ("copies", "canaries", "guess", "exposure, bits", "proven: at most", "first rank", "written")
    return table_of(heads, rows, words=0)
