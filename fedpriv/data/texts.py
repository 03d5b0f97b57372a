"""Texts and what stands beside them, from CSV files and JSON lines."""

import csv
import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedpriv.core.errors import InputError
from fedpriv.core.registry import suggestion
from fedpriv.data.source import home

SPLITS = ("train", "test")
"""Parts of a file with a column for them: training and test data, or private examples and questions."""

JSON_LINES = (".jsonl", ".ndjson")
"""What the names of files of JSON lines end with; all others are CSV files."""


class Columns(NamedTuple):
    """The columns, or keys, that are read of a file; empty: there is none.

    Attributes:
        text: of the texts.
        label: of their labels.
        key: that says whose each is.
        split: that says which part of the data set it belongs to; may be missing.
    """

    text: str
    label: str = ""
    key: str = ""
    split: str = "split"

    @property
    def needed(self) -> tuple[str, ...]:
        """Those that have to be there, and to hold something."""
        return tuple(column for column in self[:3] if column)


class Row(NamedTuple):
    """A text and what stands beside it; ``None``: there is no such column."""

    text: str
    label: str | None = None
    key: str | None = None
    split: str | None = None


def text_root(root: str) -> Path:
    """Return the folder of the data sets: ``root``, or $FEDPRIV_DATA, or ./data."""
    return home(root or os.environ.get("FEDPRIV_DATA") or "data")


def csv_wanted(columns: Columns, labels: Iterable[str], splits: Sequence[str] = ()) -> str:
    """Return what the file of a known data set has to be, for whoever lacks it."""
    values = {columns.label: tuple(labels), columns.split: splits}
    names = (*columns.needed, columns.split) if splits else columns.needed
    told = [f"{name} ({', '.join(values[name])})" if values.get(name) else name for name in names]
    return f"a gzipped CSV file with a header and the columns {', '.join(told)}"


def read_texts(path: Path, columns: Columns) -> list[Row]:
    """Read texts and what stands beside them; the file's name may end in .gz."""
    read = _json_lines if path.name.removesuffix(".gz").endswith(JSON_LINES) else _csv
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            rows = list(read(path, file, columns))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; fedpriv data lists the data sets") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        kind = "CSV" if read is _csv else "JSON lines"
        raise InputError(f"{path}: cannot be read as {kind} in UTF-8: {error}") from None
    if not rows:
        raise InputError(f"{path}: there is no text in it")
    return rows


def _csv(path: Path, file: IO[Any], columns: Columns) -> Iterator[Row]:
    reader = csv.DictReader(file, restval="", strict=True)
    header = list(reader.fieldnames or ())
    for column in columns.needed:
        if column not in header:
            raise _missing(path, column, header)
    for column in (*columns.needed, columns.split):
        if header.count(column) > 1:
            raise InputError(f"{path}: two columns have the name {column!r}")
    for row in reader:
        if None in row:  # where the reader puts what is behind the last column
            raise InputError(f"{path}, line {reader.line_num}: the row has more cells than there are columns")
        yield _row(path, reader.line_num, row, columns)


def _json_lines(path: Path, file: IO[Any], columns: Columns) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            given = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: not JSON that can be read: {error}") from None
        if not isinstance(given, dict):
            raise InputError(f'{path}, line {number}: a JSON object is wanted, such as {{"{columns.text}": ...}}')
        for column in columns.needed:
            if column not in given:
                raise _missing(f"{path}, line {number}", column, list(given))
        read = {
            column: _cell(f"{path}, line {number}: {column!r}", given[column]) for column in columns if column in given
        }
        yield _row(path, number, read, columns)


def _cell(where: str, value: object) -> str:
    """The text of a JSON value; labels may be numbers, or true and false."""
    if isinstance(value, list | dict) or value in (math.inf, -math.inf):
        kind = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "too large a number"
        raise InputError(f"{where} holds {kind}; wanted is a text or a number")
    text = "" if value is None else str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} holds half of a pair of characters (a lone surrogate), which is no text") from None
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _missing(where: object, column: str, header: Sequence[str]) -> InputError:
    known = suggestion(column, header) if header else "; there are none"
    return InputError(f"{where}: there is no column {column!r}{known}")


def _row(path: Path, line: int, row: Mapping[str, str], columns: Columns) -> Row:
    for column in columns.needed:
        if not row[column].strip():
            raise InputError(f"{path}, line {line}: the cell of {column!r} is empty")
    label, key = (row[column] if column else None for column in (columns.label, columns.key))
    return Row(row[columns.text], label, key, row.get(columns.split))


def check_splits(path: Path, rows: Sequence[Row]) -> None:
    """Refuse splits of one's own file that nobody would read."""
    given = any(row.split is not None for row in rows)
    for number, row in enumerate(rows, start=1):
        if given and row.split is None:
            raise InputError(f"{path}, row {number}: it has no split, and other rows have one")
        if row.split not in (None, *SPLITS):
            allowed = " and ".join(SPLITS)
            raise InputError(f"{path}, row {number}: split = {row.split!r} is not allowed; allowed: {allowed}")
