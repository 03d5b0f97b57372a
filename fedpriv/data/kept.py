"""Pictures that were read once, kept on the disk, so that the next start reads no file of theirs.

An entry is found by the names, inodes, sizes and times of change of all files. Nobody can set the time of change, so
no entry is of other contents. Files that changed just now, when these may not tell yet, are neither kept nor found.
The folder is $FEDPRIV_CACHE, else fedpriv in $XDG_CACHE_HOME or ~/.cache. With FEDPRIV_CACHE empty nothing is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING
from uuid import uuid4

from fedpriv.core.files import TICK
from fedpriv.data.files import Arrays, Keys

if TYPE_CHECKING:
    import numpy as np

_VERSION = 2  # of what entries hold, and of how pictures are read
_MOST = 8  # entries; the ones that were used last stay


def stamp_of(files: Iterable[Path | str], settings: str) -> str | None:
    """Return what an entry is found by; ``None``: a file has changed just now, or nothing is kept."""
    if os.environ.get("FEDPRIV_CACHE") == "":
        return None
    digest, newest = sha256(f"{_VERSION} {settings}".encode()), 0
    for path in files:
        try:
            status = os.stat(path)  # noqa: PTH116 (of tens of thousands of files)
        except OSError:  # whoever reads the file says what is wrong with it
            return None
        newest = max(newest, status.st_ctime_ns)
        seen = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        digest.update(f"{path}\0{seen}\n".encode())
    return digest.hexdigest() if time.time_ns() - newest > TICK else None


def keeping(stamp: str, read: Callable[[], Arrays]) -> Arrays:
    """Return what was kept under the stamp, or else what is read now, which is kept then."""
    path = _folder() / f"{stamp}.arrays"
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError):  # not there, or cut off: it is read again
        with path.open("rb") as file:
            found = _load(file)
        os.utime(path)
        return found
    arrays = read()
    with contextlib.suppress(OSError):  # a full or write-protected disk keeps nothing, and stops nobody
        _keep(path, arrays)
    return arrays


def _folder() -> Path:
    named = os.environ.get("FEDPRIV_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedpriv"


def _keep(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_suffix(f".{uuid4().hex}.part")
    try:
        part.touch(0o600, exist_ok=False)
        with part.open("wb") as file:
            _save(file, arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    entries = sorted(path.parent.glob("*.arrays"), key=lambda entry: entry.stat().st_mtime)
    for entry in entries[:-_MOST]:
        entry.unlink(missing_ok=True)


def _save(file: IO[bytes], arrays: Arrays) -> None:
    import numpy as np

    keys = arrays.keys
    names = {"class_names": arrays.class_names, "key_names": None if keys is None else keys.names}
    names["warnings"] = arrays.warnings
    file.write(json.dumps(names).encode() + b"\n")
    owners = () if keys is None else (keys.train, keys.test)
    for values in (arrays.y_train, arrays.y_test, *owners, _plain(arrays.x_train), _plain(arrays.x_test)):
        np.save(file, values, allow_pickle=False)


def _load(file: IO[bytes]) -> Arrays:
    import numpy as np

    names = json.loads(file.readline())
    count = 4 if names["key_names"] is None else 6
    y_train, y_test, *owners, x_train, x_test = (np.load(file, allow_pickle=False) for _ in range(count))
    images = [x.transpose(0, 2, 3, 1) for x in (x_train, x_test)]
    arrays = Arrays(images[0], y_train, images[1], y_test, tuple(names["class_names"]))
    arrays = replace(arrays, warnings=tuple(names["warnings"]))
    return replace(arrays, keys=Keys(owners[0], owners[1], tuple(names["key_names"]))) if owners else arrays


def _plain(images: np.ndarray) -> np.ndarray:
    """(N, C, H, W), as they lie in memory."""
    return images.transpose(0, 3, 1, 2)
