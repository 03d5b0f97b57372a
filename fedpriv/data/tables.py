"""Read rows of CSV and Parquet files, and encode them as numbers from 0 to 1.

Cells are texts, empty where there is none, whatever the file's types: so that both kinds of files are refused for the
same reasons, each in one line that names column and row. Rows are counted from 1, without the header.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.columns import MISSING, OTHER, Column, features_of, slices
from fedpriv.core.errors import InputError, cut, one_line, some_of
from fedpriv.core.randomness import Secret
from fedpriv.data.files import check_memory

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = (".parquet", ".pq")
# What is made of the bytes of a cell's text: features, of a category one a value.
_MADE_OF_A_BYTE = 8
_SHOWN = 300  # characters of what Arrow says, which quotes rows


@dataclass(frozen=True, eq=False)
class Cells:
    """A table of texts."""

    table: "pa.Table"  # an Arrow table whose columns are texts, null where a cell is empty
    where: str  # names the file in errors
    numbers: NDArray[np.int64]  # of its rows in the file, from 1

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns."""
        return tuple(self.table.column_names)

    def __len__(self) -> int:
        """Rows."""
        return int(self.table.num_rows)

    def column(self, name: str) -> "pa.Array":
        """The cells of one column."""
        if name not in self.names:
            raise InputError(f"{self.where}: there is no column {name!r}; its columns are {some_of(self.names)}")
        return self.table[name].combine_chunks()

    def refused(self, row: int, name: str, why: str) -> InputError:
        """The error of one cell; ``row`` is its place here."""
        return InputError(f"{self.where}: row {self.numbers[row]:,}, column {name!r}: {why}")


def read_cells(path: Path, delimiter: str, empty: Sequence[str], memory: int) -> Cells:
    """Read a file whose name ends in .parquet or .pq, or else a CSV file with a header, compressed or not."""
    import pyarrow as pa
    import pyarrow.compute as pc

    batches, taken = [], 0
    with _in_one_line(path):
        for batch in _parquet(path) if path.suffix.lower() in PARQUET else _csv(path, delimiter):
            taken += batch.nbytes
            check_memory(path, _MADE_OF_A_BYTE * taken, memory)
            batches.append(batch)
        table = pa.Table.from_batches(batches) if batches else None
    if table is None or table.num_rows == 0:
        raise InputError(f"{path}: no rows")
    names = table.column_names
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise InputError(f"{path}: two columns have the name {twice[0]!r}")
    marks = pa.array(list(empty), pa.string())
    columns = []
    for name in names:
        with _in_one_line(path, f": column {name!r}"):
            texts = pc.utf8_trim_whitespace(pc.cast(table[name], pa.string()))
        columns.append(pc.if_else(pc.is_in(texts, marks), pa.scalar(None, pa.string()), texts))
    return Cells(pa.table(columns, names), str(path), np.arange(1, table.num_rows + 1))


def rows_of(cells: Cells, rows: NDArray[np.int64]) -> Cells:
    """Return some rows, by their places."""
    return Cells(cells.table.take(rows), cells.where, cells.numbers[rows])


def number_cells(cells: Cells, name: str, inferred: bool = False) -> NDArray[np.float64]:
    """Return a column of numbers, NaN where a cell is empty."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = cells.column(name)
    try:
        numbers = pc.cast(column, pa.float64())
    except pa.ArrowInvalid:
        row = next(row for row, text in enumerate(column.to_pylist()) if text is not None and not _is_number(text))
        hint = "; its first rows hold numbers: correct the cell, or set kind = 'category'" if inferred else ""
        raise cells.refused(row, name, f"{cut(column[row].as_py())!r} is no number{hint}") from None
    known = column.is_valid().to_numpy(zero_copy_only=False)
    values = np.where(known, numbers.fill_null(0.0).to_numpy(zero_copy_only=False), np.nan)
    odd = np.flatnonzero(known & ~np.isfinite(values))
    if len(odd):
        raise cells.refused(int(odd[0]), name, f"{cut(column[int(odd[0])].as_py())!r} is no finite number")
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


def encode(cells: Cells, columns: Sequence[Column], inferred: Collection[str] = ()) -> NDArray[np.float32]:
    """Return rows as numbers from 0 to 1, (N, features), as the columns say."""
    features = np.zeros((len(cells), features_of(columns)), dtype=np.float32)
    for column, where in slices(columns):
        part = features[:, where]
        if column.is_number:
            _put_numbers(part, cells, column, column.name in inferred)
        else:
            _put_values(part, cells, column)
    return features


def _put_numbers(part: NDArray[np.float32], cells: Cells, column: Column, inferred: bool) -> None:
    numbers = number_cells(cells, column.name, inferred)
    gaps = np.isnan(numbers)
    if column.optional:
        part[:, 1] = gaps
    elif gaps.any():
        raise cells.refused(int(gaps.argmax()), column.name, _EMPTY)
    with np.errstate(over="ignore"):  # what lies far beyond a narrow range is cut as what lies near it
        scaled = ((numbers - column.low) / column.span).clip(0, 1)
    part[:, 0] = np.where(gaps, 0.5, scaled)


_EMPTY = "the cell is empty; data.table.missing = 'own' gives it a value of its own"


def _put_values(part: NDArray[np.float32], cells: Cells, column: Column) -> None:
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


def _unknown(column: Column, text: str) -> str:
    known = [value for value in column.values if value != MISSING]
    return (
        f"{cut(text)!r} is none of the known values ({some_of(known)}); data.table.unknown = 'other' has a value for "
        "all others"
    )


def _positions(texts: "pa.Array", values: Sequence[str]) -> NDArray[np.int64]:
    """The place of each text in ``values``, -1 where it is none of them or empty."""
    import pyarrow as pa
    import pyarrow.compute as pc

    places = pc.index_in(texts, pa.array(list(values), pa.string()), skip_nulls=True)
    numbers: NDArray[np.int64] = places.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _is_number(text: str) -> bool:
    """As Arrow reads it: Python's float takes more, such as 1_000 and digits of other scripts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        pc.cast(pa.scalar(text), pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def _csv(path: Path, delimiter: str) -> Iterator["pa.RecordBatch"]:
    import pyarrow as pa
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with csv.open_csv(path, parse_options=parse) as reader:
        names = reader.schema.names
    texts = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    with csv.open_csv(path, parse_options=parse, convert_options=texts) as reader:
        yield from reader


def _parquet(path: Path) -> Iterator["pa.RecordBatch"]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches()


@contextmanager
def _in_one_line(path: Path, what: str = "") -> Iterator[None]:
    """Arrow's errors as one line."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}{what}: cannot be read as a table: {cut(one_line(error), _SHOWN)}") from None


# Bounds of a table's numbers under differential privacy, from noisy histograms with powers of two as edges.
#
# The approximate bounds of Wilson, Zhang, Lam, Desfontaines, Simmons-Marengo and Gipson: Differentially Private SQL
# with Bounded User Contribution, PoPETs 2020, section 5.1. The noise on counts is discrete, so that no floating point
# leaks.


SMALLEST, LARGEST = -10, 50  # exponents of the edges
_POSITIVE = 2.0 ** np.arange(SMALLEST, LARGEST + 1)
EDGES: NDArray[np.float64] = np.concatenate([-_POSITIVE[::-1], [0.0], _POSITIVE])
"""Of the bins: (edge, next edge], the first one closed; numbers beyond the last edges count for the last bins."""

FALSE_ALARMS = 0.01  # chance that any empty bin of a column is taken for one that is not
_SENSITIVITY = 2  # replacing a row takes one from a count and adds one to another


def estimated_bounds(
    numbers: Mapping[str, NDArray[np.float64]], epsilon: float, secret: Secret
) -> dict[str, tuple[float, float]]:
    """Return low and high of each column, epsilon-DP all together, for replacing a row.

    Args:
        numbers: name of a column -> (N,), NaN where a cell is empty.
    """
    each = epsilon / len(numbers)
    scale = _SENSITIVITY / each
    bins = len(EDGES) - 1
    # P(noise >= t) < exp(-t / scale) for each of the bins.
    threshold = scale * math.log(bins / FALSE_ALARMS)
    bounds = {}
    for place, (name, values) in enumerate(numbers.items()):
        counts = _counts(values) + _geometric(bins, each / _SENSITIVITY, secret.stream("bounds", place).numpy())
        full = np.flatnonzero(counts > threshold)
        if not len(full):
            raise InputError(
                key="epsilon",
                given=epsilon,
                allowed=f"too little for so few rows: the bounds of {name!r} are lost in noise",
                hint="tell low and high, or allow more",
            )
        bounds[name] = float(EDGES[full[0]]), float(EDGES[full[-1] + 1])
    return bounds


def _counts(values: NDArray[np.float64]) -> NDArray[np.int64]:
    known = values[~np.isnan(values)]
    places = np.searchsorted(EDGES, known, side="left") - 1
    counts: NDArray[np.int64] = np.bincount(places.clip(0, len(EDGES) - 2), minlength=len(EDGES) - 1)
    return counts


def _geometric(count: int, epsilon: float, draws: np.random.Generator) -> NDArray[np.int64]:
    """Two-sided geometric noise: P(k) proportional to exp(-epsilon |k|); the difference of two geometric numbers."""
    success = -math.expm1(-epsilon)
    noise: NDArray[np.int64] = draws.geometric(success, count) - draws.geometric(success, count)
    return noise
