"""An .npz file of your own: images and labels under the names of fedpriv or of MedMNIST."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from typing_extensions import override

from fedpriv.core.errors import InputError, some_of
from fedpriv.core.npz import MAKES_ONE, Header, array_names, read_arrays, read_headers
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import IMAGE_ARRAYS, Arrays, Keys, as_texts, check_memory, named_classes, needed_memory
from fedpriv.data.own import (
    OwnFile,
    as_labels,
    as_pixels,
    channels_note,
    check_finite,
    numbered_labels,
    order_rows,
    refuse_share,
    with_people,
)
from fedpriv.data.source import Place, home

# The names of MedMNIST's files, for those of IMAGE_ARRAYS.
_MEDMNIST = dict(zip(IMAGE_ARRAYS, ("train_images", "train_labels", "test_images", "test_labels"), strict=True))
_CLIENT = "client"  # whose each training example is; client_test of test examples


@DATASETS.register
class OwnArrays(OwnFile):
    """x_train, y_train and, if you like, x_test, y_test, class_names, client and client_test."""

    name = "npz"
    title = "own file"
    reads = ("key", "owner", "channels", "test_share")
    key_hint = "an array client does, or the one that data.key names"

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        path, key, owner = home(place.path), place.key or _CLIENT, place.owner
        more = ("class_names", key, f"{key}_test", owner, f"{owner}_test")
        headers = read_headers(path, (*IMAGE_ARRAYS, *_MEDMNIST.values(), *more))
        names = {name: name if name in headers else _MEDMNIST[name] for name in IMAGE_ARRAYS}
        missing = [name for name, found in names.items() if found not in headers]
        if missing and missing != [*IMAGE_ARRAYS[2:]]:
            if any(name.endswith("/data.pkl") for name in array_names(path)):
                raise InputError(f"{path}: what torch.save writes, not an .npz archive", hint=MAKES_ONE)
            raise InputError(
                f"{path}: has {some_of(array_names(path))}, and lacks {', '.join(missing)}; expected "
                f"{', '.join(IMAGE_ARRAYS)}, or as in MedMNIST, "
                f"{', '.join(_MEDMNIST.values())}; without test data a share becomes that"
            )
        if not missing:
            refuse_share(place)
        for setting, given in (("data.key", place.key), ("data.owner", place.owner)):
            if given and (given not in headers or given in names.values()):
                why = "is what is learnt from" if given in headers else "there is no such array"
                raise InputError(where=str(path), key=setting, given=given, allowed=why)
        headers = {name: headers[name] for name in (*names.values(), *more) if name in headers}
        for name in (names["x_train"], names["x_test"]):
            if name in headers:
                _check_pixels(headers[name], f"{path}: {name}")
        unread = tuple(name for name in array_names(path) if name not in headers)
        check_memory(path, sum(map(needed_memory, headers.values())), place.memory)
        members = read_arrays(path, headers)
        if missing:
            _draw_tests(path, members, names, key, place)
        x_train, x_test = (
            as_pixels(members.pop(names[name]), f"{path}: {name}", place.channels) for name in ("x_train", "x_test")
        )
        y_train, y_test = (as_labels(members[names[name]], f"{path}: {name}") for name in ("y_train", "y_test"))
        y_train, y_test, classes = numbered_labels(y_train, y_test, str(path), named_classes(path, members))
        keys = _keys(path, key, members, len(x_train), len(x_test))
        said = channels_note(headers[names["x_train"]].shape, names["x_train"], place.channels)
        arrays = Arrays(x_train, y_train, x_test, y_test, classes, notes=said, keys=keys, unread=unread)
        people = _keys(path, owner, members, len(x_train), len(x_test)) if owner else None
        if people is not None:
            tests = () if owner == key else people.test.tolist()  # of its clients, who are tested by design
            arrays = with_people(arrays, people.train.tolist(), tests, str(path))
        return arrays, place.path

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...]:
        return (home(place.path),)


def _check_pixels(header: Header, what: str) -> None:
    if header.dtype.kind not in "buif":
        raise InputError(f"{what} has dtype {header.dtype}; expected numbers")
    if header.ndim not in (2, 3, 4):
        raise InputError(
            f"{what} has shape {header.shape}; expected (N, T), (N, H, W), (N, H, W, C) or (N, C, H, W); volumes have "
            "their slices in the place of channels"
        )


def _draw_tests(path: Path, members: dict[str, np.ndarray], names: Mapping[str, str], key: str, place: Place) -> None:
    """Make a share of the examples, of each client or of all, test examples."""
    x, owner = members[names["x_train"]], place.owner
    check_finite(x, f"{path}: {names['x_train']}")  # before they are put in another order
    for name, values in members.items():
        if name != "class_names" and values.shape[:1] != x.shape[:1]:
            raise InputError(f"{path}: {name} has shape {values.shape}; expected {len(x)}, as {names['x_train']}")
    keys, people = (_keys(path, name, members, len(x), 0) for name in (key, owner))
    owners = None if keys is None else [keys.names[number] for number in keys.train]
    persons = None if people is None or owner == key else [people.names[number] for number in people.train]
    order, tests = order_rows(owners, len(x), 0, place, persons)
    pairs = [(names["x_train"], names["x_test"]), (names["y_train"], names["y_test"])]
    for train, test in [*pairs, *((name, f"{name}_test") for name in {key, owner})]:
        if train in members:
            values = members[train][order]
            members |= {train: values[:-tests], test: values[-tests:]}


def _keys(path: Path, key: str, members: Mapping[str, np.ndarray], train: int, test: int) -> Keys | None:
    """Whose each example is; of test examples nobody may say."""
    if key not in members:
        return None
    parts: list[list[str]] = [[], []]
    for part, name, count in zip(parts, (key, f"{key}_test"), (train, test), strict=True):
        values = members.get(name)
        if values is None:
            continue
        if values.shape != (count,) or values.dtype.kind not in "iuUS":
            raise InputError(
                f"{path}: {name} is {values.dtype} of shape {values.shape}; expected {count} numbers or texts, one "
                "an example"
            )
        part += as_texts(values)
    return Keys.of(*parts)
