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
    """Skip Python's search for garbage at its end: a second of CPU time; not where Triton lists what was not freed."""
    if "triton" not in sys.modules:
        gc.freeze()
