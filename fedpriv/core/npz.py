"""Arrays in ``.npz`` archives, which say what they ask for before any of it is given.

numpy makes room for as much as a header asks for, and zip packs zeros a thousandfold: a file of some megabytes may ask
for more memory than there is. So headers come first (:func:`read_headers`), the caller says whether that is too much,
and only then the arrays (:func:`read_arrays`), of which no more is unpacked than the headers said. Nothing is
unpickled.
"""

from __future__ import annotations

import io
import lzma
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from fedpriv.core.errors import InputError, one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER_BYTES = 10_012
"""As much as :func:`parse_header` looks at: numpy's own limit for a header, and what stands before it."""

# What numpy, zipfile and the decompressors raise for a file that is cut off, damaged or of another kind.
DAMAGE = (OSError, ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)

_READERS = {(1, 0): "read_array_header_1_0", (2, 0): "read_array_header_2_0"}  # of numpy.lib.format
# Of the ways to pack. zipfile unpacks bzip2 without a limit, and a kilobyte of that may be a gigabyte.
_READ_WHOLE, _READ_IN_SIPS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED), (zipfile.ZIP_LZMA,)
_SIP = 4096


@dataclass(frozen=True)
class Header:
    """What an array in ``.npy`` format says of itself."""

    dtype: np.dtype[Any]  # of its numbers or texts; never Python objects
    shape: tuple[int, ...]  # sizes from 0
    length: int  # bytes of the header itself

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers or texts it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.dtype.itemsize * self.size


class _RefusedError(ValueError):
    """An array is whole and not read all the same; the text says of it why."""


def parse_header(start: bytes) -> Header:
    """Read the header of an array in ``.npy`` format."""
    stream = io.BytesIO(start)
    version = None
    try:
        version = np.lib.format.read_magic(stream)
        shape, _, dtype = getattr(np.lib.format, _READERS[version])(stream)
    except Exception as error:  # noqa: BLE001 (numpy parses headers as Python, and damaged ones fail in many ways)
        raise ValueError(_not_a_header(version, error)) from None
    if dtype.hasobject:
        raise _RefusedError("holds Python objects, which are not read; save plain numbers or text")
    if dtype.itemsize == 0 or any(size < 0 for size in shape):
        raise ValueError(f"no array has the type {dtype} and the shape {shape}")
    return Header(dtype, shape, stream.tell())


def _not_a_header(version: tuple[int, int] | None, error: Exception) -> str:
    if version is None:
        return "it does not begin as an array that numpy has saved"
    if version not in _READERS:
        known = " and ".join(f"{major}.{minor}" for major, minor in _READERS)
        return f"its header has version {version[0]}.{version[1]}; read are {known}"
    return f"its header is damaged: {one_line(error)}"


MAKES_ONE = "numpy.savez(FILE, x_train=..., y_train=..., ...) makes one of arrays"


def read_headers(path: Path, names: Iterable[str]) -> dict[str, Header]:
    """Return the headers of the named arrays of an ``.npz`` archive, of those that are in it."""
    if not path.is_file():
        where = "" if path.is_absolute() else f" in the current folder, {Path.cwd()}, where relative paths begin"
        raise InputError(f"{path}: no such file{where}")
    if not zipfile.is_zipfile(path):
        raise InputError(
            f"{path}: not an .npz archive, truncated, or not readable", hint="" if path.suffix == ".npz" else MAKES_ONE
        )
    headers = {}
    with _reading(path, "the archive"), zipfile.ZipFile(path) as archive:
        for name, member in _members(archive, names).items():
            with _reading(path, name):
                headers[name] = _header(archive, member)
    return headers


def array_names(path: Path) -> tuple[str, ...]:
    """Return the names of all that an ``.npz`` archive holds."""
    with _reading(path, "the archive"), zipfile.ZipFile(path) as archive:
        return tuple(name.removesuffix(".npy") for name in archive.namelist())


def require_headers(path: Path, names: Sequence[str], more: Sequence[str] = ()) -> dict[str, Header]:
    """Return the headers of arrays that an archive must have, and of ``more`` those that are in it."""
    headers = read_headers(path, (*names, *more))
    if missing := [name for name in names if name not in headers]:
        raise InputError(f"{path}: lacks {', '.join(missing)}; expected {', '.join(names)}")
    return headers


def read_arrays(path: Path, headers: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Return arrays of an ``.npz`` archive."""
    arrays = {}
    with _reading(path, "the archive"), zipfile.ZipFile(path) as archive:
        for name, member in _members(archive, headers).items():
            with _reading(path, name), archive.open(member) as stream:
                arrays[name] = np.lib.format.read_array(_sipped(stream, member), allow_pickle=False)
    return arrays


def _members(archive: zipfile.ZipFile, names: Iterable[str]) -> dict[str, zipfile.ZipInfo]:
    """The members that hold arrays of these names; an archive may have several of one name."""
    arrays: dict[str, zipfile.ZipInfo] = {}
    for name in names:
        members = [member for member in archive.infolist() if member.filename in (name, f"{name}.npy")]
        if len(members) > 1:
            raise _RefusedError(f"holds {name} {len(members)} times")
        if members:
            arrays[name] = members[0]
    return arrays


def _header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Header:
    if member.compress_type not in (*_READ_WHOLE, *_READ_IN_SIPS):
        raise _RefusedError("is packed in a way that is not read; save it with np.savez or np.savez_compressed")
    with archive.open(member) as stream:
        start, source = b"", _sipped(stream, member)
        while len(start) < HEADER_BYTES and (more := source.read(HEADER_BYTES - len(start))):
            start += more
    header = parse_header(start)
    if header.length + header.nbytes != member.file_size:
        raise ValueError(f"its header fits another array than the one of {member.file_size:,} bytes that is there")
    return header


class _Sips:
    """Reads a little at a time: of some ways to pack, zipfile unpacks all that it reads at once."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, size: int = _SIP, /) -> bytes:
        return self._stream.read(min(size, _SIP))


def _sipped(stream: IO[bytes], member: zipfile.ZipInfo) -> IO[bytes] | _Sips:
    return _Sips(stream) if member.compress_type in _READ_IN_SIPS else stream


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except _RefusedError as error:
        raise InputError(f"{path}: {what} {error}") from None
    except DAMAGE as error:
        raise InputError(f"{path}: {what} cannot be read, truncated or damaged: {one_line(error)}") from None
