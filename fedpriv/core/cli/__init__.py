"""The command line: one module a command, and what they show on the terminal."""

import atexit
import sys

from fedpriv.core.cli.garbage import importing, keep_garbage

__all__ = ["main"]


def main() -> None:
    """Run the command line; Ctrl-C is one line also while modules load, which takes up to a second."""
    atexit.register(keep_garbage)
    try:
        with importing():
            from fedpriv.core.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.stderr.write("fedpriv: interrupted\n")
        sys.exit(130)
