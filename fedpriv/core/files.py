"""Writing files: whole or not at all, never through a symbolic link, and in one clear line where it cannot be done.

A file is filled under a fresh random name in its own folder (``.NAME.<16 hex digits>.part``) and renamed. Whoever reads
it finds the old content or the new, and an error, a full disk included, removes the unfinished part. Only a process
that is killed leaves one behind, which nothing reads; :func:`remove_parts` takes it away.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path

from fedpriv.core.errors import InputError, RunFailedError

_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY
_PART = re.compile(r"\..+\.[0-9a-f]{16}\.part")
# Of the file's own name, so that the part's fits into the 255 bytes of a name in any alphabet.
_KEPT = 50
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_SMALL = 1 << 18
# Nanoseconds within which a file may change twice and show one time of change.
TICK = 3_000_000_000
# What file systems answer that cannot bring a folder to the disk.
_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})
# What file systems answer that have no locks: there, nobody is kept out.
_CANNOT_LOCK = frozenset({errno.ENOSYS, errno.ENOTSUP})


class WriteError(OSError):
    """A file cannot be written; ``filename`` names it, and not its part."""


def write_whole(path: Path, content: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Write a file so that it appears with all its content; a symbolic link is replaced, a device is not."""
    with _about(path):
        if not _may_be_replaced(path):
            raise OSError(errno.EINVAL, "it exists, and is no regular file")
    with _part(path, content, mode, durable=durable) as temporary:
        temporary.replace(path)


def as_json(value: object) -> bytes:
    """Return a value, in which dataclasses may be, as indented JSON with its line break; refuse NaN and infinity."""
    return (json.dumps(value, indent=2, allow_nan=False, default=asdict) + "\n").encode()


def write_once(path: Path, content: bytes, *, mode: int = 0o666) -> bool:
    """Write a file unless one of that name is there, and return whether this call did; it is then on the disk."""
    try:
        with _part(path, content, mode, durable=True) as temporary:
            path.hardlink_to(temporary)
            temporary.unlink()
    except WriteError as error:
        if error.errno != errno.EEXIST:
            raise
        return False
    return True


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file, which is made where there is none."""
    with _about(path):
        descriptor = open_unlinked(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            length = os.fstat(descriptor).st_size
            try:
                _fill(descriptor, f"{line}\n".encode())
            except BaseException:
                os.ftruncate(descriptor, length)
                raise
        finally:
            os.close(descriptor)


def drop_cut_line(path: Path) -> None:
    """Remove the last line of a text file if a kill cut it off; no other process may be writing there."""
    with _about(path):
        if not path.exists():
            return
        descriptor = open_unlinked(path, os.O_RDWR)
        try:
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            os.ftruncate(descriptor, content.rfind(b"\n") + 1)
        finally:
            os.close(descriptor)


def open_unlinked(path: Path, flags: int) -> int:
    """Open a file with these flags of :func:`os.open`, unless it is a symbolic link, and return the descriptor."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(path)) from None


def content_digest(path: Path) -> bytes:
    """Return SHA-256 of a file, read again where inode, size or time of change differ or are too recent."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
    seen = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    is_settled = time.time_ns() - status.st_ctime_ns > TICK
    return _digest(path, seen) if is_settled else _digest.__wrapped__(path, seen)


@lru_cache(maxsize=1 << 16)
def _digest(path: Path, _: tuple[int, ...]) -> bytes:
    with path.open("rb") as file:
        # file_digest makes room for this much, which takes longer than to read.
        if os.fstat(file.fileno()).st_size < _SMALL:
            return sha256(file.read()).digest()
        return file_digest(file, "sha256").digest()


def sync(path: Path) -> None:
    """Have a file on the disk before this returns."""
    with _about(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def locked(folder: Path, *, file: Path | None = None, wait: bool = False) -> Iterator[None]:
    """Keep other processes from writing into a folder, until the block or this process ends, killed or not."""
    path = folder / ".lock" if file is None else file
    with writing_to(folder):
        descriptor = _lock(path, folder, wait=wait)
    try:
        yield
    finally:
        if _is_at(descriptor, path):
            path.unlink()
        os.close(descriptor)


def _lock(path: Path, folder: Path, *, wait: bool) -> int:
    """Return the descriptor of a lock file, which closing unlocks."""
    while True:
        descriptor = open_unlinked(path, os.O_RDWR | os.O_CREAT)
        try:
            _await(descriptor, folder, wait=wait)
            # Whoever held it before has removed it: another file may have its name by now.
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                _fill(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _await(descriptor: int, folder: Path, *, wait: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        number = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        raise InputError(f"{folder} is being written by {f'process {number}' if number else 'a process'}") from None
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def is_part(name: str) -> bool:
    """Whether a file of that name is the unfinished part of another one."""
    return _PART.fullmatch(name) is not None


def is_empty(path: Path) -> bool:
    """Whether a path is a folder with nothing in it, but for what a killed process left."""
    return path.is_dir() and all(is_part(entry.name) for entry in path.iterdir())


def remove_parts(*folders: Path) -> None:
    """Remove what killed processes left in these folders, if they exist; no other process may be writing there."""
    for path in (path for folder in folders for path in folder.glob(".*.part")):
        if is_part(path.name):
            path.unlink(missing_ok=True)


def is_disk(error: OSError) -> bool:
    """Whether the disk is to blame, which is full or broken, and not the path."""
    return error.errno in _DISK


def stopped(error: OSError, command: str) -> RunFailedError:
    """Return the error that ends a command which could not write: what, why, and the command that goes on (or "")."""
    return RunFailedError(f"{_told(error)}; go on with: {command}" if command else _told(error))


@contextmanager
def writing(command: str = "the same command") -> Iterator[None]:
    """Turn whatever cannot be written in this block into one line that ends with ``command``, which goes on."""
    try:
        yield
    except OSError as error:
        raise stopped(error, command) from None


def target_error(error: OSError, target: object) -> InputError | RunFailedError:
    """Return the error of a command that cannot write where its user wants: bad input, unless the disk is to blame."""
    text = f"{target} cannot be written: {error.strerror or error}"
    return RunFailedError(f"{text}; then give the same command again") if is_disk(error) else InputError(text)


@contextmanager
def writing_to(target: object) -> Iterator[None]:
    """Say of whatever cannot be written in this block that it is ``target``, which the user has named."""
    try:
        yield
    except OSError as error:
        raise target_error(error, target) from None


def _may_be_replaced(path: Path) -> bool:
    """Folders, too, go on: no file can be renamed to one, and the system says why."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return True
    return any(kind(mode) for kind in (stat.S_ISREG, stat.S_ISLNK, stat.S_ISDIR))


@contextmanager
def _part(path: Path, content: bytes, mode: int, *, durable: bool) -> Iterator[Path]:
    """A file's new content under a name of its own; the block gives it the file's, and else it is removed."""
    temporary = path.parent / f".{path.name[:_KEPT]}.{secrets.token_hex(8)}.part"
    with _about(path):
        descriptor = os.open(temporary, _NEW, mode)
        try:
            try:
                _fill(descriptor, content)
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            yield temporary
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            _sync_folder(path.parent)


def _told(error: OSError) -> str:
    if isinstance(error, WriteError):
        return f"{error.filename} cannot be written: {error.strerror}"
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """A full disk names no file, and other errors name the part."""
    try:
        yield
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from None


def _fill(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


class Journal:
    """A text file of lines that processes add to, one at a time, open; never through a symbolic link.

    A kill may cut off the last line, and loses no other. Whoever looks next ends it, so that it is a line like the
    others, if none that says much.
    """

    def __init__(self, path: Path, begin: bytes = b"", *, mode: int = 0o666) -> None:
        """Open the file; where there is none it is made, with these first lines."""
        write_once(path, begin, mode=mode)
        self.descriptor = open_unlinked(path, os.O_RDWR | os.O_APPEND)
        self.offset = 0  # up to where it was read

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from adding lines inside the block; only there may this one add any."""
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def fresh(self) -> Iterator[bytes]:
        """Yield the lines since the last look, without their ends; one on which the caller raises is yielded again."""
        size = os.fstat(self.descriptor).st_size
        content = os.pread(self.descriptor, max(size - self.offset, 0), self.offset)
        if content and not content.endswith(b"\n"):
            self._add(b"\n")
            content += b"\n"
        for line in content.split(b"\n")[:-1]:
            yield line
            self.offset += len(line) + 1

    def append(self, lines: Sequence[bytes], *, durable: bool = True) -> None:
        """Add lines, with their ends, after all were read; ``durable``: they are on the disk before this returns."""
        content = b"".join(lines)
        self._add(content)
        if durable:
            os.fsync(self.descriptor)
        self.offset += len(content)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)

    def _add(self, content: bytes) -> None:
        if os.write(self.descriptor, content) < len(content):
            raise OSError(None, "only a part of it was written")
