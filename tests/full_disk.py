"""A disk that is full for one file: half of its content is written, then nothing more."""

import errno
import fnmatch
import os
from pathlib import Path
from typing import Any

import pytest

from fedpriv.core import files

__all__ = ["fill_up", "leftovers"]


def fill_up(monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0) -> list[str]:
    """Have every write to a file whose name matches ``name`` fail after half of the content.

    Args:
        monkeypatch: undoes it.
        name: with wildcards.
        after: so many writes to such files still work.

    Returns:
        The names of the files to which writing was tried, as it happens.
    """
    names: dict[int, str] = {}
    hit: list[str] = []
    opened, filled = os.open, files._fill

    def remember(path: Any, *given: Any, **options: Any) -> int:
        descriptor = opened(path, *given, **options)
        names[descriptor] = Path(os.fsdecode(path)).name
        return descriptor

    def fill(descriptor: int, content: bytes) -> None:
        # A part is called .NAME.<digits>.part.
        whole = names[descriptor]
        whole = whole[1:].rsplit(".", 2)[0] if files.is_part(whole) else whole
        if not fnmatch.fnmatchcase(whole, name):
            filled(descriptor, content)
            return
        hit.append(whole)
        if len(hit) <= after:
            filled(descriptor, content)
            return
        os.write(descriptor, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "open", remember)
    monkeypatch.setattr(files, "_fill", fill)
    return hit


def leftovers(folder: Path) -> list[Path]:
    """What is left of files that were not finished."""
    return sorted(path for path in folder.rglob("*") if path.name.endswith(".part"))
