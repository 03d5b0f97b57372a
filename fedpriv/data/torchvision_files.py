"""Data sets that torchvision downloads: its files, or one archive, in the folder of the data sets."""

from __future__ import annotations

import contextlib
import io
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from fedpriv.core.errors import InputError, one_line
from fedpriv.data.files import Arrays, read_labels, read_npz
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
        fetch = torchvision_class(cls.fetcher)
        try:
            # torchvision prints what it tries; the outcome is all that matters here, and stdout belongs to results.
            with contextlib.redirect_stdout(io.StringIO()):
                fetch(root, download=True, **cls.options)
        except (OSError, ValueError, RuntimeError, EOFError, HTTPException) as error:
            raise InputError(f"{cls._absent(root)}; its download failed: {one_line(error)}") from None


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


def torchvision_class(name: str) -> Any:
    """Return what torchvision reads and downloads a data set by."""
    from torchvision import datasets  # seconds to import, and most experiments never need it

    return getattr(datasets, name)
