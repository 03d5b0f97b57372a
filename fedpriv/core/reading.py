"""What all records have in common: how they are read from JSON, and what is refused."""

from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fedpriv.core.errors import InputError

T = TypeVar("T")


class Record:
    """Base of records that are dataclasses: numbers have to be finite, since others are not JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(allow_inf_nan=False)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that its file has, in its order; they are not validated again."""
        tree: dict[str, Any] = _adapter(cast("Hashable", type(self))).dump_python(self, warnings=False)
        return tree


class GrowingRecord(BaseModel):
    """Base of records that grow: a key that older runs did not write has its default, one of later versions is kept."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)


class FileRecord(GrowingRecord):
    """Base of records that have a file of their own in the folder of a run."""

    path: ClassVar[str]  # of the file


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parse_json(text: str | bytes, kind: type[T], where: str) -> T:
    """Read one JSON value as a record of this kind, without keys that it does not know; ``where`` is said in errors."""
    try:
        return _adapter(cast("Hashable", kind)).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        reason = cause if isinstance(cause, Exception) else first["msg"]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{where} is damaged: {key + ': ' if key else ''}{reason}") from None


def read_text(path: Path) -> str | None:
    """Return the text of a file, or ``None`` where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None


def read_file(path: Path, kind: type[T]) -> T | None:
    """Return the record that a file holds, or ``None`` where there is no file."""
    text = read_text(path)
    return None if text is None else parse_json(text, kind, str(path))
