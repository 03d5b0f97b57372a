"""Data sets as the Hugging Face hub has them: Parquet files, or a folder that ``save_to_disk`` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from typing_extensions import override

from fedpriv.core.config.data import CorpusConfig, TableConfig
from fedpriv.core.errors import InputError, one_line, optional, some_of
from fedpriv.core.registry import DATASETS, suggestion
from fedpriv.data.files import Arrays
from fedpriv.data.own import OwnFile, image_arrays
from fedpriv.data.pictures import read_pictures
from fedpriv.data.source import Place, home, part_of, split_names
from fedpriv.data.texts import Row, own_texts

if TYPE_CHECKING:
    import pyarrow as pa

    from fedpriv.data.schema import Schema
    from fedpriv.data.tables import Cells

_BATCH = 256  # rows in memory at once
_READ = 1 << 20  # bytes of a column that are read at once, where it would else be read whole
_ENDING = ".parquet"


@dataclass(frozen=True)
class StoredTable:
    """Rows whose types are in the schema's metadata, as the library datasets writes them."""

    where: str  # names it in errors
    schema: pa.Schema
    batches: Callable[[list[str]], Iterator[pa.RecordBatch]]  # of these columns, some rows at a time

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """Column -> what the metadata say of it; nothing where other libraries wrote the file."""
        written = (self.schema.metadata or {}).get(b"huggingface", b"{}")
        try:
            features = json.loads(written).get("info", {}).get("features", {})
            return {name: features[name] for name in self.schema.names if isinstance(features.get(name), dict)}
        except (ValueError, AttributeError):
            raise InputError(f"{self.where}: the metadata 'huggingface' of its schema are damaged") from None

    def require(self, key: str, name: str) -> str:
        """Return the name of a column that there is."""
        if name not in self.schema.names:
            hint = suggestion(name, self.schema.names)
            raise InputError(where=self.where, key=key, given=name, allowed=f"there is no such column{hint}")
        return name

    def values(self, key: str, name: str) -> list[Any]:
        """Return all cells of a column, none of which may be empty, names in place of numbers of classes."""
        self.require(key, name)
        is_text = key == "data.text.text"
        what, kinds = ("a text, a chat", str | int | list) if is_text else ("a text", str | int)
        cells = [cell for batch in self.batches([name]) for cell in batch.column(0).to_pylist()]
        names = self.features.get(name, {}).get("names")
        for row, cell in enumerate(cells):
            known = (
                isinstance(cell, kinds)
                and (is_text or cell != "")
                and (names is None or (isinstance(cell, int) and 0 <= cell < len(names)))
            )
            if not known:
                allowed = f"{what} or a whole number" if names is None else f"a number of its {len(names)} classes"
                raise InputError(f"{self.where}: row {row + 1:,}, column {name!r}: {cell!r:.60}; expected {allowed}")
        return [names[cell] for cell in cells] if names else cells

    def cells(self, empty: tuple[str, ...] | None, memory: int) -> Cells:
        """Return all columns, names in place of numbers of classes."""
        from fedpriv.data.tables import cells_of, with_class_names

        cells = cells_of(self.batches(self.schema.names), self.where, empty, memory)
        for name in _class_columns(self):
            cells = with_class_names(cells, name, _names(self, name))
        return cells


@DATASETS.register
class HubTables(OwnFile):
    """Images, a struct of bytes and path, with their labels; with ``data.text`` texts, with ``data.table`` a table."""

    name = "hub"
    title = "own data set of the hub"
    is_kept = True
    reads: ClassVar[tuple[str, ...]] = ("key", "owner", "label", "size", "test_share", "text", "table")
    key_hint = "data.key names the column that does"

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        return cls.of_tables(cls.parts(place), place), place.path

    @staticmethod
    def of_tables(parts: list[StoredTable], place: Place) -> Arrays:
        """Return what the settings read of training and test data."""
        if place.table is not None:
            return _schema(parts, place.table, place).arrays()
        return (_images if place.text is None else _texts)(parts, place)

    @classmethod
    @override
    def schema(cls, place: Place) -> Schema:
        return super().schema(place) if place.table is None else _schema(cls.parts(place), place.table, place)

    @classmethod
    def parts(cls, place: Place) -> list[StoredTable]:
        """Return the training data and, where there are any, the test data."""
        return _tables(home(place.path))

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...] | None:
        root = home(place.path)
        return tuple(sorted(path for path in root.rglob("*") if path.is_file())) if root.is_dir() else (root,)


def _schema(parts: list[StoredTable], given: TableConfig, place: Place) -> Schema:
    from fedpriv.data.schema import schema_of

    named = tuple(name.strip() for name in _names(parts[0], given.label))
    table = given.model_copy(update={"classes": given.classes or named})
    return schema_of([part.cells(table.empty, place.memory) for part in parts], table, place.key, place.owner)


def _tables(root: Path) -> list[StoredTable]:
    if not root.exists():
        raise InputError(f"{root}: no such file or folder")
    if any((root / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        return _saved(root)
    files = sorted(_visible(root)) if root.is_dir() else [root]
    if not files:
        raise InputError(f"{root}: holds neither {_ENDING} files nor what save_to_disk writes")
    by_split: dict[str, list[Path]] = {}
    configurations: dict[str, None] = {}
    for path in files:
        split, configuration = _split(path.relative_to(root)) if root.is_dir() else ("", "")
        by_split.setdefault(split, []).append(path)
        configurations |= {configuration: None} if split else {}
    if len(configurations) > 1:
        raise InputError(
            f"{root}: holds several data sets, {some_of(list(configurations))}; data.path names one of them"
        )
    chosen = split_names(list(by_split), str(root))
    return [_parquet(by_split[name], f"{root}: {name}" if name else str(root)) for name in chosen]


def _visible(root: Path) -> Iterator[Path]:
    for path in root.rglob(f"*{_ENDING}"):
        if not any(name.startswith(".") for name in path.relative_to(root).parts):
            yield path


def _split(path: Path) -> tuple[str, str]:
    """train of train-00000-of-00002.parquet or of train/0000.parquet, and the folder above, of a data set."""
    if split := part_of(path.stem):
        return split, str(path.parent)
    return part_of(path.parent.name), str(path.parent.parent)


def _parquet(paths: Sequence[Path], where: str) -> StoredTable:
    import pyarrow as pa
    from pyarrow import parquet

    def batches(columns: list[str]) -> Iterator[pa.RecordBatch]:
        for path in paths:
            try:
                with parquet.ParquetFile(path, buffer_size=_READ, pre_buffer=False) as file:
                    yield from file.iter_batches(_BATCH, columns=columns)
            except (OSError, pa.ArrowException) as error:
                raise InputError(f"{path}: truncated or damaged: {one_line(error)}") from None

    try:
        schemas = [parquet.read_schema(path) for path in paths]
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"{where}: not a Parquet file, truncated or damaged: {one_line(error)}",
            hint="data.name = 'mymodule:data' takes what datasets.load_dataset(...) returns",
        ) from None
    for path, schema in zip(paths, schemas, strict=True):
        if not schema.equals(schemas[0]):
            raise InputError(f"{path}: its columns are not those of {paths[0]}")
    return StoredTable(str(paths[0]) if len(paths) == 1 else where, schemas[0], batches)


def _saved(root: Path) -> list[StoredTable]:
    datasets = optional("datasets", "datasets", f"{root} of datasets.save_to_disk")  # a second to import
    try:
        found = datasets.load_from_disk(str(root))
    except Exception as error:  # noqa: BLE001 (the library's errors are of many kinds)
        raise InputError(f"{root}: datasets.load_from_disk cannot read it: {one_line(error)}") from None
    return tables_of(found, str(root))


def tables_of(found: Any, where: str) -> list[StoredTable]:
    """Return the training and test data of a Dataset or DatasetDict of the library datasets."""
    parts = found if isinstance(found, dict) else {"": found}
    return [_table(parts[name], f"{where}: {name}" if name else where) for name in split_names(list(parts), where)]


def _table(dataset: Any, where: str) -> StoredTable:
    from datasets.table import embed_table_storage

    plain = dataset.with_format("arrow")

    def batches(columns: list[str]) -> Iterator[pa.RecordBatch]:
        for table in plain.select_columns(columns).iter(_BATCH):
            try:
                embedded = embed_table_storage(table)  # pictures that it knows by their paths
            except OSError as error:
                raise InputError(f"{where}: {one_line(error)}") from None
            yield from embedded.combine_chunks().to_batches()

    return StoredTable(where, dataset.features.arrow_schema, batches)


def _images(parts: list[StoredTable], place: Place) -> Arrays:
    first = parts[0]
    image, label = _image_column(first), _label_column(first, place)
    labels = [part.values("data.label", label) for part in parts]
    owners = _column(parts, "data.key", place.key)
    people = None if place.owner == place.key else _column(parts, "data.owner", place.owner)  # else the keys say it
    every = [value for part in labels for value in part]

    def read(places: np.ndarray) -> np.ndarray:
        cells = (cell for part in parts for cell in _pictures(part, image))
        return read_pictures(cells, len(every), place.size, place.memory, place.path, places)

    given = sum(map(len, labels[1:]))
    arrays = image_arrays(every, given, place, read, owners, people, _names(first, label))
    return replace(arrays, unread=_unread(first, image, label, place.key, place.owner))


def _column(parts: Sequence[StoredTable], key: str, name: str) -> list[str] | None:
    """The cells of the column that a setting names as texts; ``None``: it names none."""
    return [str(value) for part in parts for value in part.values(key, name)] if name else None


def _image_column(table: StoredTable) -> str:
    """The column of pictures: of the type Image, or a struct with bytes."""
    possible = [field.name for field in table.schema if _has_bytes(field.type)]
    named = [name for name in possible if table.features.get(name, {}).get("_type") == "Image"]
    found = named or possible
    if len(found) != 1:
        columns = some_of(table.schema.names)
        raise InputError(
            f"{table.where}: {len(found)} columns hold images; expected is one, a struct of bytes, among {columns}",
            hint="data.text is for texts, data.table for other columns",
        )
    return str(found[0])


def _has_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(kind)) and kind.get_field_index("bytes") >= 0


def _label_column(table: StoredTable, place: Place) -> str:
    if place.label:
        return table.require("data.label", place.label)
    named = [name for name in _class_columns(table) if name not in (place.key, place.owner)]
    found = named if len(named) == 1 else [name for name in ("label", "labels") if name in table.schema.names][:1]
    if not found:
        raise InputError(f"{table.where}: set data.label to one of its columns: {some_of(table.schema.names)}")
    return str(found[0])


def _class_columns(table: StoredTable) -> list[str]:
    return [name for name, feature in table.features.items() if feature.get("_type") == "ClassLabel"]


def _names(table: StoredTable, label: str) -> tuple[str, ...]:
    """The names of the classes in the schema; none: it has none."""
    return tuple(table.features.get(label, {}).get("names") or ())


def _pictures(table: StoredTable, column: str) -> Iterator[tuple[str, bytes]]:
    row = 0
    for batch in table.batches([column]):
        for cell in batch.column(0).field("bytes"):
            row += 1
            content = cell.as_py()
            if not content:
                raise InputError(f"{table.where}: row {row:,}, column {column!r}: no bytes of a picture")
            yield f"{table.where}: row {row:,}", content


def _texts(parts: list[StoredTable], place: Place) -> Arrays:
    if place.owner not in ("", place.key):
        raise InputError(key="data.owner", given=place.owner, allowed="of texts the column of data.key")
    config = place.text or CorpusConfig()
    rows = [_rows(part, place, config) for part in parts]
    unread = _unread(parts[0], config.text, config.label, config.prompt, place.key)
    return own_texts(rows, config, place, _names(parts[0], config.label), unread)


def _unread(table: StoredTable, *read: str) -> tuple[str, ...]:
    return tuple(name for name in table.schema.names if name not in read)


def _rows(table: StoredTable, place: Place, config: CorpusConfig) -> list[Row]:
    texts = [Row.of(table.where, value) for value in table.values("data.text.text", config.text)]
    empty = [None] * len(texts)
    labels = _column([table], "data.text.label", config.label) or empty
    keys = _column([table], "data.key", place.key) or empty
    before = _column([table], "data.text.prompt", config.prompt) or empty
    return [
        row._replace(label=label, key=key, prompt=prompt)
        for row, label, key, prompt in zip(texts, labels, keys, before, strict=True)
    ]
