"""Arguments of studies and benchmarks: a wrong one, or a wrong file that it names, is one line and exit code 2."""

import argparse
import ast
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from fedpriv.core.errors import InputError, cut, drop_output, printable
from fedpriv.core.files import is_disk
from fedpriv.core.registry import suggestion

_ROOT = Path(__file__).parents[1]
_OURS = ("attacks", "benchmarks", "clients", "fedpriv", "server", "studies")
_MOST_DIGITS = 18
_ROLE = re.compile(r":[a-z]+:`([^`]*)`|``([^`]*)``")


def run(package: str) -> None:
    """Run the module that the command line names, of those in a package whose ``main`` has a parser of its own."""
    known = runnable(package)
    about = "\n".join(f"{name:<18}{line}" for name, line in known.items())
    parser = StudyParser(package, f"Run one of these; python -m {package} NAME --help lists its options.\n\n{about}")
    parser.add_argument("name", metavar="NAME")
    with parser.parsed(sys.argv[1:2] or ["--help"]) as asked:
        if asked.name not in known:
            raise InputError(f"there is no {asked.name!r}{suggestion(asked.name, tuple(known))}")
        del sys.argv[1]
        parser.prog += f" {asked.name}"
        import_module(f"{package}.{asked.name}").main()


def runnable(package: str) -> dict[str, str]:
    """Return the modules of a package that :func:`run` runs, each with the first line about it."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((_ROOT / package).glob("*.py"))}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        for name, text in texts.items()
        if "\ndef main(" in text and ("StudyParser(" in text or "options(" in text)
    }


class StudyParser(argparse.ArgumentParser):
    """The parser of a study or benchmark: ``with parser.parsed(arguments) as asked:`` around all its work."""

    def __init__(self, module: str, about: str | None) -> None:
        """Take the module's name, and its docstring, which ``--help`` tells."""
        super().__init__(
            prog=f"python -m {module.replace('.', ' ')}",
            description=_ROLE.sub(lambda found: found[1] or found[2], about or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    @override
    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Add an argument whose help says its default, where it has one."""
        if settings.get("default", argparse.SUPPRESS) not in (argparse.SUPPRESS, None, "", ()):
            settings["help"] = f"{settings.get('help', '')} (default: %(default)s)".strip()
        return super().add_argument(*names, **settings)

    @contextmanager
    def parsed(self, arguments: Sequence[str] | None = None) -> Iterator[argparse.Namespace]:
        """Yield the arguments; inside, an :class:`InputError` or ``OSError`` ends as a wrong argument does.

        So does a package that is not installed: some need what only the developers' tools bring.
        """
        try:
            yield self.parse_args(arguments)
            sys.stdout.flush()
        except InputError as error:
            self.error(str(error))
        except OSError as error:
            if error.filename is None and (isinstance(error, BrokenPipeError) or is_disk(error)):
                self._without_output(error)
            self.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in _OURS:
                raise
            self.error(f"needs {error.name}, which is not installed: pip install 'fedpriv[dev]'")
        except KeyboardInterrupt:
            self.exit(130, f"{self.prog}: interrupted\n")

    def error(self, message: str) -> NoReturn:
        """End with 2 and one line: the usage is what ``--help`` prints."""
        self.exit(2, f"{self.prog}: {printable(message)}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End, with what was printed before; where nobody takes it any more, with 1."""
        try:
            sys.stdout.flush()
        except OSError as error:
            if not status:
                self._without_output(error)
            drop_output()
        super().exit(status, message)

    def _without_output(self, error: OSError) -> NoReturn:
        """End where what is printed cannot be written: without a word if its reader went away (| head)."""
        drop_output()
        gone = isinstance(error, BrokenPipeError)
        super().exit(1, None if gone else f"{self.prog}: the output cannot be written: {error.strerror or error}\n")


def listed(allowed: Collection[str], least: int = 1) -> Callable[[str], tuple[str, ...]]:
    """Return an argument's type: ``least`` names or more with commas between them, of ``allowed``, each once."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{cut(name)!r} is not known; allowed: {', '.join(allowed)}")
        if len(names) < least:
            raise argparse.ArgumentTypeError(f"no name is given; allowed: {', '.join(allowed)}")
        return names

    return read


def whole(least: int) -> Callable[[str], int]:
    """Return an argument's type: a whole number of ``least`` or more, of at most 18 digits."""

    def read(text: str) -> int:
        readable = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
        if not readable or int(text) < least:
            raise argparse.ArgumentTypeError(f"{cut(text)!r}: expected a whole number of {least} or more")
        return int(text)

    return read


def wholes(text: str) -> tuple[int, ...]:
    """Read whole numbers of 1 or more with commas between them: an argument's type."""
    return tuple(map(whole(1), text.split(",")))
