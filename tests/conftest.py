"""What several rooms' tests share, and which of them are slow.

``make test`` leaves slow tests out, but for the essential ones. Slow is what carries the mark, and what
``tests/slow.txt`` lists: the tests that took SLOW seconds of CPU time or more when ``make slow`` last measured all.
A run names those that became so since.
"""

import gc
import logging
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests import command_line

# Ray runs its workers at nice 15: on a busy machine a test on Ray would wait for all the others.
os.environ.setdefault("RAY_worker_niceness", "0")

os.environ["FEDPRIV_CACHE"] = ""  # tests of what is kept name a folder

# Without a GPU, programs of Triton are run by its interpreter, which has to be known before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# To compile headers for later kernels takes half the time of a test that has one kernel.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

command_line.never_synced()

LISTED = Path(__file__).with_name("slow.txt")
SLOW = 0.5  # CPU seconds, those of processes that the test started and waited for included
NAMED = 1.5  # what takes half a second here may take a second elsewhere


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--list-slow", action="store_true", help=f"write {LISTED.name} anew from what the tests take")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """What is collected stays until the end: to look through all of it for garbage takes a quarter of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)  # as often as by default it would take one second of 25
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    listed = set(LISTED.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    items[:] = _slow_first(items, getattr(config, "workerinput", {}).get("workercount", 1))


def _slow_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Each of the equal parts that the workers begin with has its share of the slow modules, the longest ones first.

    Otherwise one worker is left with a test of a minute while the others have nothing to take over. A module stays
    together, since what its tests share is made anew where another module's test comes between them.
    """
    longest = list(dict.fromkeys(item.path for item in items if item.get_closest_marker("long")))
    modules = {item.path for item in items if item.get_closest_marker("slow")}.difference(longest)
    slow = [item for item in items if item.path in modules]
    fast = [item for item in items if item.path not in modules.union(longest)]
    cut = [(place * len(slow) // workers, place * len(fast) // workers) for place in range(workers + 1)]
    first = [[item for item in items if item.path in longest[number::workers]] for number in range(workers)]
    parts = zip(first, pairwise(cut), strict=True)
    return [item for begun, ((a, b), (c, d)) in parts for item in (*begun, *slow[a:c], *fast[b:d])]


class Deprecated(logging.Handler):
    """What Flower says of itself: it logs, and raises no warning."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "deprecated" in record.getMessage().lower():
            self.said.append(record.getMessage())


@pytest.fixture(autouse=True)
def deprecated() -> Iterator[list[str]]:
    """No test may use what Flower is about to remove."""
    handler, logger = Deprecated(), logging.getLogger("flwr")
    logger.setLevel(logging.INFO)  # as Flower does: an audit in this process is quieter
    logger.addHandler(handler)
    yield handler.said
    logger.removeHandler(handler)
    assert not handler.said


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.user_properties.append(("slow", item.get_closest_marker("slow") is not None))
    item.user_properties.append(("began", _spent()))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    began = dict(item.user_properties)["began"]
    report.user_properties = [*item.user_properties, ("cpu", _spent() - began)]
    return report


def _spent() -> float:
    return sum(os.times()[:4]) + command_line.spent()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Reports of every phase reach the terminal's process, also from other workers; the last one has the whole time."""
    taken: dict[str, tuple[float, bool]] = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        known = dict(getattr(report, "user_properties", ()))
        if "cpu" in known:
            taken[report.nodeid] = max((known["cpu"], known["slow"]), taken.get(report.nodeid, (0.0, False)))
    if config.getoption("--list-slow"):
        slow = sorted(name for name, (seconds, _) in taken.items() if seconds >= SLOW)
        LISTED.write_text("".join(f"{name}\n" for name in slow), encoding="utf-8")
    grown = sorted((seconds, name) for name, (seconds, slow) in taken.items() if not slow and seconds >= NAMED)
    if grown:
        terminalreporter.section(f"not marked slow, and took {NAMED} CPU seconds or more (make slow)")
        for seconds, name in reversed(grown):
            terminalreporter.line(f"{seconds:6.1f} s {name}")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets that FEDPRIV_DATA names; tests that need it are skipped without."""
    folder = os.environ.get("FEDPRIV_DATA")
    if not folder:
        pytest.skip("FEDPRIV_DATA is not set: it names a folder with the data sets")
    return Path(folder)
