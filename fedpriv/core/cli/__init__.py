"""The command line: one module a command, and what they show on the terminal."""

import atexit
import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Do not look for garbage while modules load, or among them later: it takes a seventh of a short run."""
    gc.disable()
    try:
        yield
    finally:
        keep_garbage()
        gc.enable()


def keep_garbage() -> None:
    """Skip Python's search for garbage at its end: a second of CPU time; not where Triton lists what was not freed."""
    if "triton" not in sys.modules:
        gc.freeze()


def main() -> None:
    """Run the command line; Ctrl-C is one line also while modules load, which takes up to a second.

    SIGTERM, by which schedulers and containers end a process, is as good as Ctrl-C.
    """
    atexit.register(keep_garbage)
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with importing():
            from fedpriv.core.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.stderr.write("fedpriv: interrupted\n")
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, usual)
