"""LEAF's JSON files: the images or texts of its users, FEMNIST and Shakespeare (Caldas et al. 2018)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from fedpriv.core.errors import InputError, one_line
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays, check_memory
from fedpriv.data.own import ClientExamples, OwnFile, as_pixels, image_shares, text_shares
from fedpriv.data.source import Place, by_part, home, named_parts, split_names

_MADE_OF_A_BYTE = 8  # a number is an object of Python's, and a pointer to it


@DATASETS.register
class Leaf(OwnFile):
    """One file, a folder of them, or LEAF's folders train and test; every user is a client."""

    name = "leaf"
    title = "own data in LEAF's format"
    reads = ("test_share", "text")

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        parts = [[share for path in part for share in _shares(path, place)] for part in _parts(place)]
        read = image_shares if place.text is None else text_shares
        return read(parts, place), place.path

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...]:
        return tuple(path for part in _parts(place) for path in part)


def _parts(place: Place) -> list[list[Path]]:
    """The files of the training data and, where there are any, of the test data."""
    root = home(place.path)
    if root.is_file():
        return [[root]]
    if not root.is_dir():
        raise InputError(f"{root}: no such file or folder")
    train, test = named_parts(path.name for path in root.iterdir() if path.is_dir())
    if train is not None:
        return [_files(root / name) for name in (train, test) if name is not None]
    parts = by_part(_files(root))
    return [parts[name] for name in split_names(list(parts), str(root))]


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.json"))
    if not found:
        raise InputError(f"{folder}: holds no .json file, nor LEAF's folders train and test of them")
    return found


def _shares(path: Path, place: Place) -> list[ClientExamples]:
    check_memory(path, _MADE_OF_A_BYTE * path.stat().st_size, place.memory)
    try:
        tree = json.loads(path.read_bytes(), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON that can be read, truncated or damaged: {one_line(error)}") from None
    users = tree.get("user_data") if isinstance(tree, dict) else None
    if not isinstance(users, dict) or not users:
        raise InputError(
            f'{path}: expected LEAF\'s {{"users": [...], "user_data": {{user: {{"x": [...], "y": [...]}}}}}}'
        )
    shares = [_share(path, user, data, place) for user, data in users.items()]
    return [share for share in shares if len(share.values)]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are different, so that nobody's examples replace another's."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return tree


def _share(path: Path, user: str, data: Any, place: Place) -> ClientExamples:
    where = f"{path}: user {user!r}"
    x, y = (data.get(key) if isinstance(data, dict) else None for key in ("x", "y"))
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        raise InputError(f"{where}: expected two lists x and y of one length")
    if not x:
        return ClientExamples(user, [], [], where)
    if all(isinstance(text, str) for text in x) != (place.text is not None):
        wanted, section = ("texts", "has a section") if place.text else ("lists of numbers", "has no section")
        raise InputError(f"{where}: x holds {_kinds(x)}; expected {wanted} where the experiment {section} data.text")
    if place.text is not None:
        if not all(isinstance(following, str) for following in y):
            raise InputError(f"{where}: y holds {_kinds(y)}; expected texts that continue those of x")
        return ClientExamples(user, [f"{text}{following}" for text, following in zip(x, y, strict=True)], [], where)
    if not all(isinstance(label, str | int) and not isinstance(label, bool) and label != "" for label in y):
        found = "an empty text" if "" in y else _kinds(y)
        raise InputError(f"{where}: y holds {found}; expected whole numbers or texts")
    return ClientExamples(user, _images(x, where), y, where)


def _images(x: list[Any], where: str) -> Any:
    """Images (n, H, W) or (n, H, W, C); lists of numbers are squares."""
    try:
        values = np.array(x, dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise InputError(f"{where}: x holds {_kinds(x)} that are no images of one size: {one_line(error)}") from None
    if values.ndim == 2:
        side = math.isqrt(values.shape[1])
        if side * side != values.shape[1]:
            raise InputError(f"{where}: x holds lists of {values.shape[1]} numbers, which are no square")
        values = values.reshape(len(x), side, side)
    whole = bool(values.size) and 1 < values.max() <= 255 and bool((values == np.rint(values)).all())
    return as_pixels(values.astype(np.int64) if whole else values, f"{where}: x")


def _kinds(values: list[Any]) -> str:
    return " and ".join(sorted({type(value).__name__ for value in values})) or "nothing"
