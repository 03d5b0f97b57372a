"""A Dataset or DatasetDict of the library datasets that a module of your own has, or that a function there returns."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedpriv.core.errors import InputError, reason_of
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
        from datasets import Dataset, DatasetDict  # a second to import

        if not isinstance(found, Dataset | DatasetDict):
            kind = type(found).__name__
            raise InputError(
                key="data.name", given=place.path, allowed=f"a Dataset or DatasetDict is wanted, not {kind}"
            )
        return tables_of(found, place.path)

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...] | None:
        _search_here()
        try:
            spec = importlib.util.find_spec(place.path.partition(":")[0])
        except (ImportError, ValueError):
            return None
        return (Path(spec.origin),) if spec is not None and spec.origin is not None else None


def _search_here() -> None:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # for good: the module's own code may import more later


def _object(path: str) -> Any:
    module, _, name = path.partition(":")
    _search_here()
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found() if callable(found) else found
    except (Exception, SystemExit) as error:
        raise InputError(key="data.name", given=path, allowed=f"cannot be imported: {reason_of(error)}") from error
