"""What all commands share: where they print, and the options that mean the same everywhere."""

import atexit
import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

import click
import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from fedpriv.core.errors import InputError
from fedpriv.core.files import is_empty, writing_to
from fedpriv.core.names import NOTHING_PROVEN

if TYPE_CHECKING:  # every command loads this module, and records take a third of a second
    from fedpriv.core.progress import Progress
    from fedpriv.core.records import Summary

# What is printed quotes what was given: ":b:" in it is no picture.
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)

File = Annotated[Path, typer.Argument(metavar="FILE", help="An experiment file, such as configs/quickstart.toml.")]
Run = Annotated[Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="The folder of a run.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; may be given several times.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run; default: runs/NAME-TIME.")]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume", metavar="DIR", exists=True, file_okay=False, help="Finish an interrupted run in this folder."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and the result only.")]


class FolderByDefault(TyperGroup):
    """``fedpriv attack runs/x`` means ``fedpriv attack DIR runs/x``: what is no command is the folder of a run."""

    folder: ClassVar[str] = "DIR"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the command in front of a folder."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.folder, *args]
        return super().parse_args(ctx, args)


def shown(silent: bool) -> "AbstractContextManager[Progress]":
    """Return the display of a run on standard error; ``silent``: of its warnings only."""
    from fedpriv.core.cli.display import Display, Warnings

    return nullcontext(Warnings()) if silent else Display(err)


def default_folder(name: str) -> Path:
    """Make the folder of a run for which no other is given: runs/NAME-TIME, with a number where that is there already.

    It is made at once, since another run may begin in the same second. It goes with the command if it stayed empty.
    """
    first = Path("runs") / f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    command = click.get_current_context(silent=True)
    at_end = atexit.register if command is None else command.call_on_close  # in a notebook there is no command
    with writing_to(first.parent):
        for number in count(1):
            path = first if number == 1 else Path(f"{first}-{number}")
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                at_end(partial(_remove_empty, path.absolute()))
                return path
    raise AssertionError  # numbers do not end


def _remove_empty(path: Path) -> None:
    for folder in (path, path.parent):
        if folder.is_dir() and is_empty(folder):
            folder.rmdir()


def folders_here(*marks: str) -> list[Path]:
    """Return the folders in runs/ and sweeps/ that hold one of these files, the newest last."""
    found = [path for mark in marks for path in (*Path("runs").glob(f"*/{mark}"), *Path("sweeps").glob(f"*/{mark}"))]
    return [path.parent for path in sorted(found, key=lambda path: (path.stat().st_mtime, path))]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


S = TypeVar("S", bound=_Named)


def begun_or_resumed(
    needed: str,
    load: Callable[[Path, Sequence[str]], S],
    file: Path | None,
    resume: Path | None,
    overrides: Sequence[str] | None,
    out_dir: Path | None,
) -> tuple[S | None, Path]:
    """Return the settings of the run that begins, ``None`` if an earlier one is resumed, and the folder of the run."""
    if file is not None and resume is None:
        settings = load(file, overrides or ())
        return settings, out_dir or default_folder(settings.name)
    if file is not None or resume is None:
        raise InputError(needed)
    if overrides or out_dir:
        raise InputError("--resume takes the settings of the run as they are: leave out --set and --out")
    return None, resume


def command_of(verb: str, file: Path | None, overrides: Sequence[str] | None) -> str:
    """Return the command line that runs an experiment file with these overrides."""
    words = [word for text in overrides or () for word in ("--set", text)]
    return shlex.join(["fedpriv", *verb.split(), str(file), *words])


def plain(value: Any) -> str:
    """Return a setting's value as it is written in an experiment file."""
    return "unset" if value is None else json.dumps(value)


def print_json(value: object) -> None:
    """Print a value as JSON; NaN and infinity are refused."""
    out.print(json.dumps(value, indent=2, allow_nan=False), markup=False, soft_wrap=True)


def print_attack(name: str, title: str, lines: Sequence[str | Text]) -> None:
    """Print what an attack is: its name and title, and below them what is to be said about it."""
    out.print(Text(f"{name}  {title}", style="bold"))
    for line in lines:
        out.print(Padding(Text(line) if isinstance(line, str) else line, (0, 0, 0, 4)))


def table_of(headings: Iterable[str], rows: Iterable[Iterable[str]], words: int = 1) -> Table:
    """Return a table without lines whose first columns, as many as ``words``, are words, and the others figures."""
    table = Table(box=None, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < words else "right")
    for row in rows:
        table.add_row(*row)
    return table


def print_line(text: str) -> None:
    """Print a line that a program may read: it is never wrapped."""
    out.print(text, markup=False, soft_wrap=True)


def print_warning(text: str) -> None:
    """Print a warning on standard error, in one line."""
    err.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)


def print_sentences(sentences: Sequence[str]) -> None:
    """Print sentences for people, wrapped on a terminal and whole elsewhere."""
    for sentence in sentences:
        style = "bold red" if sentence.startswith(NOTHING_PROVEN) else None
        out.print(sentence, style=style, markup=False, soft_wrap=not out.is_terminal)


def print_note(text: str) -> None:
    """Print what explains a table, wrapped on a terminal and whole elsewhere."""
    out.print(text, style="dim", markup=False, soft_wrap=not out.is_terminal)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print what a report lists, terms with their text."""
    print_sentences([f"{term}: {text}" for term, text in facts])


def print_summary(summary: "Summary", folder: Path, as_json: bool) -> None:
    """Print what a run showed, and where its report is; or all of it as JSON."""
    if as_json:
        print_json({**summary.to_json(), "folder": str(folder)})
        return
    print_sentences(summary.verdict)
    print_line(f"Report: {folder / 'report.html'}")
