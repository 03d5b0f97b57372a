"""The command ``fedpriv flower audit APP``: what leaves the clients of a Flower app, and what is proven about it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from fedpriv.core.cli.terminal import (
    Json,
    Out,
    Quiet,
    Set,
    default_folder,
    out,
    print_json,
    print_line,
    print_sentences,
    shown,
)
from fedpriv.core.numbers import several
from fedpriv.core.verb import Verb

if TYPE_CHECKING:
    from fedpriv.flower.audit.records import Audit, Claim

flower_app = typer.Typer(help="Audit a Flower app: what leaves its clients, and what is proven.", no_args_is_help=True)


def audit(
    app: Annotated[Path, typer.Argument(metavar="APP", help="The folder of a Flower app, with its pyproject.toml.")],
    clients: Annotated[
        int | None, typer.Option(min=1, help="Simulated clients; default: as pyproject.toml says, or 10.")
    ] = None,
    run_config: Annotated[
        str, typer.Option(metavar="TEXT", help="As for flwr run, such as 'num-server-rounds=2'.")
    ] = "",
    attack: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="An attack to run; may be given several times; default: depends on the app."),
    ] = None,
    set_: Set = None,
    out_dir: Out = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a copy of a Flower app in simulation, list what leaves its clients, attack it, and check what is claimed.

    Mods, strategies and Opacus engines are observed while they run. No file of the app is touched.
    """
    from fedpriv.flower.audit.audit import audit_app, write_audit_report
    from fedpriv.flower.audit.simulation import app_name, clients_of

    name = app_name(app)
    folder = (out_dir or default_folder(f"audit-{name}")).absolute()
    with shown(quiet or as_json) as progress:
        found = audit_app(app, folder, clients or clients_of(app), run_config, (attack or (), set_ or ()), progress)
    path = write_audit_report(folder)
    if as_json:
        print_json({**asdict(found), "folder": str(folder)})
        return
    _print(found)
    print_line(f"Report: {path}")


def _print(found: "Audit") -> None:
    """What leaves, what is claimed, and what attacks found."""
    print_line(
        f"{found.app}: {several(found.clients, 'client')}, {several(found.rounds, 'round')}, "
        f"{several(found.messages, 'answer')}; strategy "
        f"{' around '.join(found.strategies) or 'of its own'}; mods {', '.join(found.mods) or 'none'}"
    )
    out.print()
    _table(
        ("leaves", "in", "what it is", "verdict", "why"),
        [(each.name, each.type, each.kind, each.verdict, each.why) for each in found.leaving],
    )
    out.print()
    if found.claims:
        _table(
            ("software", "says", "proven over the run"),
            [(each.what, each.says, _proven(each)) for each in found.claims],
        )
        out.print()
        for each in found.claims:
            print_sentences([f"{each.what}, against {each.against}; {each.adjacency}."])
            print_sentences([f"    {text}." for text in each.remarks])
    else:
        print_line("Nothing is claimed, and nothing is proven: no mod, strategy or engine of the app adds noise.")
    print_sentences(found.attacks)


def _proven(claim: "Claim") -> str:
    return f"{claim.proves}: less than it says" if claim.falls_short else claim.proves


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading == headings[0])
    for row in rows:
        table.add_row(*map(Text, row))
    out.print(table)


VERBS = (
    Verb("flower", flower_app, place=60),
    Verb(
        "audit",
        audit,
        place=10,
        epilog="Examples:\n\n  fedpriv flower audit .\n\n  fedpriv flower audit my-app --clients 4 --run-config "
        "'num-server-rounds=2'",
        group="flower",
    ),
)
