"""How many CPU threads are computed with, which changes sums' last bits, and what of freed memory they keep."""

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
