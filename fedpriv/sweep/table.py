"""Records as a flat table, for Parquet and CSV: one row a trial, one column a figure.

Columns: the keys that the sweep set, as ``set.KEY``; the fields of :class:`~fedpriv.sweep.record.TrialRecord`; and for
each attack ``reconstruction.ATTACK.UPLOAD.FIGURE``, ``membership.ATTACK.FIGURE`` or
``evasion.ATTACK.NORM.SIZE.FIGURE``, and ``certified.NORM.SIZE.FIGURE``. What each means is in :func:`describe_columns`,
and in the Parquet file with each column. :func:`from_csv` makes records of the CSV again.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pydantic import BaseModel

from fedpriv.core.finding import Part
from fedpriv.sweep.record import TrialRecord, all_fields, columned, part_fields


def to_table(records: Sequence[TrialRecord]) -> pa.Table:
    """Return one row for each record; a figure that a trial has not is null, and so are unknown columns."""
    rows = [dict(_cells(record)) for record in records]
    meanings = describe_columns(records)
    columns = [_column([row.get(name) for row in rows]) for name in meanings]
    fields = [
        pa.field(name, column.type, metadata={"description": meaning})
        for (name, meaning), column in zip(meanings.items(), columns, strict=True)
    ]
    return pa.table(columns, schema=pa.schema(fields))


def describe_columns(records: Sequence[TrialRecord]) -> dict[str, str]:
    """Return the columns of :func:`to_table`, in their order, and what each means."""
    own = _described(TrialRecord)
    head = {name: own.pop(name) for name in ("trial", "status", "seed")}
    last = {"seconds": own.pop("seconds")}
    for _, kind in columned():
        own |= _described(kind)
    settings = {f"set.{key}": f"{key}, set by the sweep" for record in records for key in record.settings}
    attacks: dict[str, str] = {}
    for record in records:
        for part in record.lines():
            attacks |= {f"{part.place}.{key}": meaning for key, meaning in _described(type(part)).items()}
    return head | settings | own | last | attacks


def to_parquet(table: pa.Table) -> bytes:
    """Return a table as the bytes of a Parquet file."""
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def to_csv(table: pa.Table) -> bytes:
    """Return a table as the bytes of a CSV file with a header; null is empty."""
    buffer = io.BytesIO()
    pyarrow.csv.write_csv(table, buffer)
    return buffer.getvalue()


def from_csv(content: bytes) -> list[TrialRecord]:
    """Return the records of a CSV file that :func:`to_csv` wrote.

    Numbers are the same ones; a setting that is a whole number in a column of others is 1.0 instead of 1, and settings
    that are lists are lists again. The attacks of a record stand in the order of the columns.
    """
    options = pyarrow.csv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False)
    # A process that ends while one of Arrow's threads starts is aborted: seen in 1 of 40 on a busy machine.
    threads = pyarrow.csv.ReadOptions(use_threads=False)
    table = pyarrow.csv.read_csv(io.BytesIO(content), read_options=threads, convert_options=options)
    return [_record(row) for row in table.to_pylist()]


def _record(row: Mapping[str, Any]) -> TrialRecord:
    known = {name: value for name, value in row.items() if value is not None}
    fields = {name: value for name, value in known.items() if name in all_fields()}
    fields["settings"] = {name[4:]: _setting(value) for name, value in known.items() if name.startswith("set.")}
    if "refusals" in fields:
        fields["refusals"] = json.loads(fields["refusals"])
    for field, kind in part_fields().items():
        places: dict[str, dict[str, Any]] = {}
        for name, value in known.items():
            if name.startswith(f"{kind.head}."):
                place, _, figure = name.partition(".")[2].rpartition(".")
                places.setdefault(place, {})[figure] = value
        fields[field] = [
            kind(**dict(zip(kind.keys, place.split(".", len(kind.keys) - 1), strict=True)), **figures)
            for place, figures in places.items()
        ]
    return TrialRecord(**fields)


def _setting(value: Any) -> Any:
    """A setting as it was: lists and tables are JSON in a column of text."""
    return json.loads(value) if isinstance(value, str) and value.startswith(("[", "{")) else value


def _described(kind: type[BaseModel]) -> dict[str, str]:
    """The columns of a record, or of one line of several, and what each means."""
    named = kind.keys if issubclass(kind, Part) else ("settings", *part_fields())
    return {name: field.description or "" for name, field in kind.model_fields.items() if name not in named}


def _cells(record: TrialRecord) -> Iterator[tuple[str, Any]]:
    for name in all_fields():
        if name != "settings" and name not in part_fields():
            value = getattr(record, name)
            yield name, (list(value) or None) if name == "refusals" else value
    for key, value in record.settings.items():
        yield f"set.{key}", value
    for part in record.lines():
        for key in type(part).model_fields:
            yield f"{part.place}.{key}", getattr(part, key)


def _column(values: list[Any]) -> pa.Array:
    """One type for the whole column: the values' own where they agree, else text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or kinds == {bool}:
        return pa.array(values)
    return pa.array([value if value is None or isinstance(value, str) else json.dumps(value) for value in values])
