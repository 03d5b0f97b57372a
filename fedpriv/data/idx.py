"""The idx files in which the MNISTs are published."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from fedpriv.core.errors import InputError, one_line
from fedpriv.core.npz import DAMAGE
from fedpriv.data.files import Arrays, check_memory, checked
from fedpriv.data.torchvision_files import Torchvision

if TYPE_CHECKING:
    import numpy as np

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_UINT8 = b"\x00\x00\x08"


class IdxFiles(Torchvision):
    """Four idx files."""

    @classmethod
    @override
    def is_complete(cls, folder: Path) -> bool:
        return all(path.is_file() for path in _paths(folder))

    @classmethod
    @override
    def read_folder(cls, folder: Path, memory: int) -> Arrays:
        paths = _paths(folder)
        check_memory(folder, sum(2 * math.prod(read_idx_shape(path)) for path in paths), memory)
        x_train, y_train, x_test, y_test = (read_idx(path) for path in paths)
        return checked(Arrays(x_train, y_train, x_test, y_test, cls.class_names), str(folder))

    @classmethod
    @override
    def count_folder(cls, folder: Path) -> int:
        return sum(read_idx_shape(path)[0] for path in _paths(folder) if "labels" in path.name)


def _paths(folder: Path) -> list[Path]:
    """The files, unpacked where torchvision has left them so."""
    return [plain if (plain := folder / stem).is_file() else folder / f"{stem}.gz" for stem in IDX_FILES]


def read_idx(path: Path) -> np.ndarray:
    """Read one idx file of unsigned bytes, as published for MNIST and Fashion-MNIST, gzipped or not.

    Returns:
        uint8, of the shape that the file's header says; of a file that holds more, no more is unpacked.
    """
    import numpy as np

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
    import numpy as np

    rank = header[3] if len(header) >= 4 else 0
    if header[:3] != IDX_UINT8 or rank not in (1, 3) or len(header) < 4 + 4 * rank:
        raise InputError(f"{path}: not an idx file of unsigned bytes with 1 or 3 dimensions")
    return tuple(np.frombuffer(header, ">u4", count=rank, offset=4).tolist())
