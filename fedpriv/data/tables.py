"""Read rows of CSV and Parquet files as texts, refuse both alike, and encode them as numbers from 0 to 1."""

import csv as lines
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv, parquet

from fedpriv.core.columns import MISSING, OTHER, ColumnSpec, features_of, slices
from fedpriv.core.errors import InputError, cut, one_line, some_of
from fedpriv.data.files import check_memory
from fedpriv.data.source import PARQUET

# What is made of the bytes of a cell's text: features, of a category one a value.
_MADE_OF_A_BYTE = 8
_SHOWN = 300  # characters of what Arrow says, which quotes rows
_START = 1 << 16  # bytes that tell what a file is


MISSING_NUMBERS = ("", "NA", "N/A", "NaN", "nan", "NULL", "?", ".")
"""Texts that mean that a cell is empty, where nobody says: the first one in all columns, all in those of numbers."""
_MAGIC = {
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
    b"PK\x03\x04": "an archive or a workbook; unpack it, or save its sheet as CSV",
    b"PAR1": "Parquet; let its name end in .parquet",
}  # what a file begins with
_INDEX = re.compile(r"__index_level_\d+__")  # pandas' row names in Parquet
_OTHER_FILES = {
    (".json", ".jsonl", ".ndjson"): "JSON; pandas.read_json(FILE).to_csv(NAME, index=False) makes a table of it",
    (".xlsx", ".xls", ".ods"): "a workbook; save its sheet as CSV",
    (".arff",): "ARFF; pandas.DataFrame(scipy.io.arff.loadarff(FILE)[0]).to_csv(NAME, index=False) makes a table of it",
    (".xz",): "compressed by xz; unxz FILE unpacks it",
    (".zip", ".7z", ".rar", ".tar", ".tgz"): "an archive; unpack it, and name the file in it",
    (".feather", ".arrow"): "Arrow's; pandas.read_feather(FILE).to_parquet(NAME) makes Parquet of it",
    (".rds", ".rda", ".rdata"): "R's; write.csv(TABLE, NAME, row.names = FALSE) makes a table of it",
    (".dta", ".sav", ".sas7bdat"): "a statistics program's; export it as CSV",
}


@dataclass(frozen=True, eq=False)
class Cells:
    """A table of texts."""

    table: pa.Table  # with the types of the file
    where: str  # names the file in errors
    numbers: NDArray[np.int64]  # of its rows in the file, from 1
    empty: tuple[str, ...] | None  # texts that mean that a cell is empty; `None`: nobody says

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the columns."""
        return tuple(self.table.column_names)

    def __len__(self) -> int:
        """Rows."""
        return int(self.table.num_rows)

    def type(self, name: str) -> pa.DataType:
        """What the file says that a column is; of CSV bytes."""
        return self.table.schema.field(name).type

    def column(self, name: str, is_number: bool = False) -> pa.Array:
        """The cells of one column as texts, null where one is empty."""
        if (name, is_number) not in self._columns:
            self._columns[name, is_number] = self._column(name, is_number)
        return self._columns[name, is_number]

    @cached_property
    def _columns(self) -> dict[tuple[str, bool], pa.Array]:
        return {}

    def _column(self, name: str, is_number: bool) -> pa.Array:
        if name not in self.names:
            raise InputError(f"{self.where}: there is no column {name!r}; its columns are {some_of(self.names)}")
        if is_number:
            return self.column(name) if self.empty is not None else _without(self.column(name), MISSING_NUMBERS)
        cells = self.table[name].combine_chunks()
        try:
            texts = pc.utf8_trim_whitespace(pc.cast(cells, pa.string()))
        except pa.ArrowNotImplementedError:
            raise InputError(f"{self.where}: column {name!r} holds {cells.type}, no numbers or texts") from None
        except pa.ArrowInvalid as error:
            if pa.types.is_temporal(cells.type):  # of a time zone that is not known here, say
                raise InputError(
                    f"{self.where}: column {name!r} holds {cells.type}, which cannot be read: {one_line(error)}"
                ) from None
            row = next(row for row, cell in enumerate(cells.to_pylist()) if not _is_utf8(cell))
            raise self.refused(
                row, name, f"{cut(repr(cells[row].as_py()))} is no UTF-8; save the file as UTF-8"
            ) from None
        return _without(texts, MISSING_NUMBERS[:1] if self.empty is None else self.empty)

    def refused(self, row: int, name: str, why: str) -> InputError:
        """The error of one cell; ``row`` is its place here."""
        return InputError(f"{self.where}: row {self.numbers[row]:,}, column {name!r}: {why}")


def _without(texts: pa.Array, marks: Sequence[str]) -> pa.Array:
    """Null in place of each of these."""
    return pc.if_else(pc.is_in(texts, pa.array(marks, pa.string())), pa.scalar(None, pa.string()), texts)


def _is_utf8(cell: bytes | None) -> bool:
    try:
        return cell is None or cell.decode() is not None
    except UnicodeDecodeError:
        return False


def read_cells(path: Path, delimiter: str, empty: tuple[str, ...] | None, memory: int) -> Cells:
    """Read a file whose name ends in .parquet or .pq, or else a CSV file with a header, compressed or not."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; expected a CSV or Parquet file")
    for endings, what in _OTHER_FILES.items():
        if path.suffix.lower() in endings:
            raise InputError(f"{path}: expected a CSV or Parquet file, and {path.suffix} is {what}")
    with _in_one_line(path, delimiter):
        batches = _parquet(path) if path.suffix.lower() in PARQUET else _csv(path, delimiter)
        return cells_of(batches, str(path), empty, memory)


def cells_of(batches: Iterable[pa.RecordBatch], where: str, empty: tuple[str, ...] | None, memory: int) -> Cells:
    """Return all rows of a file, without pandas' row names."""
    read, taken = [], 0
    for batch in batches:
        taken += batch.nbytes
        check_memory(where, _MADE_OF_A_BYTE * taken, memory)
        read.append(_without_views(batch))
    table = pa.Table.from_batches(read) if read else None
    if table is None or table.num_rows == 0:
        raise InputError(f"{where}: no rows")
    names = table.column_names
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise InputError(f"{where}: two columns have the name {twice[0]!r}")
    table = table.drop_columns([name for name in names if _INDEX.fullmatch(name)])
    return Cells(table, where, np.arange(1, table.num_rows + 1), empty)


def _without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Texts in place of views of texts, of which Arrow takes no rows."""
    schema = batch.schema
    views = [number for number, field in enumerate(schema) if field.type in (pa.string_view(), pa.binary_view())]
    for number in views:
        plain = pa.large_string() if schema.field(number).type == pa.string_view() else pa.large_binary()
        schema = schema.set(number, schema.field(number).with_type(plain))
    return batch.cast(schema) if views else batch


def with_class_names(cells: Cells, name: str, classes: Sequence[str]) -> Cells:
    """Replace the numbers of classes in a column by their names; -1 is an empty cell."""
    column = cells.table[name].combine_chunks()
    if not pa.types.is_signed_integer(column.type):
        raise InputError(f"{cells.where}: column {name!r} holds {column.type}, and its metadata say numbers of classes")
    numbers = column.fill_null(-1).to_numpy(zero_copy_only=False)
    odd = np.flatnonzero((numbers < -1) | (numbers >= len(classes)))
    if len(odd):
        raise cells.refused(int(odd[0]), name, f"{numbers[odd[0]]} is none of its {len(classes)} classes, from 0 on")
    named = pa.DictionaryArray.from_arrays(pa.array(numbers, mask=numbers < 0), pa.array(classes, pa.string()))
    return replace(cells, table=cells.table.set_column(cells.names.index(name), name, named))


def rows_of(cells: Cells, rows: NDArray[np.int64]) -> Cells:
    """Return some rows, by their places."""
    return replace(cells, table=cells.table.take(rows), numbers=cells.numbers[rows])


def number_cells(cells: Cells, name: str) -> NDArray[np.float64]:
    """Return a column of numbers, NaN where a cell is empty."""
    column = cells.column(name, is_number=True)
    try:
        values: NDArray[np.float64] = pc.cast(column, pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
        odd = np.flatnonzero(~np.isfinite(values) & column.is_valid().to_numpy(zero_copy_only=False))
    except pa.ArrowInvalid:
        odd = np.flatnonzero(pc.invert(are_numbers(column)).fill_null(False).to_numpy(zero_copy_only=False))
    if len(odd):
        raise cells.refused(int(odd[0]), name, f"{cut(column[int(odd[0])].as_py())!r} is no number")
    return values


def label_numbers(cells: Cells, name: str, classes: Sequence[str]) -> NDArray[np.int64]:
    """Return the labels as numbers of ``classes``."""
    numbers = _positions(cells.column(name), classes)
    bad = np.flatnonzero(numbers < 0)
    if len(bad):
        text = cells.column(name)[int(bad[0])].as_py()
        why = "the label is empty" if text is None else f"the label {cut(text)!r} is none of {some_of(classes)}"
        raise cells.refused(int(bad[0]), name, why)
    return numbers


def encode(cells: Cells, columns: Sequence[ColumnSpec]) -> NDArray[np.float32]:
    """Return rows as numbers from 0 to 1, (N, features), as the columns say."""
    features = np.zeros((len(cells), features_of(columns)), dtype=np.float32)
    for column, where in slices(columns):
        part = features[:, where]
        if column.is_number:
            _put_numbers(part, cells, column)
        else:
            _put_values(part, cells, column)
    return features


def _put_numbers(part: NDArray[np.float32], cells: Cells, column: ColumnSpec) -> None:
    numbers = number_cells(cells, column.name)
    gaps = np.isnan(numbers)
    if column.optional:
        part[:, 1] = gaps
    elif gaps.any():
        raise cells.refused(int(gaps.argmax()), column.name, _EMPTY)
    with np.errstate(over="ignore"):  # what lies far beyond a narrow range is cut as what lies near it
        scaled = ((numbers - column.low) / column.span).clip(0, 1)
    part[:, 0] = np.where(gaps, 0.5, scaled)


_EMPTY = "the cell is empty; data.table.missing = 'own' gives it a value of its own"


def _put_values(part: NDArray[np.float32], cells: Cells, column: ColumnSpec) -> None:
    """One feature a value; of a flag one for both."""
    texts = cells.column(column.name)
    numbers = _positions(texts, column.values)
    empty = ~texts.is_valid().to_numpy(zero_copy_only=False)
    for mark, rows in ((MISSING, empty), (OTHER, (numbers < 0) & ~empty)):
        if mark in column.values:
            numbers[rows] = column.values.index(mark)
    bad = np.flatnonzero(numbers < 0)
    if len(bad):
        row = int(bad[0])
        raise cells.refused(row, column.name, _EMPTY if empty[row] else _unknown(column, texts[row].as_py()))
    if column.kind == "flag":
        part[:, 0] = numbers
    else:
        part[np.arange(len(part)), numbers] = 1


def _unknown(column: ColumnSpec, text: str) -> str:
    known = [value for value in column.values if value != MISSING]
    return (
        f"{cut(text)!r} is none of the known values ({some_of(known)}); data.table.unknown = 'other' has a value for "
        "all others"
    )


def _positions(texts: pa.Array, values: Sequence[str]) -> NDArray[np.int64]:
    """The place of each text in ``values``, -1 where it is none of them or empty."""
    places = pc.index_in(texts, pa.array(list(values), pa.string()), skip_nulls=True)
    return places.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def are_numbers(texts: pa.Array) -> pa.Array:
    """Say of each text whether it is a finite number, null where it is null."""
    written = pc.match_substring_regex(texts, r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
    return pc.and_(written, pc.is_finite(pc.cast(pc.if_else(written, texts, "0"), pa.float64())))


def _csv(path: Path, delimiter: str) -> Iterator[pa.RecordBatch]:
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with csv.open_csv(path, parse_options=parse) as reader:
        names = reader.schema.names
    raw = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()))  # other bytes may be in a column left out
    with csv.open_csv(path, parse_options=parse, convert_options=raw) as reader:
        yield from reader


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches()


@contextmanager
def _in_one_line(path: Path, delimiter: str) -> Iterator[None]:
    """Arrow's errors as one line."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: its header is no UTF-8 (save the file as UTF-8): {one_line(error)}") from None
    except (pa.ArrowException, OSError) as error:
        is_csv = path.suffix.lower() not in PARQUET
        hint = _hint(path, delimiter) if isinstance(error, pa.ArrowInvalid) and is_csv else ""
        if "straddling" in str(error):
            hint = "a row is longer than 1 MiB, as where a quote is not closed"
        said = re.sub(r"Row #(\d+)", lambda found: f"row {int(found[1]) - 1:,}", one_line(error))  # without the header
        raise InputError(f"{path}: cannot be read as a table: {cut(said, _SHOWN)}", hint=hint) from None


def _hint(path: Path, delimiter: str) -> str:
    """What the first lines tell of a file that is no table."""
    with pa.input_stream(path) as file:
        start = file.read(_START)
    for magic, what in _MAGIC.items():
        if start.startswith(magic):
            return f"it is {what}"
    rows = list(lines.reader(start.decode(errors="replace").splitlines(), delimiter=delimiter))
    if len(rows) > 1 and len(rows[1]) == len(rows[0]) + 1 > 2:
        return "its header is one name short, as R's write.table has it: col.names = NA, or row.names = FALSE, mends it"
    if len(rows) > 1 and len(rows[0]) == 1:
        return separators(rows[0][0]) or "its first line is expected to name the columns"
    return ""


def separators(header: str) -> str:
    """What to set where a header has one name, with other separators in it; empty: it has none."""
    found = next((each for each in ";\t|," if each in header), None)
    return "" if found is None else f"data.table.delimiter = {found!r} separates more"
