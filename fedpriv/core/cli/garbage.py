"""When Python looks for garbage: not among the million objects that importing PyTorch and Flower makes."""

import gc
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
    """Never look among the objects of now, as Python would do at its end: more than a second of CPU time.

    Not kept where Triton is loaded, which PyTorch does for a few operations: it prints a list of what was not freed.
    """
    if "triton" not in sys.modules:
        gc.freeze()
