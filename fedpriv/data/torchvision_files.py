"""Data sets that torchvision downloads: its files, or one archive, in the folder of the data sets."""

from __future__ import annotations

import contextlib
import gzip
import io
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from fedpriv.core.errors import InputError, one_line
from fedpriv.core.npz import DAMAGE
from fedpriv.data.files import Arrays, check_memory, read_labels, read_npz
from fedpriv.data.source import DatasetStatus, Place, Source


class Torchvision(Source):
    """A data set in the folder of the data sets: as torchvision's files, or as NAME.npz."""

    folder: ClassVar[str]  # of torchvision's files, under the root
    # the .npz files that are put together, in this order, without their ending; empty: one of its name
    parts: ClassVar[tuple[str, ...]] = ()
    fetcher: ClassVar[str]  # the class of `torchvision.datasets` that downloads it
    options: ClassVar[Mapping[str, str]] = {}  # of that class
    classes: ClassVar[int]  # how many there are

    @classmethod
    @abstractmethod
    def read_folder(cls, folder: Path, memory: int) -> Arrays:
        """Read torchvision's files."""

    @classmethod
    @abstractmethod
    def count_folder(cls, folder: Path) -> int:
        """Count the images in torchvision's files by reading headers or labels only."""

    @classmethod
    def is_complete(cls, folder: Path) -> bool:
        """Whether torchvision's files are all there."""
        return folder.is_dir()

    @classmethod
    def read_archive(cls, path: Path, memory: int) -> Arrays:
        """Read the archive, give it the data set's class names, and refuse one that has other classes."""
        arrays = read_npz(path, memory)
        names = arrays.class_names or cls.class_names or tuple(str(label) for label in range(cls.classes))
        if len(names) != cls.classes:
            raise InputError(f"{path}: {len(names)} classes; {cls.name} has {cls.classes}")
        return replace(arrays, class_names=names)

    @classmethod
    def count_archive(cls, path: Path, memory: int) -> int:
        """Count the images in the archive by reading its labels only."""
        return len(read_labels(path, memory))

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        present = cls._found(place)
        read = cls.read_folder if present[0].suffix != ".npz" else cls.read_archive
        return _joined([read(path, place.memory) for path in present], present), _words(present)

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...]:
        present = cls._found(place)
        return present if present[0].is_file() else tuple(sorted(filter(Path.is_file, present[0].rglob("*"))))

    @classmethod
    @override
    def status(cls, place: Place) -> DatasetStatus:
        present = cls._present(place.root)
        if not present:
            wanted = _words(cls._archives())
            return DatasetStatus(cls.name, False, "", None, f"neither {cls.folder} nor {wanted} in {place.root}")
        is_archive, where = present[0].suffix == ".npz", _words(present)
        try:
            if is_archive:
                count = sum(cls.count_archive(path, place.memory) for path in present)
            else:
                count = cls.count_folder(present[0])
        except InputError as error:
            return DatasetStatus(cls.name, False, where, None, str(error))
        kind = ("an .npz file" if len(present) == 1 else ".npz files") if is_archive else "torchvision's files"
        return DatasetStatus(cls.name, True, where, count, kind)

    @classmethod
    def _archives(cls) -> tuple[str, ...]:
        return tuple(f"{part}.npz" for part in cls.parts or (cls.name,))

    @classmethod
    def _present(cls, root: Path) -> tuple[Path, ...]:
        """Torchvision's folder or the .npz files, whichever is there."""
        folder, archives = root / cls.folder, tuple(root / name for name in cls._archives())
        if cls.is_complete(folder):
            return (folder,)
        return archives if all(path.is_file() for path in archives) else ()

    @classmethod
    def _found(cls, place: Place) -> tuple[Path, ...]:
        """What is there, fetched if need be and allowed."""
        present = cls._present(place.root)
        if not present and place.download:
            cls._download(place.root)
            present = cls._present(place.root)
        if not present:
            raise InputError(f"{cls._absent(place.root)}{'' if place.download else ', or data.download = true'}")
        return present

    @classmethod
    def _absent(cls, root: Path) -> str:
        return (
            f"data.name = {cls.name!r}: neither {cls.folder} (torchvision's files) nor {_words(cls._archives())} lies "
            f"in {root}; put one there, or name another folder with data.root or FEDPRIV_DATA"
        )

    @classmethod
    def _download(cls, root: Path) -> None:
        fetch = _torchvision_class(cls.fetcher)
        try:
            # torchvision prints what it tries; the outcome is all that matters here, and stdout belongs to results.
            with contextlib.redirect_stdout(io.StringIO()):
                fetch(root, download=True, **cls.options)
        except (OSError, ValueError, RuntimeError, EOFError, HTTPException) as error:
            raise InputError(f"{cls._absent(root)}; its download failed: {one_line(error)}") from None


class PickledBatches(Torchvision):
    """Pickled batches of 60,000 images, as the CIFARs are published."""

    @classmethod
    @override
    def read_folder(cls, folder: Path, memory: int) -> Arrays:
        """Read the batches by torchvision, which compares their MD5 sums before it unpickles them."""
        read = _torchvision_class(cls.fetcher)
        try:
            train, test = (read(folder.parent, train=part, download=False) for part in (True, False))
        except RuntimeError as error:
            raise InputError(f"{folder}: {one_line(error)}; delete the folder and load again") from None
        names = tuple(map(str, train.classes))
        return Arrays(train.data, np.asarray(train.targets), test.data, np.asarray(test.targets), names)

    @classmethod
    @override
    def count_folder(cls, folder: Path) -> int:
        return 60_000  # the only size that torchvision accepts


def _joined(parts: Sequence[Arrays], paths: Sequence[Path]) -> Arrays:
    """Put the images of several files together, in their order; one file's are as they were."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part, path in zip(parts, paths, strict=True):
        if part.class_names != first.class_names or part.x_train.shape[1:] != first.x_train.shape[1:]:
            raise InputError(f"{path}: its classes, or the shape of its images, are not those of {paths[0]}")
    return replace(
        first,
        x_train=np.concatenate([part.x_train for part in parts]),
        y_train=np.concatenate([part.y_train for part in parts]),
        x_test=np.concatenate([part.x_test for part in parts]),
        y_test=np.concatenate([part.y_test for part in parts]),
    )


def _words(paths: Sequence[object]) -> str:
    return " with ".join(map(str, paths))


def _torchvision_class(name: str) -> Any:
    from torchvision import datasets  # seconds to import, and most experiments never need it

    return getattr(datasets, name)


IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_UINT8 = b"\x00\x00\x08"


class IdxFiles(Torchvision):
    """Four idx files."""

    stems: ClassVar[Sequence[str]] = IDX_FILES

    @classmethod
    @override
    def is_complete(cls, folder: Path) -> bool:
        return all(path.is_file() for path in cls._paths(folder))

    @classmethod
    @override
    def read_folder(cls, folder: Path, memory: int) -> Arrays:
        paths = cls._paths(folder)
        check_memory(folder, sum(2 * math.prod(read_idx_shape(path)) for path in paths), memory)
        x_train, y_train, x_test, y_test = (read_idx(path) for path in paths)
        return Arrays(x_train, y_train, x_test, y_test, cls.class_names)

    @classmethod
    @override
    def count_folder(cls, folder: Path) -> int:
        return sum(read_idx_shape(path)[0] for path in cls._paths(folder) if "labels" in path.name)

    @classmethod
    def _paths(cls, folder: Path) -> list[Path]:
        """The files, unpacked where torchvision has left them so."""
        return [plain if (plain := folder / stem).is_file() else folder / f"{stem}.gz" for stem in cls.stems]


def read_idx(path: Path) -> np.ndarray:
    """Read one idx file of unsigned bytes, gzipped or not; no more is unpacked than its header says."""
    shape = read_idx_shape(path)
    offset, size = 4 + 4 * len(shape), math.prod(shape)
    content = _read_idx(path, offset + size + 1)
    if len(content) != offset + size:
        present = "more" if len(content) > offset + size else f"{len(content) - offset}"
        raise InputError(f"{path}: truncated or damaged: {present} bytes of data, its header says {shape}")
    return np.frombuffer(content, np.uint8, offset=offset).reshape(shape).copy()


def read_idx_shape(path: Path) -> tuple[int, ...]:
    """Return the shape that an idx file's header says, reading no further."""
    return _idx_shape(_read_idx(path, 16), path)


def _read_idx(path: Path, length: int) -> bytes:
    """Return the first bytes of a file, unpacked, as many as there are up to ``length``."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return stream.read(length)
    except DAMAGE as error:
        raise InputError(f"{path}: cannot be read, truncated or damaged: {one_line(error)}") from None


def _idx_shape(header: bytes, path: Path) -> tuple[int, ...]:
    """The header is two zero bytes, the type, the rank, and each size as a big-endian 32-bit number."""
    rank = header[3] if len(header) >= 4 else 0
    if header[:3] != IDX_UINT8 or rank not in (1, 3) or len(header) < 4 + 4 * rank:
        raise InputError(f"{path}: not an idx file of unsigned bytes with 1 or 3 dimensions")
    return tuple(np.frombuffer(header, ">u4", count=rank, offset=4).tolist())
