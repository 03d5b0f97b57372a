"""A table of your own: the CSV or Parquet file that ``data.path`` names, and what ``data.table`` says of its columns.

What is told of a column is public. What is not told is read off the rows: whether it holds numbers, and the values of a
category. Bounds of numbers are told, and never read off the rows: but a private estimate of them is at hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays, Keys, checked
from fedpriv.data.source import Place, Source, home

if TYPE_CHECKING:
    from fedpriv.core.randomness import Secret
    from fedpriv.data.schema import Schema
    from fedpriv.data.tables import Cells


@DATASETS.register
class OwnTable(Source):
    """A file with a header, one row an example."""

    name = "csv"
    title = "own table"
    mean = (0.0,)
    std = (1.0,)
    needs_path = True
    needs_table = True
    reads = ("key",)

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        from fedpriv.data.tables import encode, label_numbers

        schema = _schema(place)
        schema.check()
        columns, classes = schema.columns(), schema.classes
        labels = [label_numbers(each, schema.table.label, classes) for each in schema.parts]
        rows = [encode(each, columns)[:, None] for each in schema.parts]
        told = schema.notes(), schema.warnings()
        keys = Keys.of(*(_owners(each, place.key) for each in schema.parts)) if place.key else None
        arrays = Arrays(rows[0], labels[0], rows[1], labels[1], classes, columns, *told, keys=keys)
        return checked(arrays, place.path), place.path

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...]:
        tests = (place.table.test_path,) if place.table and place.table.test_path else ()
        return tuple(map(home, (place.path, *tests)))

    @classmethod
    @override
    def status(cls, place: Place) -> None:
        return None


def _schema(place: Place) -> "Schema":
    """What the columns of the training and the test rows are."""
    from fedpriv.data.own import split_rows
    from fedpriv.data.schema import Schema
    from fedpriv.data.tables import read_cells, rows_of

    table = place.table
    if table is None:
        raise InputError("a table of your own is wanted: data.name = 'csv', with data.table")
    cells = read_cells(home(place.path), table.delimiter, table.empty, place.memory)
    if table.test_path:
        test = read_cells(home(table.test_path), table.delimiter, table.empty, place.memory)
        return Schema(cells, test, table, place.key)
    owners = _owners(cells, place.key) if place.key and place.key in cells.names else None
    parts = split_rows(owners, len(cells), table.test_share, cells.where, "data.table.test_share")
    train, test = (rows_of(cells, rows) for rows in parts)
    return Schema(train, test, table, place.key)


def _owners(cells: "Cells", key: str) -> list[str]:
    """Whose each row is."""
    owners: list[str | None] = cells.column(key).to_pylist()
    if None in owners:
        raise cells.refused(owners.index(None), key, "the cell is empty, and data.key says whose a row is by it")
    return [owner or "" for owner in owners]


@dataclass(frozen=True)
class PrivateBounds:
    """An estimate of the low and high that nobody has told."""

    low_high: Mapping[str, tuple[float, float]]  # of columns, by name
    left_out: Mapping[str, str]  # why other columns have none
    section: str  # [data.table] with them and with all else that lacks


def private_bounds(place: Place, epsilon: float, secret: "Secret", before: float = 0.0) -> PrivateBounds:
    """Estimate low and high of the numbers for which nobody has told them, epsilon-DP for replacing a training row.

    ``before`` is the epsilon of estimates that are among those told.
    """
    from fedpriv.data.bounds import estimated_bounds

    schema = _schema(place)
    advice = schema.advice()
    numbers = schema.open_numbers(advice)
    if not numbers:
        raise InputError(f"{schema.train.where}: every column of numbers has its low and high told already")
    bounds = estimated_bounds(numbers, epsilon, secret)
    section = schema.section(advice, bounds, bounds_epsilon=before + epsilon)
    return PrivateBounds(bounds, schema.left_out(advice), section)
