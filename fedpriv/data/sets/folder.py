"""Pictures in folders of your own: one folder a class, as torchvision's ImageFolder reads them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from fedpriv.core.errors import InputError, some_of
from fedpriv.core.numbers import several
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays
from fedpriv.data.own import OwnFile, image_arrays
from fedpriv.data.pictures import ENDINGS, read_pictures
from fedpriv.data.source import Place, home, named_parts

CLIENT = "client"  # what data.key calls the level of folders above the classes
# What data.owner calls a place that names the person whom a picture shows.
PEOPLE = {"folder": "CLASS/PERSON/PICTURE", "name": "CLASS/PERSON_PICTURE"}


class PictureFile(NamedTuple):
    """A file and the folders that it lies in."""

    path: str
    label: str
    owner: str
    below: str  # the folder within that of its class, or empty


@DATASETS.register
class ImageFolder(OwnFile):
    """CLASS/PICTURE, or CLIENT/CLASS/PICTURE, in the folder itself or in its subfolders train and test."""

    name = "folder"
    title = "own pictures"
    is_kept = True
    reads = ("key", "owner", "size", "test_share")
    key_hint = "data.key = 'client' reads CLIENT/CLASS/PICTURE"

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        train, test = _parts(place)
        pictures = [*train, *test]
        owners = [picture.owner for picture in pictures] if place.key else None
        people = [_person(picture, place.owner) for picture in pictures] if place.owner in PEOPLE else None

        def read(places: np.ndarray) -> np.ndarray:
            named = ((picture.path, picture.path) for picture in pictures)
            return read_pictures(named, len(pictures), place.size, place.memory, place.path, places)

        labels = [picture.label for picture in pictures]
        arrays = image_arrays(labels, len(test), place, read, owners, people)
        warnings = (*arrays.warnings, *_warnings(pictures, place))
        unread = _unread(home(place.path), {picture.path for picture in pictures})
        return replace(arrays, warnings=warnings, unread=unread), place.path

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[str, ...]:
        return tuple(picture.path for part in _parts(place) for picture in part)


def _parts(place: Place) -> tuple[list[PictureFile], list[PictureFile]]:
    """The pictures of training and test data; the latter are none where the folder has no such part."""
    root = home(place.path)
    if place.key not in ("", CLIENT):
        raise InputError(
            key="data.key", given=place.key, allowed=f"allowed: {CLIENT!r}, the folders above those of the classes"
        )
    if place.owner not in ("", place.key, *PEOPLE):
        layouts = " or ".join(f"{name!r} for {layout}" for name, layout in PEOPLE.items())
        raise InputError(key="data.owner", given=place.owner, allowed=f"allowed: {layouts}, or {CLIENT!r} as data.key")
    if not root.is_dir():
        raise InputError(
            f"{root}: {'no folder' if root.exists() else 'no such folder'}; data.name = 'folder' reads one"
        )
    train, test = named_parts(_folders(str(root)))
    train, test = (name if name and _has_folders(f"{root}/{name}") else None for name in (train, test))
    if train is None:
        if test is not None:
            raise InputError(f"{root}: has a folder {test!r} of test data, and none that is called 'train'")
        return _pictures(str(root), place.key), []
    parts = [] if test is None else _pictures(str(root / test), place.key)
    return _pictures(str(root / train), place.key), parts


def _pictures(folder: str, key: str) -> list[PictureFile]:
    """All pictures of a part of the data, by client, class and name."""
    above = {owner: f"{folder}/{owner}" for owner in _folders(folder)} if key else {"": folder}
    classes = {f"{where}/{label}": (label, owner) for owner, where in above.items() for label in _folders(where)}
    found = [PictureFile(path, *each, below) for where, each in classes.items() for path, below in _files(where)]
    if not found:
        layout = "CLIENT/CLASS/PICTURE" if key else "CLASS/PICTURE"
        others = sorted({path.suffix for path in Path(folder).rglob("*") if path.is_file()})
        raise InputError(
            f"{folder}: no picture lies in {layout}; pictures end in {', '.join(ENDINGS)}",
            hint=f"files end in {some_of(others)}; data.name = 'npz' reads arrays" if others else "",
        )
    filled = {picture.label for picture in found}
    empty = next((where for where, (label, _) in classes.items() if label not in filled), None)
    if empty is not None:
        raise InputError(f"{empty}: there is no picture of this class; pictures end in {', '.join(ENDINGS)}")
    return found


def _person(picture: PictureFile, owner: str) -> str:
    """Whom a picture shows."""
    name, parted, _ = picture.path.rpartition("/")[2].partition("_")
    person = picture.below if owner == "folder" else name if parted else ""
    if not person:
        raise InputError(f"{picture.path}: names no person; data.owner = {owner!r} reads {PEOPLE[owner]}")
    return person


def _warnings(pictures: Sequence[PictureFile], place: Place) -> tuple[str, ...]:
    """Where all classes have the same folders, these may be the classes."""
    below: dict[str, set[str]] = {}
    for picture in pictures:
        below.setdefault(picture.label, set()).add(picture.below)
    shared = set.intersection(*below.values())
    if place.key or place.owner == "folder" or "" in set.union(*below.values()) or not shared:
        return ()
    return (
        f"folders {some_of(sorted(shared))} lie in each of {some_of(sorted(below))}, which are read as classes: if the "
        f"former are the classes, data.key = {CLIENT!r} reads CLIENT/CLASS/PICTURE; if they are persons, data.owner = "
        "'folder' tells these apart",
    )


def _unread(root: Path, read: set[str]) -> tuple[str, ...]:
    """How many files of each ending are not read, such as other formats, and pictures in a folder next to train."""
    files = (path for path in root.rglob("*") if str(path) not in read and path.is_file())
    shown = (path for path in files if not any(part.startswith(".") for part in path.relative_to(root).parts))
    endings = Counter(path.suffix.lower() for path in shown)
    return tuple(f"{several(count, 'file')} of {ending or 'no ending'}" for ending, count in sorted(endings.items()))


def _folders(folder: str) -> list[str]:
    """The names of subfolders; a picture beside them would belong to no class."""
    found = _entries(folder)
    stray = next((entry.name for entry in found if entry.name.lower().endswith(ENDINGS) and entry.is_file()), None)
    if stray is not None:
        raise InputError(
            f"{folder}: {stray} lies next to the folders of classes, and has none",
            hint="a picture's class is its folder; data.name = 'mymodule:data' takes labels from elsewhere",
        )
    return [entry.name for entry in found if entry.is_dir()]


def _has_folders(folder: str) -> bool:
    """Whether a folder may be a part of the data: one that holds pictures alone is a class, whatever it is called."""
    return any(entry.is_dir() for entry in _entries(folder))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """What a folder holds, but for what is hidden, by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from None


def _files(folder: str) -> Iterator[tuple[str, str]]:
    """The pictures in a folder and in all below it, but for hidden ones, and the first folder that each lies in."""
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = where[len(folder) + 1 :].partition("/")[0]
        pictures = (name for name in sorted(names) if name.lower().endswith(ENDINGS) and not name.startswith("."))
        yield from ((f"{where}/{name}", below) for name in pictures)
