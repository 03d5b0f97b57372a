"""The live table of a sweep: what runs, what came out last, what is left; plain lines where nobody watches."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedpriv.core.errors import cut
from fedpriv.core.numbers import several
from fedpriv.core.report.filters import plain
from fedpriv.sweep.comparison import choose_attacks, columns_of, statements
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.record import SweepProgress, TrialRecord
from fedpriv.sweep.run import Kind
from fedpriv.sweep.settings import Trial, plain_settings

_LAST_SHOWN = 10
_REFRESH = 2.0
_LONGEST = 30  # characters of one value, such as the columns of a table
_WIDEST = 1000
_WORDS = ("settings", "first of its kind")  # columns that wrap


class SweepDisplay(SweepProgress):
    """Shows a sweep on ``console``; use it as a context manager."""

    def __init__(
        self, console: Console, folder: SweepFolder, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._folder = folder
        self._total = total
        self._clock = clock
        self._running: dict[int, tuple[Trial, float]] = {}
        self._ended: list[TrialRecord] = []
        self._durations: list[float] = []
        self._most_at_once = 1
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._began = clock()
        self._shown = -_REFRESH

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def found(self, records: Sequence[TrialRecord]) -> None:
        """Count trials that were over before."""
        self._ended += records
        if records:
            self._say(f"{len(records)} of {self._total} trials were over before")

    def started(self, trial: Trial) -> None:
        """Show a trial that runs."""
        self._running[trial.number] = (trial, self._clock())
        self._most_at_once = max(self._most_at_once, len(self._running))
        self._refresh()

    def ended(self, record: TrialRecord) -> None:
        """Show a trial's result, and how long the rest will take."""
        trial, began = self._running.pop(record.trial)
        self._durations.append(self._clock() - began)
        self._ended.append(record)
        if not self._console.is_terminal:
            self._say(f"trial {record.trial} ({plain_settings(trial.settings)}): {_outcome(record)}; {self.headline()}")
        self._refresh()

    def tick(self) -> None:
        """Show that time goes by."""
        if self._clock() - self._shown >= _REFRESH:
            self._refresh()

    def headline(self) -> str:
        """What is done and the time left."""
        failed = sum(record.failed for record in self._ended)
        parts = [f"{len(self._ended)} of {self._total} trials finished"]
        parts += [f"{failed} failed"] if failed else []
        parts += [f"{len(self._running)} running"] if self._running else []
        left = self.seconds_left()
        parts += [f"about {_clock_text(left)} left"] if left is not None and len(self._ended) < self._total else []
        return ", ".join(parts)

    def seconds_left(self) -> float | None:
        """Estimate from the trials of this start: their mean duration, as many at once as there were at most."""
        if not self._durations:
            return None
        mean = statistics.fmean(self._durations)
        now = self._clock()
        going = sum(max(0.0, mean - (now - began)) for _, began in self._running.values())
        waiting = self._total - len(self._ended) - len(self._running)
        return (going + mean * waiting) / self._most_at_once

    def table(self) -> Table:
        """What runs and what came out last."""
        table = _empty("settings", "accuracy", "ε", "time")
        for record in self._ended[-_LAST_SHOWN:]:
            table.add_row(*_cells(record), style=_style(record))
        for number, (trial, began) in self._running.items():
            state = f"round {self._round(number)} of {trial.experiment.federation.rounds}"
            text = f"{state}: {_short(trial.settings, trial.seed)}"
            table.add_row(str(number), Text(text), "", "", _clock_text(self._clock() - began), style="bold")
        return table

    def _round(self, number: int) -> int:
        path = self._folder.trial(number) / "metrics.jsonl"
        # One line a round, and one for the model before training.
        return max(0, path.read_bytes().count(b"\n") - 1) if path.is_file() else 0

    def _refresh(self) -> None:
        self._shown = self._clock()
        if self._console.is_terminal:
            gone = Text(f"{self.headline()}; {_clock_text(self._shown - self._began)} gone", style="bold")
            self._live.update(Group(self.table(), gone), refresh=True)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_results(records: Sequence[TrialRecord], console: Console) -> None:
    """Print every trial; where the figures need more than the terminal's width, its lines wrap, and none is cut."""
    table = result_table(records)
    least = console.measure(table, options=console.options.update(width=_WIDEST)).minimum
    table.width = least if least > console.width else None
    console.print(table, crop=False)
    deltas = {record.delta for record in records if record.epsilon is not None}
    if len(deltas) > 1 or len(statements(records)) > 1:
        console.print("ε: several statements (δ, adjacency, or against whom), not to be compared; report.html has them")


def result_table(records: Sequence[TrialRecord]) -> Table:
    """Return every trial with its main figures; columns that no trial has are left out, so that 80 columns do."""
    figures = {heading: cells for heading, cells in _measured(records).items() if any(map(str, cells))}
    table = _empty("settings", "accuracy", "ε", *figures, "time")
    for place, record in enumerate(records):
        *head, seconds = _cells(record)
        table.add_row(*head, *(cells[place] for cells in figures.values()), seconds, style=_style(record))
    return table


def cost_table(kinds: Sequence[Kind]) -> Table:
    """Return what the trials of each kind take; a kind is shown by the settings of its first trial."""
    table = _empty("first of its kind", "trials", "CPU each", "all", "disk")
    for kind in kinds:
        first = kind.trials[0]
        table.add_row(
            str(first.number), Text(_short(first.settings, first.seed)), str(len(kind.trials)),
            _clock_text(kind.each.seconds), _clock_text(kind.all.seconds), decimal(round(kind.all.size)),
        )  # fmt: skip
    return table


def cost_sentences(kinds: Sequence[Kind], untimed: Sequence[str], cores: int) -> list[str]:
    """Say what all trials take together, and what is not in it."""
    seconds, size = sum(kind.all.seconds for kind in kinds), sum(kind.all.size for kind in kinds)
    trials = sum(len(kind.trials) for kind in kinds)
    beside = [f"Not included: {', '.join(untimed)}."] if untimed else []
    taken = f"{several(trials, 'trial')}: {_clock_text(seconds)} of CPU time"
    clock = f"with {cores} cores busy {_clock_text(seconds / cores)} by the clock"
    return [f"{taken}, {decimal(round(size))} on disk; {clock}.", *beside]


def _measured(records: Sequence[TrialRecord]) -> dict[str, list[str | Text]]:
    """Heading -> a cell for each trial: the least MSE of all attacks, and what findings show."""
    return {
        column.heading: [
            Text(text, style="bold red" if column.alarm(place) else "") for place, text in enumerate(column.texts)
        ]
        for column in columns_of(records, choose_attacks(records))
    }


def _empty(*headings: str) -> Table:
    """A table for 80 columns: the settings take what the figures leave, and wrap."""
    table = Table(box=None, pad_edge=False)
    table.add_column("trial", justify="right")
    for heading in headings:
        words = heading in _WORDS
        table.add_column(
            heading, justify="left" if words else "right", overflow="fold", no_wrap=not words,
            min_width=20 if words else None,
        )  # fmt: skip
    return table


def _cells(record: TrialRecord) -> tuple[str | Text, ...]:
    state = next((f": {what}" for what, _ in record.alarms), "")
    state = ": failed" if record.failed else state
    return (
        str(record.trial),
        Text(_short(record.settings, record.seed) + state),
        "" if record.accuracy is None else f"{record.accuracy:.1%}",
        "" if record.epsilon is None else f"{record.epsilon:.4g}",
        "" if record.seconds is None else _clock_text(record.seconds),
    )


def _style(record: TrialRecord) -> str:
    return "red" if record.failed or record.wrong else ""


def _short(settings: Mapping[str, Any], seed: int) -> str:
    """Settings without their sections, where that leaves no doubt: mechanism.name=vmf, kappa=5, seed=1."""
    leaves = [key.rpartition(".")[2] for key in settings]
    names = [
        leaf if leaves.count(leaf) == 1 and leaf != "name" else key for leaf, key in zip(leaves, settings, strict=True)
    ]
    parts = [f"{name}={cut(plain(value), _LONGEST)}" for name, value in zip(names, settings.values(), strict=True)]
    return ", ".join([*parts, f"seed={seed}"])


def _outcome(record: TrialRecord) -> str:
    if record.failed:
        return f"failed: {record.reason}"
    parts = ["completed"]
    parts += [f"accuracy {record.accuracy:.1%}"] if record.accuracy is not None else []
    parts += [f"ε {record.epsilon:.4g}"] if record.epsilon is not None else []
    parts += [f"{what}: {alarm}" for what, alarm in record.alarms]
    return ", ".join(parts)


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
