"""A text file of lines that processes add to, one at a time: a kill may cut off the last line, and loses no other.

A line that was cut off stays. Whoever looks next ends it, so that it is a line like the others, if none that says much.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedpriv.core.files import open_unlinked, write_once


class Journal:
    """Such a file, open; never through a symbolic link."""

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
