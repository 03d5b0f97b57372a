"""The command line: one module a command, and what they show on the terminal."""

import atexit
import gc
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; Ctrl-C is one line also while modules load, which takes up to a second."""
    atexit.register(_keep_garbage)
    try:
        from fedpriv.core.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.stderr.write("fedpriv: interrupted\n")
        sys.exit(130)


def _keep_garbage() -> None:
    """Python looks for garbage at its end, among all that PyTorch and Flower have made: more than a second of CPU time.

    Not kept where Triton is loaded, which PyTorch does for a few operations: it prints a list of what was not freed.
    """
    if "triton" not in sys.modules:
        gc.freeze()
