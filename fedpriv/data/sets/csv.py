"""A table of your own: the CSV or Parquet file of ``data.path``; :mod:`fedpriv.data.schema` finds its columns."""

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays
from fedpriv.data.own import OwnFile
from fedpriv.data.source import Place, home

if TYPE_CHECKING:
    from fedpriv.data.schema import Schema


@DATASETS.register
class OwnTable(OwnFile):
    """A file with a header, one row an example."""

    name = "csv"
    title = "own table"
    needs_table = True
    reads = ("key", "owner")
    key_hint = "data.key names the column that does"

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        return cls.schema(place).arrays(), place.path

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...]:
        tests = (place.table.test_path,) if place.table and place.table.test_path else ()
        return tuple(map(home, (place.path, *tests)))

    @classmethod
    @override
    def schema(cls, place: Place) -> "Schema":
        from fedpriv.data.schema import schema_of
        from fedpriv.data.tables import read_cells

        table = place.table
        if table is None:
            return super().schema(place)
        parts = [read_cells(path, table.delimiter, table.empty, place.memory) for path in cls.files(place)]
        return schema_of(parts, table, place.key, place.owner)
