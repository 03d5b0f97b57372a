"""Arguments of the studies: what is wrong with one, or with a file that it names, is one line and exit code 2."""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from fedpriv.errors import InputError, drop_output


class StudyParser(argparse.ArgumentParser):
    """The parser of one study: ``with parser.parsed(arguments) as asked:`` around all its work."""

    def __init__(self, study: str, about: str | None) -> None:
        """Take the study's name, which is its module's, and what ``--help`` tells."""
        super().__init__(
            prog=f"python -m studies.{study}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """End with 2 and one line: the usage is what ``--help`` prints."""
        self.exit(2, f"{self.prog}: {message}\n")

    @contextmanager
    def parsed(self, arguments: Sequence[str] | None = None) -> Iterator[argparse.Namespace]:
        """Yield the arguments; an :class:`InputError` or ``OSError`` inside ends as a wrong argument does."""
        try:
            yield self.parse_args(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of our output went away (| head): leave without a word, as other tools do.
            drop_output()
            self.exit(1)
        except (InputError, OSError) as error:
            self.error(str(error))


def listed(allowed: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return an argument's type: names with commas between them, each of ``allowed``, each once."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is not known; allowed: {', '.join(allowed)}")
        return names

    return read


def whole(least: int) -> Callable[[str], int]:
    """Return an argument's type: a whole number of ``least`` or more."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number of {least} or more is wanted")
        return int(text)

    return read


def wholes(text: str) -> tuple[int, ...]:
    """Read whole numbers of 1 or more with commas between them: an argument's type."""
    return tuple(map(whole(1), text.split(",")))
