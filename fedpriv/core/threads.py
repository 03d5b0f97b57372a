"""How many CPU threads are computed with, and what of the freed memory they keep.

The number of threads changes sums in their last bits, so it is set on purpose wherever numbers are made: in clients, in
the server (which Ray runs in a thread of its own) and in attacks. For small models one thread is also the fastest.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FREED = 31 << 20  # bytes


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads inside the block, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Let glibc keep some tens of MiB of freed memory: its threshold follows the largest freed block below 32 MiB."""
    torch.empty(_FREED, dtype=torch.uint8)
