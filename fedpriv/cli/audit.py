"""The command ``fedpriv audit DIR``."""

from contextlib import nullcontext
from typing import Annotated, Any

import typer
from rich.table import Table

from fedpriv.cli.terminal import Json, Quiet, Run, err, out, print_json, print_line

__all__ = ["audit"]


def audit(
    folder: Run,
    references: Annotated[
        int, typer.Option("--references", metavar="N", help="Reference models to train; an even number from 6.")
    ] = 32,
    pairs: Annotated[
        int, typer.Option("--pairs", metavar="N", min=2, help="Members, and as many non-members, to tell apart.")
    ] = 1000,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Tell members of the training data in DIR from non-members; trains reference models like the run's."""
    from fedpriv.cli.display import Display
    from fedpriv.lab.audit import audit_run
    from fedpriv.progress import Silent
    from fedpriv.report import reported
    from fedpriv.runs import RunFolder

    run = RunFolder.open(folder)
    with nullcontext(Silent()) if quiet or as_json else Display(err) as progress, reported(folder):
        found = audit_run(run, references, pairs, progress)
    if as_json:
        print_json({**found, "folder": str(folder)})
        return
    out.print(_table(found["attacks"]))
    print_line(_sentence(found))
    print_line(f"Report: {folder / 'report.html'}")


def _table(attacks: list[dict[str, Any]]) -> Table:
    """One row for each attack, with 95 % intervals, in 80 columns."""
    table = Table(box=None, pad_edge=False)
    for heading in ("attack", "AUC", "TPR at FPR 1 %", "at 0.1 %", "advantage"):
        table.add_column(heading, justify="left" if heading == "attack" else "right")
    keys = ("auc", "tpr_at_1_percent", "tpr_at_01_percent", "advantage")
    for row in attacks:
        cells = [f"{row[key]:.3f} ({row['intervals'][key][0]:.3f}-{row['intervals'][key][1]:.3f})" for key in keys[:1]]
        cells += [f"{row[key]:.4f}" for key in keys[1:]]
        table.add_row(row["attack"], *cells)
    return table


def _sentence(found: dict[str, Any]) -> str:
    bound, proven = found["epsilon_bound"], found["proven_epsilon"]
    text = (
        f"Epsilon is at least {bound['epsilon']:.3g} at delta = {bound['delta']:g} with confidence "
        f"{bound['confidence']:g} (replace-one; {bound['trials']} canaries in one run)"
    )
    if proven is not None:
        return f"{text}; proven: at most {proven:.4g}."
    if found["proven_adjacency"] is None or not found["proven_adjacency"].startswith("replace"):
        return f"{text}; the ledger's figure is for another adjacency and not compared."
    return f"{text}; nothing is proven."
