"""A Dataset or DatasetDict of the library datasets that a module of your own has, or that a function there returns."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from typing_extensions import override

from fedpriv.core.errors import InputError, optional, reason_of
from fedpriv.core.files import content_digest
from fedpriv.core.registry import DATASETS
from fedpriv.data.sets.hub import HubTables, StoredTable, tables_of
from fedpriv.data.source import Place


@DATASETS.register
class OwnObject(HubTables):
    """``data.path = "mymodule:data"``, which ``data.name = "mymodule:data"`` stands for."""

    name = "object"
    title = "own object of Python"
    is_kept = False

    @classmethod
    @override
    def parts(cls, place: Place) -> list[StoredTable]:
        found = _object(place.path)
        datasets = optional("datasets", "datasets", "an object of the library datasets")  # a second to import
        if not isinstance(found, datasets.Dataset | datasets.DatasetDict):
            kind = type(found).__name__
            raise InputError(
                key="data.name", given=place.path, allowed=f"expected a Dataset or DatasetDict, not {kind}"
            )
        return tables_of(found, place.path)

    @classmethod
    @override
    def files(cls, place: Place) -> None:
        return None  # what a module reads is known to itself


_imported: dict[str, bytes] = {}  # module -> SHA-256 of its file when it was imported


def _search_here() -> None:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # for good: the module's own code may import more later


def _module(name: str) -> ModuleType:
    """The module as its file is now."""
    found = importlib.import_module(name)
    spec = found.__spec__
    if spec is None or spec.origin is None or not spec.has_location:
        return found
    digest = content_digest(Path(spec.origin))
    if _imported.setdefault(name, digest) != digest:
        found = importlib.reload(found)
        _imported[name] = digest
    return found


def _object(path: str) -> Any:
    module, _, name = path.partition(":")
    _search_here()
    try:
        found: Any = _module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found() if callable(found) else found
    except (Exception, SystemExit) as error:
        raise InputError(key="data.name", given=path, allowed=f"cannot be imported: {reason_of(error)}") from error
