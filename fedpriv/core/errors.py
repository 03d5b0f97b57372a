"""The ways in which a command ends early."""

import os
import sys
from collections.abc import Sequence


def printable(text: str) -> str:
    """Return ``text`` with a space in place of every character that is not printable."""
    return "".join(character if character.isprintable() else " " for character in text)


def cut(text: str, most: int = 60) -> str:
    """Return ``text``, or its beginning where it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def some_of(names: Sequence[str], most: int = 8) -> str:
    """Return a list for an error line: the first names, each cut, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(cut(name) for name in names[:most]) + more


def drop_output() -> None:
    """Send what is still to be printed nowhere: Python would try once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class InputError(ValueError):
    """The user's input cannot be used: the command exits with 2 and prints this one line.

    What was given is often quoted in it, and may hold anything: line breaks, or codes that a terminal obeys.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class RunFailedError(RuntimeError):
    """A run started well and cannot go on: the command exits with 1 and prints this one line."""


class RefusedError(RuntimeError):
    """A client does not answer a question that nobody may ask; the text says nothing of its data."""


class RunInterruptedError(Exception):
    """The user stopped a run (Ctrl-C): the command exits with 130; the text says how to finish the run."""


def one_line(error: BaseException) -> str:
    """Return an exception's text without line breaks, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def reason_of(error: BaseException) -> str:
    """Return why a piece of a larger work failed, with its notes, in one line: our own errors speak for themselves."""
    said = " ".join([str(error), *getattr(error, "__notes__", ())])
    # A file's name may hold bytes that are no text, which no record can have.
    text = " ".join(said.split()).encode(errors="backslashreplace").decode()
    return text if isinstance(error, (InputError, RunFailedError)) else f"{type(error).__name__}: {text}"
