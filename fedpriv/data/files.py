"""Read images and labels from .npz archives, where they lie and unpickled, with the checks that all readers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedpriv.core.columns import ColumnSpec, features_of
from fedpriv.core.errors import InputError, cut
from fedpriv.core.npz import Header, read_arrays, require_headers

if TYPE_CHECKING:
    from fedpriv.data.tokenizers import TextFacts

IMAGE_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
# A label becomes a 64-bit number, and a name of a class an object of Python's.
LABEL_BYTES, NAME_BYTES = 8, 100
MIB = 1 << 20
PUBLIC_SEED = 0  # the choice of test examples is part of the data set, the same for every experiment


@dataclass(frozen=True, eq=False)
class Keys:
    """Whose each example is."""

    train: np.ndarray  # (N,), numbers of `names`
    test: np.ndarray  # (M,), likewise; none at all: nobody says
    names: tuple[str, ...]  # of all keys, sorted. They stay in memory: no report and no file holds one.

    @staticmethod
    def of(train: Sequence[str], test: Sequence[str]) -> Keys:
        """Number the keys; those of test examples alone have a number, too."""
        names = sorted({*train, *test})
        numbers = {name: number for number, name in enumerate(names)}
        known = [np.array([numbers[key] for key in part], np.int64) for part in (train, test)]
        return Keys(known[0], known[1], tuple(names))

    def chosen(self, rows: np.ndarray) -> Keys:
        """Return the keys of some training examples, and of all test examples."""
        return replace(self, train=self.train[rows])


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images and labels as they lie in files."""

    # uint8 (N, H, W) or (N, H, W, C); of a table (N, 1, features), there also float32 on [0, 1]
    x_train: np.ndarray
    y_train: np.ndarray  # integers (N,), 0-based
    x_test: np.ndarray  # as x_train
    y_test: np.ndarray  # as y_train
    class_names: tuple[str, ...] = ()  # one a class, or empty: the labels are then named by their numbers
    columns: tuple[ColumnSpec, ...] = ()  # of a table; empty: these are images
    notes: tuple[str, ...] = ()  # what a reader of anything proven about them must know
    warnings: tuple[str, ...] = ()  # what was read and is probably not meant
    unread: tuple[str, ...] = ()  # columns, arrays or files that are not read
    # of texts: then x_train and x_test are tokens, integers (N, 1, T), and where the next token is predicted y_train
    # and y_test are those after each, (N, T)
    text: TextFacts | None = None
    keys: Keys | None = None  # whose each example is; `None`: nobody says
    owners: np.ndarray | None = None  # (N,), the number of the person that each training example is of; or nobody says


def read_npz(path: Path, memory: int) -> Arrays:
    """Read x_train, y_train, x_test, y_test and, where present, class_names."""
    headers = require_headers(path, IMAGE_ARRAYS, ("class_names",))
    for name in ("x_train", "x_test"):
        _check_images(headers[name], f"{path}: {name}")
    check_memory(path, sum(map(needed_memory, headers.values())), memory)
    members = read_arrays(path, headers)
    x_train, y_train, x_test, y_test = (members[name] for name in IMAGE_ARRAYS)
    return checked(Arrays(x_train, y_train, x_test, y_test, named_classes(path, members)), str(path))


def read_labels(path: Path, memory: int) -> np.ndarray:
    """Read y_train and y_test of an .npz file, one after the other."""
    names = ("y_train", "y_test")
    headers = require_headers(path, names)
    check_memory(path, sum(map(needed_memory, headers.values())), memory)
    arrays = read_arrays(path, headers)
    for name in names:
        check_labels(arrays[name], arrays[name].size, f"{path}: {name}")
    return np.concatenate([arrays[name] for name in names])


def stratified(
    x: np.ndarray, y: np.ndarray, tests: float, names: tuple[str, ...] = (), columns: tuple[ColumnSpec, ...] = ()
) -> Arrays:
    """Return examples of which a share of each class, the same for every experiment, is the test set."""
    from sklearn.model_selection import train_test_split  # a second to import, and few experiments need it

    rows = np.arange(len(y))
    train, test = train_test_split(rows, test_size=tests, stratify=y, random_state=PUBLIC_SEED)
    return Arrays(x[train], y[train], x[test], y[test], names, columns)


def check_memory(what: Path | str, needed: int, memory: int) -> None:
    """Refuse what takes more than ``memory`` MiB to read, ``needed`` bytes."""
    mib = -(-needed // MIB)
    if mib > memory:
        raise InputError(
            f"{what}: reading it takes {mib:,} MiB of memory, data.memory = {memory} allows {memory:,}; "
            f"--set data.memory={mib} reads it"
        )


def needed_memory(header: Header) -> int:
    """Bytes that an array and what is made of it take: images and their tensor, labels or names and theirs."""
    if header.ndim > 2:
        return header.nbytes + header.size
    return header.nbytes + header.size * (NAME_BYTES if header.dtype.kind in "US" else LABEL_BYTES)


def named_classes(path: Path, members: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Return class_names of an archive; none: it has none."""
    if "class_names" not in members:
        return ()
    names = members["class_names"]
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise InputError(f"{path}: class_names is {names.dtype} of shape {names.shape}; expected a list of texts")
    texts = as_texts(names)
    twice = next((name for number, name in enumerate(texts) if name in texts[:number]), None)
    if twice is not None:
        raise InputError(f"{path}: class_names has {cut(twice)!r} twice; each class has a name of its own")
    return tuple(texts)


def as_texts(values: np.ndarray) -> list[str]:
    """Return numbers, texts or bytes (N,) as texts."""
    return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values.tolist()]


def checked(arrays: Arrays, where: str) -> Arrays:
    """Return ``arrays`` if they fit together; of texts they do as they are made."""
    if arrays.text is not None:
        return arrays
    check = _check_rows if arrays.columns and arrays.x_train.dtype == "float32" else _check_images
    check(arrays.x_train, f"{where}: x_train")
    check(arrays.x_test, f"{where}: x_test")
    features = features_of(arrays.columns)
    if arrays.columns and arrays.x_train.shape[1:] != (1, features):
        raise InputError(f"{where}: x_train has shape {arrays.x_train.shape}; its columns have {features} features")
    if arrays.x_train.shape[1:] != arrays.x_test.shape[1:]:
        raise InputError(
            f"{where}: images of x_train have shape {arrays.x_train.shape[1:]}, of x_test {arrays.x_test.shape[1:]}"
        )
    check_labels(arrays.y_train, len(arrays.x_train), f"{where}: y_train")
    check_labels(arrays.y_test, len(arrays.x_test), f"{where}: y_test")
    _check_classes(arrays, where)
    return arrays


def channels_are_last(shape: Sequence[int], said: str | None = None) -> bool | None:
    """Whether the channels of images (N, ., ., .) are the last axis, or the second; ``None``: nothing tells.

    They are where the setting ``said`` has them: first, which is the second axis, or last. Unset, they are the axis of
    1 or 3, the last one first, as of grey and colour; of other numbers the shorter axis.
    """
    if said is not None:
        return said == "last"
    second, last = shape[1], shape[3]
    if last in (1, 3) or second in (1, 3):
        return last in (1, 3)
    return None if second == last else last < second


def _check_images(images: np.ndarray | Header, what: str) -> None:
    if images.dtype != "uint8":
        raise InputError(f"{what} has dtype {images.dtype}; expected uint8 (0 to 255)")
    if images.ndim not in (3, 4):
        raise InputError(f"{what} has shape {images.shape}; expected (N, H, W) or (N, H, W, C)")
    if images.size == 0:
        raise InputError(f"{what} is empty: shape {images.shape}")


def _check_rows(rows: np.ndarray, what: str) -> None:
    if rows.dtype != "float32" or rows.ndim != 3 or rows.size == 0:
        raise InputError(f"{what} is {rows.dtype} of shape {rows.shape}; expected float32 (N, 1, features)")
    if not (rows.min() >= 0 and rows.max() <= 1):
        raise InputError(f"{what} has values from {rows.min():g} to {rows.max():g}; expected 0 to 1")


def check_labels(labels: np.ndarray, images: int, what: str) -> None:
    """Refuse labels that are not ``images`` integers from 0 on; ``what`` names them in the :class:`InputError`."""
    if labels.dtype.kind not in "iu":
        raise InputError(
            f"{what} has dtype {labels.dtype}; fedpriv classifies: expected integers, the numbers of classes"
        )
    if labels.ndim != 1:
        raise InputError(
            f"{what} has shape {labels.shape}; fedpriv classifies whole examples: expected ({images},), a label each"
        )
    if len(labels) != images:
        raise InputError(f"{what} has {len(labels)} labels for {images} images")
    if len(labels) and labels.min() < 0:
        raise InputError(f"{what} has the label {labels.min()}; labels count from 0, or are texts, such as '-1'")


def _check_classes(arrays: Arrays, where: str) -> None:
    largest = max(int(arrays.y_train.max()), int(arrays.y_test.max()))
    if arrays.class_names:
        if largest >= len(arrays.class_names):
            raise InputError(
                f"{where}: label {largest} has no class; {len(arrays.class_names)} classes are named, counted from 0"
            )
        return
    present = np.unique(arrays.y_train).tolist()
    if len(present) <= largest:
        unused = next(number for number, label in enumerate([*present, -1]) if number != label)
        raise InputError(
            f"{where}: labels go up to {largest}, but y_train has no label {unused}; labels count from 0 without gaps, "
            f"or class_names says which classes there are"
        )
