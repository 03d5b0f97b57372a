"""A data set that a module of your own has, or that a function there returns: of the library datasets, or torch's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image
from typing_extensions import override

from fedpriv.core.errors import InputError, one_line, optional, reason_of
from fedpriv.core.files import content_digest
from fedpriv.core.own_code import own_object
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays, check_memory
from fedpriv.data.own import ClientExamples, as_labels, image_shares
from fedpriv.data.pictures import turned
from fedpriv.data.sets.hub import HubTables, StoredTable, tables_of
from fedpriv.data.source import Place, split_names

_CLIENT = "client"  # what data.key calls the third part of a torch Dataset's examples


@DATASETS.register
class OwnObject(HubTables):
    """``data.path = "mymodule:data"``, which ``data.name = "mymodule:data"`` stands for."""

    name = "object"
    title = "own object of Python"
    is_kept = False
    reads = (*HubTables.reads, "channels")
    key_hint = "data.key names the column that does, or examples of torch's Dataset are (x, y, client)"

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        found = _object(place.path)
        parts = _torch_parts(found, place)
        return (cls.of_tables(_tables(found, place), place) if parts is None else _arrays(parts, place)), place.path

    @classmethod
    @override
    def parts(cls, place: Place) -> list[StoredTable]:
        return _tables(_object(place.path), place)

    @classmethod
    @override
    def files(cls, place: Place) -> None:
        return None  # what a module reads is known to itself


def _tables(found: object, place: Place) -> list[StoredTable]:
    datasets = optional("datasets", "datasets", "an object of the library datasets")  # a second to import
    if place.channels is not None:
        raise InputError(key="data.channels", given=place.channels, allowed="only a Dataset of torch has arrays")
    if _is_pandas(found):
        found = datasets.Dataset.from_pandas(found, preserve_index=False)
    if isinstance(found, datasets.Dataset | datasets.DatasetDict):
        return tables_of(found, place.path)
    allowed = "expected a DataFrame of pandas, a Dataset or DatasetDict of the library datasets"
    allowed += ", or without data.text and data.table a Dataset of torch with examples (x, y) or (x, y, client)"
    raise InputError(key="data.name", given=place.path, allowed=f"{allowed}; not {type(found).__name__}")


def _torch_parts(found: Any, place: Place) -> list[Any] | None:
    """Training and test data with examples (x, y), or (x, y, client), as of torch's Dataset; ``None``: others."""
    if place.table is not None or place.text is not None or _is_pandas(found):
        return None
    is_pair = isinstance(found, tuple | list) and len(found) == 2  # a list, as random_split returns it
    given = dict(zip(("train", "test"), found, strict=True)) if is_pair else found
    named = given if isinstance(given, Mapping) else {"": given}
    if not all(hasattr(part, "__getitem__") and hasattr(part, "__len__") and len(part) for part in named.values()):
        return None
    firsts = [_example(part, 0, place.path) for part in named.values()]
    if not all(isinstance(first, tuple | list) and len(first) in (2, 3) for first in firsts):
        return None
    return [named[name] for name in split_names(list(named), place.path)]


def _is_pandas(found: object) -> bool:
    return type(found).__module__.partition(".")[0] == "pandas" and type(found).__name__ == "DataFrame"


def _example(part: Any, row: int, where: str) -> Any:
    try:
        return part[row]
    except Exception as error:  # noqa: BLE001 (other people's code)
        raise InputError(f"{where}: example {row + 1:,} cannot be read: {reason_of(error)}") from None


def _arrays(parts: Sequence[Any], place: Place) -> Arrays:
    """The examples of torch's Datasets."""
    for key, given in (("label", place.label), ("size", place.size), ("owner", place.owner)):
        if given and given != place.key:
            raise InputError(key=f"data.{key}", given=given, allowed="a Dataset of torch has examples (x, y) alone")
    first = _example(parts[0], 0, place.path)
    if place.key and (place.key != _CLIENT or len(first) < 3):
        allowed = f"allowed: {_CLIENT!r}, the third part of the examples of a Dataset of torch"
        raise InputError(key="data.key", given=place.key, allowed=f"{allowed}; these have {len(first)}")
    if hasattr(first[0], "detach") and first[0].ndim == 3 and place.channels is None:
        place = replace(place, channels="first")  # as torch has them
    arrays = image_shares([list(_shares(part, place)) for part in parts], place)
    return arrays if len(first) > 2 else replace(arrays, keys=None)


def _shares(part: Any, place: Place) -> Iterator[ClientExamples]:
    """What each client has, in the order of the first example of each."""
    held: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    for row in range(len(part)):
        x, y, owner = _numbers(_example(part, row, place.path), f"{place.path}: example {row + 1:,}")
        values, labels = held.setdefault(owner, ([], []))
        values.append(x)
        labels.append(y)
        if row == 0:
            check_memory(place.path, 2 * len(part) * x.nbytes, place.memory)
        if x.shape != values[0].shape or y.shape != labels[0].shape or x.dtype.kind in "OU" or y.dtype.kind == "O":
            raise InputError(
                f"{place.path}: example {row + 1:,} has {x.dtype} of shape {x.shape} and a label of {y.dtype} of shape "
                f"{y.shape}; expected numbers or a picture, and a label, of one shape everywhere"
            )
    for name, (values, labels) in held.items():
        where = f"{place.path}: client {name!r}" if name else place.path
        yield ClientExamples(name, np.stack(values), as_labels(np.stack(labels), f"{where}: y").tolist(), where)


def _numbers(example: Any, where: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Arrays of an example's tensor, or picture of Pillow, and of its label; and whose it is, or nothing."""
    try:
        x, y, *owner = example
        pixels = np.asarray(turned(x) if isinstance(x, Image.Image) else x)
        return pixels, np.asarray(y), str(owner[0]) if owner else ""
    except Exception as error:  # noqa: BLE001 (whatever other people's tensors and pictures raise)
        raise InputError(f"{where}: no (x, y) or (x, y, client) that can be read: {one_line(error)}") from None


_imported: dict[str, bytes] = {}  # module -> SHA-256 of its file when it was imported


def _object(path: str) -> Any:
    found = own_object(path, "data.name")
    try:
        if _is_reloaded(sys.modules[path.partition(":")[0]]):
            found = own_object(path, "data.name")
        return found() if callable(found) else found
    except (Exception, SystemExit) as error:
        raise InputError(key="data.name", given=path, allowed=f"raises {reason_of(error)}") from error


def _is_reloaded(module: ModuleType) -> bool:
    """Import a module anew if its file has changed, and return whether it had."""
    spec = module.__spec__
    if spec is None or spec.origin is None or not spec.has_location:
        return False
    digest = content_digest(Path(spec.origin))
    if _imported.setdefault(module.__name__, digest) == digest:
        return False
    importlib.reload(module)
    _imported[module.__name__] = digest
    return True
