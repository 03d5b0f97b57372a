"""How files of a run are written and read: whole, or line by line."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fedpriv.core.errors import InputError
from fedpriv.core.files import as_json, write_whole
from fedpriv.core.records import FileRecord, parse_json, read_file, read_text

T = TypeVar("T")
F = TypeVar("F", bound=FileRecord)


class Files:
    """The files of a folder, each with its name in it."""

    verb: ClassVar[str] = "run"  # that fills it

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def to_resume(self) -> str:
        """The command that finishes the run of this folder."""
        return shlex.join(["fedpriv", self.verb, "--resume", str(self.path)])

    def given_command(self) -> str:
        """The commands that led here, one a line; empty if unknown."""
        path = self.path / "command.txt"
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file whole."""
        write_whole(self.path / name, content)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file whole."""
        self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: object) -> None:
        """Write a value as indented JSON; NaN and infinity are refused."""
        self.write_bytes(name, as_json(value))

    def write(self, record: FileRecord) -> None:
        """Write a record into its file."""
        self.write_json(record.path, record.model_dump(mode="json"))

    def read(self, kind: type[F]) -> F | None:
        """Return the record of a kind; ``None`` where there is none."""
        return read_file(self.path / kind.path, kind)

    def write_private(self, name: str, value: object) -> None:
        """Write a value as JSON into a folder below, both for the owner's eyes only."""
        path = self.path / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, as_json(value), mode=0o600)

    def write_jsonl(self, name: str, values: Sequence[Mapping[str, Any]]) -> None:
        """Write one JSON object a line, the file whole."""
        self.write_text(name, "".join(json.dumps(value, allow_nan=False) + "\n" for value in values))

    def remove(self, *names: str) -> None:
        """Remove files that may be there."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def whole_lines(self, name: str, kind: type[T]) -> tuple[T, ...]:
        """Read all lines of a file of JSON objects that appeared whole."""
        path = self.path / name
        lines = enumerate((read_text(path) or "").splitlines(), 1)
        return tuple(parse_json(line, kind, f"{path}, line {number}") for number, line in lines)

    def _needed(self, name: str, record: T | None) -> T:
        """Return a record of a run that has ended."""
        if record is None:
            raise InputError(f"{self.path} has no {name}: finish the run with {self.to_resume}")
        return record

    def appended_lines(self, name: str, kind: type[T]) -> list[T]:
        """Read the whole lines of a file of JSON objects; a torn last one is left out."""
        path = self.path / name
        if not path.exists():
            return []
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        whole = content[: content.rfind(b"\n") + 1].splitlines()
        return [parse_json(line, kind, f"{path}, line {number}") for number, line in enumerate(whole, 1)]
