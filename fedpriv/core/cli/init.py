"""``fedpriv init``: write a bundled example into a folder of its own."""

import re
import shlex
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from textwrap import dedent, indent
from typing import Annotated

import typer
from rich.table import Table

from fedpriv.core.cli.terminal import out, print_line
from fedpriv.core.config.file import FileKind, kind_of_file, read_toml
from fedpriv.core.errors import InputError
from fedpriv.core.files import is_empty, write_whole, writing_to
from fedpriv.core.registry import suggestion


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The example.")] = "quickstart",
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for its files; default: NAME.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the examples and write nothing.")] = False,
) -> None:
    """Write a bundled example, with a README, into a folder."""
    examples = bundled_examples()
    if listed:
        out.print(_table(examples))
        return
    if name not in examples:
        raise InputError(f"there is no example {name!r}{suggestion(name, tuple(examples))}")
    folder = out_dir or Path(name)
    if folder.exists() and not is_empty(folder):
        raise InputError(f"{folder} exists and is not empty; name another folder with --out")
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        text = _alone(examples[name].read_text(encoding="utf-8"))
        write_whole(folder / f"{name}.toml", text.encode())
        schema = next((known.name for known in _home().glob("*.schema.json") if f"#:schema {known.name}" in text), None)
        if schema is not None:
            write_whole(folder / schema, (_home() / schema).read_bytes())
        write_whole(folder / "README.md", _readme(name, examples[name]).encode())
    beside = f", {schema} (for editors that complete keys)" if schema is not None else ""
    print_line(f"{folder}: {name}.toml, README.md{beside}; begin with: cd {shlex.quote(str(folder))}")


def _home() -> Path:
    return Path(str(files("fedpriv") / "examples"))


def bundled_examples() -> dict[str, Path]:
    """All of them by name: experiments first, then sweeps."""
    home = _home()
    return {path.stem: path for path in (*sorted(home.glob("*.toml")), *sorted(home.glob("*/*.toml")))}


def _table(examples: dict[str, Path]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for known, path in examples.items():
        table.add_row(known, head_comment(path)[0])
    return table


def _alone(text: str) -> str:
    """The text of a bundled file with paths that fit a file next to its schema."""
    return re.sub(r"configs/(paper/|sweeps/)?", "", text)


def head_comment(path: Path) -> list[str]:
    """The comment at the head of an example, a paragraph or a block of commands an item."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = takewhile(lambda line: line.startswith("#"), lines)
    comment = [line[1:] for line in head if not line.startswith("#:schema")]
    blocks = _alone("\n".join(comment)).split("\n\n")
    return [indent(dedent(block), "    ") if block.startswith("   ") else " ".join(block.split()) for block in blocks]


def _readme(name: str, path: Path) -> str:
    kind = kind_of_file(read_toml(path)) or FileKind
    last = (
        f"`{kind.preview.format(f'{name}.toml')}` prints what it does. Results are written into `{kind.results}`; "
        "`fedpriv --help` lists all commands."
    )
    return "\n\n".join((f"# {name}", *head_comment(path), last)) + "\n"
