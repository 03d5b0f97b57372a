"""What the benchmarks share: options, timing, peak memory, tables, and the file of the rows."""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option ``--json``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser


def save(path: Path | None, **content: Any) -> None:
    """Write JSON, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def show(headings: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> None:
    """Print a table whose first columns, as many as ``words``, are words, and the others figures."""
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < words else "right")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time that a call takes, of all threads of this process together."""
    began = time.process_time()
    call()
    return time.process_time() - began


def reset_peak() -> float:
    """Forget the highest resident memory so far, where the system can (Linux), and return the present one in MiB."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return peak_mib()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mib() -> float:
    """Return the highest resident memory of this process so far, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def in_own_process(call: Callable[..., T], *arguments: Any) -> T:
    """Return what a function of a module returns in a fresh process, with this one's environment."""
    with multiprocessing.get_context("spawn").Pool(1) as alone:
        return alone.apply(call, arguments)
