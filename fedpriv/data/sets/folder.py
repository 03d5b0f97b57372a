"""Pictures in folders of your own: one folder a class, as torchvision's ImageFolder reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays
from fedpriv.data.own import TEST, TRAIN, OwnFile, image_arrays, label_numbers, order_rows
from fedpriv.data.pictures import ENDINGS, read_pictures
from fedpriv.data.source import Place, home

CLIENT = "client"  # what data.key calls the level of folders above the classes


class PictureFile(NamedTuple):
    """A file and the folders that it lies in."""

    path: str
    label: str
    owner: str


@DATASETS.register
class ImageFolder(OwnFile):
    """CLASS/PICTURE, or CLIENT/CLASS/PICTURE, in the folder itself or in its subfolders train and test."""

    name = "folder"
    title = "own pictures"
    is_kept = True
    reads = ("key", "size", "test_share")

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        train, test = _parts(place)
        pictures = [*train, *test]
        owners = [picture.owner for picture in pictures] if place.key else None
        order, tests = order_rows(owners, len(pictures), len(test), place)
        pictures = [pictures[row] for row in order]
        labels, classes = label_numbers([picture.label for picture in pictures], len(test), place.path)
        named = ((picture.path, picture.path) for picture in pictures)
        images = read_pictures(named, len(pictures), place.size, place.memory, place.path)
        whose = [picture.owner for picture in pictures] if place.key else None
        return image_arrays(images, labels, tests, classes, whose, place.path), place.path

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
    if not root.is_dir():
        raise InputError(
            f"{root}: {'no folder' if root.exists() else 'no such folder'}; data.name = 'folder' reads one"
        )
    names = _folders(str(root))
    train = next((name for name in TRAIN if name in names), None)
    test = next((name for name in TEST if name in names), None)
    if train is None:
        return _pictures(str(root), place.key), []
    parts = [] if test is None else _pictures(str(root / test), place.key)
    return _pictures(str(root / train), place.key), parts


def _pictures(folder: str, key: str) -> list[PictureFile]:
    """All pictures of a part of the data, by client, class and name."""
    owners = _folders(folder) if key else [""]
    found = [
        PictureFile(path, label, owner)
        for owner in owners
        for label in _folders(f"{folder}/{owner}")
        for path in _files(f"{folder}/{owner}/{label}")
    ]
    if not found:
        layout = "CLIENT/CLASS/PICTURE" if key else "CLASS/PICTURE"
        raise InputError(f"{folder}: no picture lies in {layout}; pictures end in {', '.join(ENDINGS)}")
    return found


def _folders(folder: str) -> list[str]:
    """The names of subfolders; a picture beside them would belong to no class."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from None
    stray = next((entry.name for entry in found if entry.name.lower().endswith(ENDINGS) and entry.is_file()), None)
    if stray is not None:
        raise InputError(f"{folder}: {stray} lies beside the folders of classes, and has none")
    return [entry.name for entry in found if entry.is_dir() and not entry.name.startswith(".")]


def _files(folder: str) -> Iterator[str]:
    for where, folders, names in os.walk(folder):
        folders.sort()
        yield from (f"{where}/{name}" for name in sorted(names) if name.lower().endswith(ENDINGS))
