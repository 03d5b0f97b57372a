"""idx files: MNIST and the data sets in its format, greyscale pictures of 28x28, and files of your own."""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from typing_extensions import override

from fedpriv.core.errors import InputError, one_line, some_of
from fedpriv.core.npz import DAMAGE
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays, check_memory
from fedpriv.data.own import OwnFile, label_numbers
from fedpriv.data.source import Place, home
from fedpriv.data.torchvision_files import Torchvision

_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_UINT8 = b"\x00\x00\x08"


class IdxFiles(Torchvision):
    """Four idx files."""

    stems: ClassVar[Sequence[str]] = _FILES

    @classmethod
    @override
    def is_complete(cls, folder: Path) -> bool:
        return all(path.is_file() for path in cls._paths(folder))

    @classmethod
    @override
    def read_folder(cls, folder: Path, memory: int) -> Arrays:
        paths = cls._paths(folder)
        check_memory(folder, sum(2 * math.prod(_read_shape(path)) for path in paths), memory)
        x_train, y_train, x_test, y_test = (_read_idx(path) for path in paths)
        return Arrays(x_train, y_train, x_test, y_test, cls.class_names)

    @classmethod
    @override
    def count_folder(cls, folder: Path) -> int:
        return sum(_read_shape(path)[0] for path in cls._paths(folder) if "labels" in path.name)

    @classmethod
    def _paths(cls, folder: Path) -> list[Path]:
        """The files, unpacked where torchvision has left them so."""
        return [plain if (plain := folder / stem).is_file() else folder / f"{stem}.gz" for stem in cls.stems]


def _read_idx(path: Path) -> np.ndarray:
    """Read one idx file of unsigned bytes, gzipped or not; no more is unpacked than its header says."""
    shape = _read_shape(path)
    offset, size = 4 + 4 * len(shape), math.prod(shape)
    content = _first_bytes(path, offset + size + 1)
    if len(content) != offset + size:
        present = "more" if len(content) > offset + size else f"{len(content) - offset}"
        raise InputError(f"{path}: truncated or damaged: {present} bytes of data, its header says {shape}")
    return np.frombuffer(content, np.uint8, offset=offset).reshape(shape).copy()


def _read_shape(path: Path) -> tuple[int, ...]:
    """Return the shape that an idx file's header says, reading no further.

    The header is two zero bytes, the type, the rank, and each size as a big-endian 32-bit number.
    """
    header = _first_bytes(path, 16)
    rank = header[3] if len(header) >= 4 else 0
    if header[:3] != _UINT8 or rank not in (1, 3) or len(header) < 4 + 4 * rank:
        raise InputError(f"{path}: not an idx file of unsigned bytes with 1 or 3 dimensions")
    return tuple(np.frombuffer(header, ">u4", count=rank, offset=4).tolist())


def _first_bytes(path: Path, length: int) -> bytes:
    """Return the first bytes of a file, unpacked, as many as there are up to ``length``."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return stream.read(length)
    except DAMAGE as error:
        raise InputError(f"{path}: cannot be read, truncated or damaged: {one_line(error)}") from None


@DATASETS.register
class Mnist(IdxFiles):
    """Handwritten numerals (LeCun, Cortes and Burges); mean and standard deviation are of the complete training set."""

    name = "mnist"
    title = "MNIST"
    folder = "MNIST/raw"
    fetcher = "MNIST"
    mean = (0.1307,)
    std = (0.3081,)
    class_names = tuple("0123456789")
    classes = 10


@DATASETS.register
class FashionMnist(IdxFiles):
    """Garments (Xiao, Rasul and Vollgraf 2017); mean and standard deviation are of the complete training set."""

    name = "fashion-mnist"
    title = "Fashion-MNIST"
    folder = "FashionMNIST/raw"
    fetcher = "FashionMNIST"
    mean = (0.2860,)
    std = (0.3530,)
    class_names = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
    classes = 10


@DATASETS.register
class Emnist(IdxFiles):
    """EMNIST, balanced: handwritten numerals and letters (Cohen et al. 2017).

    47 classes, letters whose cases look alike joined; the files hold each picture on its side.
    """

    name = "emnist"
    title = "EMNIST, balanced"
    folder = "EMNIST/raw"
    fetcher = "EMNIST"
    options = MappingProxyType({"split": "balanced"})
    stems = tuple(f"emnist-balanced-{stem.replace('t10k', 'test')}" for stem in _FILES)
    mean = (0.1751,)
    std = (0.3332,)
    class_names = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
    classes = 47

    @classmethod
    @override
    def read_folder(cls, folder: Path, memory: int) -> Arrays:
        arrays = super().read_folder(folder, memory)
        return replace(arrays, x_train=arrays.x_train.transpose(0, 2, 1), x_test=arrays.x_test.transpose(0, 2, 1))


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
        check_memory(place.path, sum(2 * math.prod(_read_shape(path)) for path in paths), place.memory)
        x_train, y_train, x_test, y_test = (_read_idx(path) for path in paths)
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
