"""The live view of a run: bars and figures in a terminal, plain lines in a log file or a pipe."""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

from rich import progress as bars
from rich.console import Console
from rich.table import Column

from fedpriv.core.cli.terminal import print_warning
from fedpriv.core.numbers import duration
from fedpriv.core.progress import Progress, Silent
from fedpriv.core.records import RoundRecord, Stop, named_members, shown_epsilon
from fedpriv.core.settings import enumerated

_LINES_PER_RUN = 10
_LONG = 60  # seconds from which it is said after the second round how long the others take
_SURE = 5  # seconds of an attack from which the rest is extrapolated
_CLIENTS_NAMED = 8


class _First(NamedTuple):
    """When an attack reported how far it is for the second time, and how far it was."""

    seconds: float
    done: int


class Display(Progress):
    """Shows a run on ``console``: a bar a stage on a terminal, else about ten lines; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = bars.Progress(
            bars.SpinnerColumn(),
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(bar_width=8, table_column=Column(no_wrap=True)),
            bars.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            bars.TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
            # The only column that gives way where the line is too short for all.
            bars.TextColumn("{task.fields[figures]}", markup=False, table_column=Column()),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, bars.TaskID] = {}
        self._rounds = 0  # that were seen
        # Parts of attacks, each known by its attack and its iterations in all.
        self._started: set[tuple[str, int]] = set()  # that reported
        self._firsts: dict[tuple[str, int], _First] = {}
        self._tenths: dict[tuple[str, int], int] = {}  # of long ones, the last tenth that was printed

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage(self, title: str) -> None:
        """Print the stage's title."""
        self._print(title, "dim")

    def round_finished(self, record: RoundRecord, rounds: int) -> None:
        """Advance the bar of the rounds; name every client that was left out."""
        for failure in record.failures:
            self.warn(f"round {record.round}: client {failure.client} left out: {failure.reason}")
        figures = "not evaluated"
        if record.accuracy is not None and record.loss is not None:
            figures = f"accuracy {record.accuracy:.1%}  loss {record.loss:.3f}"
        if record.client_accuracy is not None:
            figures += f"  clients {record.client_accuracy.median:.1%}, worst {record.client_accuracy.worst:.1%}"
        if record.epsilon is not None:
            # While a run goes on, cheaper bounds are computed than for its final ledger, which proves less or as much.
            figures += f"  ε ≤ {shown_epsilon(record.epsilon)} (quick)"
        self._rounds += 1
        left = (rounds - record.round) * record.seconds
        if self._rounds == 2 and left >= _LONG:
            self.stage(f"{rounds - record.round} more rounds take about {duration(left)}")
        self._advance("rounds", record.round, rounds, figures)
        if not self._console.is_terminal and record.round % max(1, rounds // _LINES_PER_RUN) == 0:
            self._print(f"round {record.round} of {rounds}: {figures}")

    def clients_stopped(self, round_number: int, stops: Sequence[Stop], left: int) -> None:
        """Print which clients stop, and how many go on."""
        stopped = sum(stop.count for stop in stops)
        clients = named_members([part for stop in stops for part in stop.ranges], _CLIENTS_NAMED)
        who = f"client {clients} stops" if stopped == 1 else f"clients {clients} stop"
        targets = enumerated([f"federation.{key}" for key in sorted({stop.target for stop in stops})], "and")
        self.stage(f"round {round_number}: {who} at {targets}; {left} left")

    def attack_advanced(self, name: str, done: int, total: int, loss: float) -> None:
        """Advance the bar of one attack; of a long one print once how long it takes, and in a log how far it is."""
        figures = "" if math.isnan(loss) else f"loss {loss:.2e}"
        self._advance(name, done, total, figures)
        part = name, total  # the parts of an attack take different times for each of their iterations
        if part not in self._started:  # before its second call an attack may have been compiled
            self._started.add(part)
            return
        first = self._firsts.setdefault(part, _First(time.monotonic(), done))
        spent, made = time.monotonic() - first.seconds, done - first.done
        if part not in self._tenths:
            left = spent * (total - done) / max(1, made)
            if made > 0 and spent >= _SURE and left >= _LONG:
                self.stage(f"{name}: {total - done} more iterations take about {duration(left)}")
                self._tenths[part] = 10 * done // total
        elif 10 * done // total > self._tenths[part] and not self._console.is_terminal:
            self.stage(", ".join(filter(None, [f"{name}: iteration {done} of {total}", figures])))
            self._tenths[part] = 10 * done // total

    def advanced(self, what: str, done: int, total: int) -> None:
        """Advance the bar of a piece of work."""
        self._advance(what, done, total, "")

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._print(f"warning: {text}", "yellow")

    def _print(self, text: str, style: str | None = None) -> None:
        """Print a line, wrapped on a terminal and whole elsewhere."""
        whole = not self._console.is_terminal
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=whole)

    def _advance(self, name: str, done: int, total: int, figures: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, figures="")
        self._bars.update(self._tasks[name], completed=done, total=total, figures=figures)


class Warnings(Silent):
    """Prints warnings only: they belong to the result."""

    def warn(self, text: str) -> None:
        """Print a warning."""
        print_warning(text)
