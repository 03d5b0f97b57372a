"""A table of your own: the CSV or Parquet file that ``data.path`` names, and what ``data.table`` says of its columns.

What is told of a column is public. What is not told is read off the training rows: whether it holds numbers, and the
values of a category. Bounds of numbers are told, and never read off the rows: but a private estimate of
them is at hand.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from fedpriv.core.columns import MISSING, OTHER, Column
from fedpriv.core.config.table import ColumnConfig, TableConfig
from fedpriv.core.errors import InputError, some_of
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays, Keys, checked
from fedpriv.data.source import Place, Source, home

if TYPE_CHECKING:
    from fedpriv.core.randomness import Secret
    from fedpriv.data.tables import Cells

PUBLIC_SEED = 0  # the choice of test rows is part of the data set, the same for every experiment
LOOKED_AT = 1000  # first cells that tell what a column holds
MOST_VALUES = 1000  # of a category that nobody has told


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

        if place.table is None:
            raise InputError(f"data.name = {cls.name!r} needs data.table")
        train, test = _parts(place, place.table)
        schema = _Schema(train, place.table, place.key)
        schema.check()
        columns = schema.columns()
        if not columns:
            raise InputError(f"{train.where}: no column but the label is read")
        classes = place.table.classes or _values(train, place.table.label)
        inferred = schema.inferred
        labels = [label_numbers(each, place.table.label, classes) for each in (train, test)]
        rows = [encode(each, columns, inferred)[:, None] for each in (train, test)]
        notes = schema.notes(place.table)
        keys = Keys.of(*(_owners(each, place.key) for each in (train, test))) if place.key else None
        arrays = Arrays(rows[0], labels[0], rows[1], labels[1], classes, columns, notes, keys=keys)
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


def _parts(place: Place, table: TableConfig) -> "tuple[Cells, Cells]":
    """The training and the test rows."""
    import numpy as np

    from fedpriv.core.randomness import numpy_stream
    from fedpriv.data.tables import read_cells, rows_of

    cells = read_cells(home(place.path), table.delimiter, table.empty, place.memory)
    if table.test_path:
        return cells, read_cells(home(table.test_path), table.delimiter, table.empty, place.memory)
    tests = round(table.test_share * len(cells))
    if not 0 < tests < len(cells):
        raise InputError(
            f"{cells.where}: data.table.test_share = {table.test_share:g} of {len(cells)} rows leaves no training or "
            "no test row"
        )
    order = numpy_stream(PUBLIC_SEED, "test rows").permutation(len(cells))
    return rows_of(cells, np.sort(order[tests:])), rows_of(cells, np.sort(order[:tests]))


def _owners(cells: "Cells", key: str) -> list[str]:
    """Whose each row is."""
    owners: list[str | None] = cells.column(key).to_pylist()
    if None in owners:
        raise cells.refused(owners.index(None), key, "the cell is empty, and data.key says whose a row is by it")
    return [owner or "" for owner in owners]


def private_bounds(place: Place, epsilon: float, secret: "Secret") -> dict[str, tuple[float, float]]:
    """Estimate low and high of the numbers for which nobody has told them, epsilon-DP for replacing a training row."""
    from fedpriv.data.tables import estimated_bounds, number_cells

    if place.table is None:
        raise InputError("bounds are estimated of a table of your own: data.name = 'csv'")
    train, _ = _parts(place, place.table)
    schema = _Schema(train, place.table, place.key)
    schema.check()
    names = schema.open_numbers()
    if not names:
        raise InputError(f"{train.where}: every column of numbers has its low and high told already")
    return estimated_bounds(
        {name: number_cells(train, name, name in schema.inferred) for name in names}, epsilon, secret
    )


@dataclass(frozen=True, eq=False)
class _Schema:
    """What is told, completed by what the training rows show."""

    train: "Cells"
    table: TableConfig
    key: str

    @property
    def told(self) -> Mapping[str, ColumnConfig]:
        return {column.name: column for column in self.table.columns}

    def check(self) -> None:
        """Refuse a label or told columns that the file lacks."""
        keys = [("key", self.key)] if self.key else []
        for what, name in (("table.label", self.table.label), *keys, *(("table.columns", name) for name in self.told)):
            if name not in self.train.names:
                raise InputError(
                    f"data.{what}: {self.train.where} has no column {name!r}; its columns are "
                    f"{some_of(self.train.names)}"
                )

    def columns(self) -> tuple[Column, ...]:
        """All columns that are read, in the order of the file."""
        return tuple(
            self._number(config) if self._is_number(config) else self._category(config) for config in self._read()
        )

    @property
    def inferred(self) -> frozenset[str]:
        """Columns of which nobody has told what they are."""
        return frozenset(config.name for config in self._read() if config.kind is None and config.low is None)

    def notes(self, table: TableConfig) -> tuple[str, ...]:
        """What is taken as public though nobody has told it."""
        shown = [config.name for config in self._read() if not self._is_number(config) and not config.values] + (
            [] if table.classes else [table.label]
        )
        if not shown:
            return ()
        return (f"The values of {', '.join(shown)} were read off the training rows, and are taken as public.",)

    def _read(self) -> Iterator[ColumnConfig]:
        for name in self.train.names:
            config = self.told.get(name, ColumnConfig(name=name))
            if name not in (self.table.label, self.key) and config.kind != "ignore":
                yield config

    def _is_number(self, config: ColumnConfig) -> bool:
        if config.kind is not None or config.values or config.low is not None:
            return config.kind == "number" or config.low is not None
        return self._looks_like_numbers(config.name)

    def _looks_like_numbers(self, name: str) -> bool:
        import numpy as np

        from fedpriv.data.tables import number_cells, rows_of

        known = np.flatnonzero(self.train.column(name).is_valid().to_numpy(zero_copy_only=False))[:LOOKED_AT]
        if not len(known):
            raise InputError(f"{self.train.where}: column {name!r} is empty in all training rows; tell kind = 'ignore'")
        try:
            number_cells(rows_of(self.train, known), name)
        except InputError:
            return False
        return True

    def _category(self, config: ColumnConfig) -> Column:
        values = config.values or _values(self.train, config.name)
        if len(values) > MOST_VALUES and not config.values:
            raise InputError(
                f"{self.train.where}: column {config.name!r} has {len(values):,} different values; tell its values, or "
                "kind = 'ignore'"
            )
        slots = (MISSING,) * (self.table.missing == "own") + (OTHER,) * (self.table.unknown == "other")
        taken = [slot for slot in slots if slot in values]
        if taken:
            raise InputError(
                f"{self.train.where}: column {config.name!r} has a value {taken[0]!r}, which has a meaning"
            )
        return Column(config.name, "category", (*values, *slots))

    def _number(self, config: ColumnConfig) -> Column:
        if config.low is None or config.high is None:
            raise InputError(
                f"{self.train.where}: column {config.name!r} holds numbers: tell low and high, which are public "
                "constants; fedpriv data --bounds EPSILON estimates them privately"
            )
        optional = self.table.missing == "own"
        first = self.train.column(config.name)[:LOOKED_AT].drop_null().to_pylist()
        whole = all(text.lstrip("+-").isdigit() for text in first)
        return Column(config.name, "number", (), config.low, config.high, whole, optional)

    def open_numbers(self) -> tuple[str, ...]:
        """Columns of numbers whose bounds nobody has told."""
        return tuple(config.name for config in self._read() if self._is_number(config) and config.low is None)


def _values(cells: "Cells", name: str) -> tuple[str, ...]:
    """All that a column holds, sorted."""
    return tuple(sorted(text for text in cells.column(name).unique().to_pylist() if text is not None))
