"""The command line: one module a command, and what they show on the terminal."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; Ctrl-C is one line also while modules load, which takes up to a second."""
    try:
        from fedpriv.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.stderr.write("fedpriv: interrupted\n")
        sys.exit(130)
