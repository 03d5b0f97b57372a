"""Membership inference for ``fedpriv audit DIR``, and the attack on membership that ``fedpriv compare`` plots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.table import Table
from typing_extensions import override

from fedpriv.attacks.commands import Audit
from fedpriv.core.cli.terminal import table_of
from fedpriv.core.names import Adjacency
from fedpriv.core.registry import OPTIONS
from fedpriv.core.verb import Options

if TYPE_CHECKING:
    from fedpriv.attacks.membership.report import Membership, MembershipAttack
    from fedpriv.core.progress import Progress
    from fedpriv.core.runs import RunFolder


@OPTIONS.register
@dataclass(frozen=True, eq=False)
class MembershipAudit(Audit["Membership"]):
    """Membership inference on a run's models."""

    name: ClassVar[str] = "membership"
    rank: ClassVar[int] = 10

    references: Annotated[
        int, typer.Option("--references", metavar="N", help="Reference models to train; an even number from 6.")
    ] = 32
    pairs: Annotated[
        int, typer.Option("--pairs", metavar="N", min=2, help="Members to distinguish from as many non-members.")
    ] = 1000

    @override
    def suits(self, run: "RunFolder") -> bool:
        return True

    @override
    def made(self, run: "RunFolder", progress: "Progress") -> "Membership":
        from fedpriv.attacks.membership.audit import audit_run

        return audit_run(run, self.references, self.pairs, progress)

    @override
    def table(self, found: "Membership") -> Table:
        return _table(found.attacks)

    @override
    def facts(self, found: "Membership") -> list[tuple[str, str]]:
        return [("Epsilon", _bound(found))]


@OPTIONS.register
@dataclass(frozen=True, eq=False)
class PlottedMembership(Options):
    """The attack on membership that a comparison plots."""

    name: ClassVar[str] = "plotted-membership"
    verb: ClassVar[str] = "compare"

    membership: Annotated[
        str, typer.Option("--membership", metavar="NAME", help="Membership attack to plot; default: the strongest.")
    ] = ""


def _table(attacks: "Sequence[MembershipAttack]") -> Table:
    """One row for each attack, with the 95 % interval of the AUC, in 80 columns."""
    rows = []
    for attack in attacks:
        low, high = attack.intervals["auc"]
        rates = (attack.tpr_at_1_percent, attack.tpr_at_01_percent, attack.advantage)
        rows.append((attack.attack, f"{attack.auc:.3f} ({low:.3f}-{high:.3f})", *(f"{rate:.4f}" for rate in rates)))
    return table_of(("attack", "AUC", "TPR at FPR 1 %", "at 0.1 %", "advantage"), rows)


def _bound(membership: "Membership") -> str:
    bound, proven = membership.epsilon_bound, membership.proven_epsilon
    text = (
        f"at least {bound.epsilon:.3g} at delta = {bound.delta:g} with confidence "
        f"{bound.confidence:g} (replace-one; {bound.trials} pairs as canaries in one run)"
    )
    if proven is not None:
        return f"{text}; proven: at most {proven:.4g}."
    proven_about = Adjacency.of(membership.proven_adjacency or "")
    if proven_about is None or not proven_about.replaces:
        return f"{text}; the ledger's figure is for another adjacency and not compared."
    return f"{text}; nothing is proven."
