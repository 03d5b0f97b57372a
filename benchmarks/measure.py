"""What the benchmarks share: options, timing, peak memory, tables, and the file of the rows."""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from fedpriv.core.cli.terminal import table_of
from studies.arguments import StudyParser

T = TypeVar("T")
Way = TypeVar("Way", bound=Hashable)


def options(benchmark: str, about: str | None) -> StudyParser:
    """Return a parser with the option ``--json``."""
    parser = StudyParser(f"benchmarks.{benchmark}", about)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser


def save(path: Path | None, **content: Any) -> None:
    """Write JSON, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def report(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], words: int = 1) -> None:
    """Print a table of rows: each column has a heading, and a format of the row's keys such as ``{ms:.2f}``."""
    show(tuple(columns), [[text.format(**row) for text in columns.values()] for row in rows], words)


def show(headings: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> None:
    """Print a table whose first columns, as many as ``words``, are words, and the others figures."""
    Console().print(table_of(headings, (map(str, row) for row in rows), words))


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_turns(ways: Mapping[Way, Callable[[], float]], turns: int) -> dict[Way, list[float]]:
    """Let all ways take turns, so that whatever disturbs the machine hits all; each returns what it took."""
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, taken in ways.items():
            times[way].append(taken())
    return times


def medians(times: Mapping[Way, Sequence[float]]) -> dict[Way, float]:
    """Return the median of each way's times."""
    return {way: statistics.median(taken) for way, taken in times.items()}


def in_own_process(call: Callable[..., T], *arguments: Any) -> T:
    """Return what a function of a module returns in a fresh process, with this one's environment."""
    with multiprocessing.get_context("spawn").Pool(1) as alone:
        return alone.apply(call, arguments)
