"""What attacks recover of single images behind each mechanism: the tables of docs/attacks-tables.md.

Usage: python -m studies.leakage [--json FILE] [--page FILE] [--pictures DIR] [--scale small|full]
           [--data cifar10,lfw] [--models lenet,mlp] [--networks untrained,trained] [--mechanisms none,vmf:1e5]
           [--attacks iga,map] [--again map] [--victims N] [--seed N] [--device cpu]

Each client uploads the gradient of one image, in the first round. FILE gets one JSON line a cell as soon as it is
measured, and a later call leaves out what is there: stop it at any time and start it again. What fails is written with
its reason, tried again by the next call, and stops nothing else. --page writes the tables into a Markdown file, between
its two marks; without anything to measure (--attacks "") that is all it does.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from fedpriv.core.errors import InputError
from fedpriv.core.records import parse_json
from studies.arguments import StudyParser, listed, whole
from studies.leakage_cells import (
    DATA,
    MODELS,
    NETWORKS,
    ROW,
    SCALES,
    Batch,
    Cell,
    Row,
    failed,
    measure,
    mechanism_of,
)
from studies.leakage_page import line, write_page
from studies.leakage_pictures import compose, save_strip

ATTACKS = tuple(SCALES["full"].settings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, one printed line a cell, and write tables and pictures."""
    with _parser().parsed(arguments) as options:
        _run(options)


def _run(options: argparse.Namespace) -> None:
    rows = read_rows(options.json) if options.json else {}
    if options.json:
        _cut_torn_line(options.json)
    save = partial(save_strip, options.pictures) if options.pictures else _no_picture
    for batch in _missing(options, rows):
        for row in _measured(batch, save):
            rows[row.cell] = row
            print(line(row), flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row.to_json(), allow_nan=False) + "\n")
    if options.pictures:
        compose(options.pictures, list(rows.values()))
    if options.page:
        write_page(options.page, list(rows.values()))


def read_rows(path: Path) -> dict[Cell, Row]:
    """Return the last measurement of each cell in a file of JSON lines; a torn last line is left out."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1].splitlines()
    rows = [parse_json(text, ROW, f"{path}, line {number}") for number, text in enumerate(whole, 1)]
    return {row.cell: row for row in rows}


def _cut_torn_line(path: Path) -> None:
    """Of a call that was killed while it wrote."""
    path.touch()  # what cannot be written is found out before anything is measured
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end == len(content):
        return
    if not content.startswith(b"{", end):
        raise InputError(f"{path}: its last line is none of ours")
    path.write_bytes(content[:end])


def _missing(options: argparse.Namespace, rows: dict[Cell, Row]) -> Iterable[Batch]:
    """The batches to attack, without the cells that are there; one network's attacks follow each other."""
    scale = SCALES[options.scale]
    for data, model, network in product(options.data, options.models, options.networks):
        for attack in options.attacks:
            if attack not in MODELS[model].attacks:
                continue
            batch = Batch(
                data,
                model,
                network,
                attack,
                scale.settings[attack],
                options.mechanisms or scale.mechanisms,
                options.victims or scale.victims,
                options.seed,
                options.device,
            )
            wanted = tuple(name for name in batch.mechanisms if _is_missing(batch.cell(name), rows, options.again))
            if wanted:
                yield batch.of(wanted)


def _is_missing(cell: Cell, rows: dict[Cell, Row], again: Sequence[str]) -> bool:
    return cell.attack in again or cell not in rows or rows[cell].result is None


def _measured(batch: Batch, save: Callable[..., None]) -> list[Row]:
    """The rows of a batch; where it fails as a whole, they say why."""
    try:
        return measure(batch, save)
    except (InputError, ArithmeticError, RuntimeError) as error:
        reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return [failed(batch.cell(name), " ".join(reason.split())) for name in batch.mechanisms]


def _no_picture(*_: object) -> None:
    """Pictures were not asked for."""


def _parser() -> StudyParser:
    parser = StudyParser("leakage", __doc__)
    parser.add_argument("--json", type=Path, help="of lines; read, then added to")
    parser.add_argument("--page", type=Path, help="Markdown file with the two marks")
    parser.add_argument("--pictures", type=Path, help="folder for pictures (none of faces)")
    parser.add_argument("--scale", choices=list(SCALES), default="small")
    parser.add_argument("--data", type=listed(DATA), default=("fashion-mnist", "cifar10", "lfw"))
    parser.add_argument("--models", type=listed(tuple(MODELS)), default=("lenet", "mlp"))
    parser.add_argument("--networks", type=listed(NETWORKS), default=("untrained",))
    parser.add_argument("--mechanisms", type=_mechanisms, default=(), help="default: the scale's")
    parser.add_argument("--attacks", type=listed(ATTACKS, 0), default=ATTACKS)
    parser.add_argument("--again", type=listed(ATTACKS, 0), default=(), help="attacks to measure anew")
    parser.add_argument("--victims", type=whole(2), help="default: the scale's")  # intervals need two
    parser.add_argument("--seed", type=whole(0), default=1)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    return parser


def _mechanisms(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    try:
        for name in names:
            mechanism_of(name)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


if __name__ == "__main__":
    main()
