"""What all commands share: where they print, and the options that mean the same everywhere."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["File", "Json", "Quiet", "Set", "err", "out", "print_json", "print_line", "print_sentences"]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

File = Annotated[Path, typer.Argument(metavar="FILE", help="An experiment file, such as configs/quickstart.toml.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; may be given several times.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]


def print_json(value: object) -> None:
    """Print a value as JSON; NaN and infinity are refused."""
    out.print(json.dumps(value, indent=2, allow_nan=False), markup=False, soft_wrap=True)


def print_line(text: str) -> None:
    """Print a line that a program may read: it is never wrapped."""
    out.print(text, markup=False, soft_wrap=True)


def print_sentences(sentences: Sequence[str]) -> None:
    """Print sentences for people, wrapped on a terminal and whole elsewhere."""
    for sentence in sentences:
        out.print(sentence, markup=False, soft_wrap=not out.is_terminal)
