"""The ways in which a command ends early."""


def printable(text: str) -> str:
    """Return ``text`` with a space in place of every character that is not printable."""
    return "".join(character if character.isprintable() else " " for character in text)


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
    """Return why a piece of a larger work failed, in one line: our own errors speak for themselves."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (InputError, RunFailedError)) else f"{type(error).__name__}: {text}"
