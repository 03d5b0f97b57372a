"""The folder of a sweep: its plan, a run's folder for each trial, and the results.

::

    sweeps/NAME/
      sweep.json                   the trials; another sweep is refused here
      command.txt
      trials/0001/                 the folder of a run, with record.json once the trial is over, and traceback.txt
                                   where an unexpected error ended it
      results.parquet, results.csv
      report.html

A trial is finished once its record.json exists; it is written last, and atomically.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedpriv.core.errors import InputError, RunFailedError, RunInterruptedError
from fedpriv.core.files import as_json, is_empty, locked, remove_parts, write_whole, writing_to
from fedpriv.core.reading import parse_json, read_file, read_text
from fedpriv.core.runs import Files
from fedpriv.sweep.record import TrialRecord, to_csv, to_parquet, to_table
from fedpriv.sweep.settings import Sweep


@dataclass(frozen=True)
class _Plan:
    """sweep.json: the name, and :meth:`Sweep.identity`."""

    name: str
    audit: dict[str, Any] | None
    trials: list[dict[str, Any]]


_RECORD_FILE, _TRACEBACK_FILE = "record.json", "traceback.txt"


class SweepFolder(Files):
    """The folder of one sweep; :meth:`prepare` makes it or resumes it, :meth:`open` reads it.

    What is damaged, is another sweep's or cannot be written is an ``InputError``, a full disk a ``RunFailedError``.
    """

    verb: ClassVar[str] = "sweep"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.trials = path / "trials"  # the folders of the runs
        self._plan = path / "sweep.json"

    @staticmethod
    def prepare(path: Path, sweep: Sweep) -> "SweepFolder":
        """Make the folder of a sweep, or open it to resume the sweep; one with anything else in it is refused."""
        folder = SweepFolder(path)
        content = as_json({"name": sweep.name, **sweep.identity()})
        with writing_to(path):
            if folder._plan.is_file():
                folder._refuse_another(parse_json(content, _Plan, str(folder._plan)))
            elif path.exists() and not is_empty(path):
                raise InputError(f"{path} exists and is not the folder of a sweep; choose another --out")
            else:
                path.mkdir(parents=True, exist_ok=True)
                write_whole(folder._plan, content, durable=True)
            folder.trials.mkdir(exist_ok=True)
        return folder

    @staticmethod
    def open(path: Path) -> "SweepFolder":
        """Return the folder of an earlier sweep."""
        folder = SweepFolder(path)
        if not folder._plan.is_file():
            raise InputError(f"{path} is not the folder of a sweep: it has no sweep.json")
        return folder

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self._planned().name

    @property
    def planned(self) -> int:
        """How many trials the sweep has."""
        return len(self._planned().trials)

    def write_command(self, text: str) -> None:
        """Write the command that repeats the sweep."""
        with writing_to(self.path):
            self.write_text("command.txt", f"{text}\n")

    def trial(self, number: int) -> Path:
        """The folder of a trial's run."""
        return self.trials / f"{number:04d}"

    def record(self, number: int) -> TrialRecord | None:
        """The record of a trial; ``None``: it is not finished."""
        path = self.trial(number) / _RECORD_FILE
        text = read_text(path)
        if text is None:
            return None
        try:
            record = parse_json(text, TrialRecord, str(path))
        except InputError as error:
            raise InputError(f"{error}; remove it, and the sweep writes it again") from None
        if record.trial != number:
            raise InputError(f"{path} is that of trial {record.trial}; remove it, and the sweep writes it again")
        return record

    def records(self) -> list[TrialRecord]:
        """The records of all finished trials, in their order."""
        numbers = range(1, self.planned + 1)
        return [record for number in numbers if (record := self.record(number)) is not None]

    def write_record(self, record: TrialRecord) -> None:
        """Write a trial's record, which marks it as finished."""
        path = self.trial(record.trial)
        path.mkdir(parents=True, exist_ok=True)
        write_whole(path / _RECORD_FILE, as_json(record.model_dump(mode="json")), durable=True)

    def forget_record(self, number: int) -> None:
        """Delete a trial's record, so that the trial runs again."""
        for name in (_RECORD_FILE, _TRACEBACK_FILE):
            path = self.trial(number) / name
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise InputError(f"{path} cannot be removed: {error.strerror}") from None

    @contextmanager
    def traceback_kept(self, number: int) -> Iterator[None]:
        """Write the traceback of an unexpected error to the trial's folder: the record has one line of it."""
        try:
            yield
        except (InputError, RunFailedError, RunInterruptedError):
            raise
        except Exception as error:
            text = traceback.format_exc().encode(errors="backslashreplace")
            try:
                self.trial(number).mkdir(exist_ok=True)
                write_whole(self.trial(number) / _TRACEBACK_FILE, text)
            except OSError as lost:
                # The disk may be what fails. The first error is the trial's reason, with this beside it.
                error.add_note(f"(no {_TRACEBACK_FILE}: {lost.strerror})")
            raise

    def write_results(self, records: Sequence[TrialRecord]) -> None:
        """Write the records as results.parquet and results.csv."""
        table = to_table(records)
        self.write_bytes("results.parquet", to_parquet(table))
        self.write_bytes("results.csv", to_csv(table))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Lock the folder against other processes; the operating system releases the lock when this one ends."""
        with locked(self.path):
            remove_parts(self.path)  # in the trials' folders, a worker of a killed sweep may still write
            yield

    def trial_at_work(self, number: int) -> AbstractContextManager[None]:
        """Wait until no worker of a killed sweep uses the trial's folder, and lock it."""
        return locked(self.trial(number), file=self.trials / f".{number:04d}.lock", wait=True)

    def _planned(self) -> _Plan:
        plan = read_file(self._plan, _Plan)
        if plan is None:
            raise InputError(f"{self.path} is not the folder of a sweep: it has no sweep.json")
        return plan

    def _refuse_another(self, wanted: _Plan) -> None:
        held = self._planned()
        if held == wanted:
            return
        raise InputError(
            f"{self.path} holds the results of another sweep ({_difference(held, wanted)}); choose another --out"
        )


def _difference(held: _Plan, wanted: _Plan) -> str:
    """What tells two sweeps apart, in a few words."""
    if held.name != wanted.name:
        return f"{held.name!r}, not {wanted.name!r}"
    if held.audit != wanted.audit:
        return "with another audit"
    if len(held.trials) != len(wanted.trials):
        return f"of {len(held.trials)} trials, not {len(wanted.trials)}"
    pairs = zip(held.trials, wanted.trials, strict=True)
    number = next(place for place, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return f"its trial {number} has other settings"
