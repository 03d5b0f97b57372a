"""idx files of your own, as those of MNIST: images and labels of training and of test data."""

from __future__ import annotations

import math
from pathlib import Path

from typing_extensions import override

from fedpriv.core.errors import InputError, some_of
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays, check_memory
from fedpriv.data.own import OwnFile, label_numbers
from fedpriv.data.source import Place, home
from fedpriv.data.torchvision_files import read_idx, read_idx_shape

_PARTS = (("train",), ("t10k", "test"))
_CONTENTS = ("images", "labels")


@DATASETS.register
class OwnIdx(OwnFile):
    """A folder with four files, gzipped or not, whose names say train, test or t10k, and images or labels."""

    name = "idx"
    title = "own idx files"

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        paths = cls.files(place)
        check_memory(place.path, sum(2 * math.prod(read_idx_shape(path)) for path in paths), place.memory)
        x_train, y_train, x_test, y_test = (read_idx(path) for path in paths)
        if y_train.ndim != 1 or y_test.ndim != 1:
            raise InputError(
                f"{paths[1]}, {paths[3]}: labels of shapes {y_train.shape}, {y_test.shape}; expected one label an image"
            )
        labels, classes = label_numbers([*y_train.tolist(), *y_test.tolist()], len(y_test), place.path)
        return Arrays(x_train, labels[: len(y_train)], x_test, labels[len(y_train) :], classes), place.path

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...]:
        root = home(place.path)
        if not root.is_dir():
            raise InputError(f"{root}: no such folder")
        known = sorted(path for path in root.iterdir() if "idx" in path.name and path.is_file())
        return tuple(_only(root, known, part, content) for part in _PARTS for content in _CONTENTS)


def _only(root: Path, known: list[Path], part: tuple[str, ...], content: str) -> Path:
    found = [path for path in known if content in path.name and any(name in path.name for name in part)]
    if len(found) != 1:
        names = some_of([path.name for path in known]) if known else "no idx file"
        example = f"{part[0]}-{content}-idx{3 if content == 'images' else 1}-ubyte"
        wanted = f"expected one file of {content} of {part[0]} data, such as {example}"
        raise InputError(f"{root}: {wanted}; there are {len(found)} ({names})")
    return found[0]
