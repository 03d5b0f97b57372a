"""The errors that end a command, each with its exit code."""

import importlib
import os
import sys
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, Self


def printable(text: str) -> str:
    """Return ``text`` with a space in place of every character that is not printable."""
    return "".join(character if character.isprintable() else " " for character in text)


def cut(text: str, most: int = 60) -> str:
    """Return ``text``, or its beginning where it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def some_of(names: Sequence[str], most: int = 8) -> str:
    """Return a list for an error line: the first names, shortened, and how many more; empty ones are quoted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(cut(name if name and name == name.strip() else repr(name)) for name in names[:most]) + more


def drop_output() -> None:
    """Discard the remaining output, which Python would otherwise try to write again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class InputError(ValueError):
    """The user's input cannot be used: the command exits with 2 and prints this one line.

    The line is ``where: key = given: allowed; hint``, without the parts that are empty; errors without a key use
    ``text``. The given value may contain anything, such as line breaks or terminal control codes.

    Attributes:
        text: the error, in free words.
        where: the file or other source of the input.
        key: the setting or argument; or the option, as ``--name``.
        given: its value; ``...``: the line does not show it.
        allowed: what is allowed, or why the value is not.
        hint: what to do instead.
        paste: lines to paste into a settings file, printed after the error's line.
    """

    def __init__(
        self,
        text: str = "",
        *,
        where: str = "",
        key: str = "",
        given: object = ...,
        allowed: str = "",
        hint: str = "",
        paste: str = "",
    ) -> None:
        self.text, self.where, self.key, self.given, self.allowed, self.hint = text, where, key, given, allowed, hint
        self.paste = paste
        subject = text if given is ... else _shown(key, given)
        line = ": ".join(part for part in (where, subject or key, allowed) if part)
        said = f"{line}; {hint}" if hint else line
        super().__init__("\n".join(map(printable, [said, *paste.splitlines()])))

    def replaced(self, **changes: Any) -> Self:
        """Return the same error with other parts, such as the option's name in place of the key."""
        names = ("text", "where", "key", "given", "allowed", "hint", "paste")
        return type(self)(**{name: getattr(self, name) for name in names} | changes)


_LONGEST_VALUE = 200  # characters of a wrong value that an error quotes


def _shown(key: str, given: object) -> str:
    """A key and its value as a file of settings has them, or an option as it was typed."""
    given = str(given) if isinstance(given, PurePath) else given
    if isinstance(given, bool):
        value = str(given).lower()
    elif isinstance(given, Integral):
        value = str(given)
    elif isinstance(given, Real):
        number = float(given)
        short = f"{number:g}"
        value = short if float(short) == number and len(short) < len(repr(number)) else repr(number)
    elif key.startswith("--") and isinstance(given, str):
        value = given
    else:
        value = repr(given)
    value = value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 4]} ..."
    return f"{key} {value}" if key.startswith("--") else f"{key} = {value}"


def optional(module: str, extra: str, user: str) -> Any:
    """Import a module of an extra; where it, or what it needs, is missing, the error names its user and the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"{user} needs {error.name}: pip install 'fedpriv[{extra}]'") from None


class RunFailedError(RuntimeError):
    """A run started and cannot continue: the command exits with 1 and prints this one line."""


class RefusedError(RuntimeError):
    """A client refuses a query that is not allowed; the text says nothing about its data."""


class RunInterruptedError(Exception):
    """The user stopped a run (Ctrl-C): the command exits with 130; the text says how to finish the run."""


def one_line(error: BaseException) -> str:
    """Return an exception's text without line breaks, or its type if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def reason_of(error: BaseException) -> str:
    """Return why one part of a larger task failed, with its notes, in one line; our own errors without their type."""
    said = " ".join([str(error), *getattr(error, "__notes__", ())])
    # A file's name may hold bytes that are no text, which no record can have.
    text = " ".join(said.split()).encode(errors="backslashreplace").decode()
    return text if isinstance(error, (InputError, RunFailedError)) else f"{type(error).__name__}: {text}"
