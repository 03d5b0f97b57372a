"""The folder of a sweep: what is to be done, a run's folder for each trial, and the results.

::

    sweeps/NAME/
      sweep.json                   the trials; another sweep is refused here
      command.txt
      trials/0001/                 the folder of a run, with record.json once the trial is over
      results.parquet, results.csv
      report.html

A trial is over when its record.json is there, which is written last and appears whole.
"""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fedpriv.errors import InputError
from fedpriv.runs import RunFolder, parse_json
from fedpriv.sweep.file import Sweep
from fedpriv.sweep.record import TrialRecord
from fedpriv.sweep.table import to_csv, to_parquet, to_table

__all__ = ["SweepFolder"]

_RECORD, _SWEEP = TypeAdapter(TrialRecord), TypeAdapter(dict[str, Any])
_RECORD_FILE = "record.json"


class SweepFolder:
    """The folder of one sweep; :meth:`prepare` makes it or takes it up again, :meth:`open` reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def prepare(path: Path, sweep: Sweep) -> "SweepFolder":
        """Make the folder of a sweep, or return it as it was left.

        Raises:
            InputError: it holds something else, or results of another sweep, or cannot be made.
        """
        folder = SweepFolder(path)
        wanted = {"name": sweep.name, **json.loads(json.dumps(sweep.identity()))}
        if folder._plan.is_file():
            folder._refuse_another(wanted)
            return folder
        try:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise InputError(f"{path} exists and is not the folder of a sweep; choose another --out")
            folder.trials.mkdir(parents=True, exist_ok=True)
            folder._write("sweep.json", (json.dumps(wanted, indent=2) + "\n").encode())
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None
        return folder

    @staticmethod
    def open(path: Path) -> "SweepFolder":
        """Return the folder of an earlier sweep.

        Raises:
            InputError: it is not one.
        """
        folder = SweepFolder(path)
        if not folder._plan.is_file():
            raise InputError(f"{path} is not the folder of a sweep: it has no sweep.json")
        return folder

    @property
    def trials(self) -> Path:
        """Where the runs' folders lie."""
        return self.path / "trials"

    @property
    def _plan(self) -> Path:
        return self.path / "sweep.json"

    @property
    def name(self) -> str:
        """The sweep's name."""
        return str(self._planned().get("name", self.path.name))

    def command(self) -> str:
        """The command that repeats the sweep, or goes on with it."""
        path = self.path / "command.txt"
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    def write_command(self, text: str) -> None:
        """Keep the command that repeats the sweep."""
        self._write("command.txt", f"{text}\n".encode())

    def trial(self, number: int) -> Path:
        """The folder of a trial's run."""
        return self.trials / f"{number:04d}"

    def record(self, number: int) -> TrialRecord | None:
        """The record of a trial; ``None``: it is not over.

        Raises:
            InputError: the file is damaged.
        """
        path = self.trial(number) / _RECORD_FILE
        return parse_json(path.read_bytes(), _RECORD, str(path)) if path.is_file() else None

    def records(self) -> list[TrialRecord]:
        """The records of all trials that are over, in their order.

        Raises:
            InputError: a file is damaged.
        """
        numbers = range(1, len(self._planned().get("trials", ())) + 1)
        return [record for number in numbers if (record := self.record(number)) is not None]

    def write_record(self, record: TrialRecord) -> None:
        """Say that a trial is over."""
        path = self.trial(record.trial)
        path.mkdir(parents=True, exist_ok=True)
        RunFolder(path).write_json(_RECORD_FILE, record.model_dump(mode="json"))

    def forget_record(self, number: int) -> None:
        """Have a trial made again."""
        (self.trial(number) / _RECORD_FILE).unlink(missing_ok=True)

    def write_results(self, records: Sequence[TrialRecord]) -> None:
        """Write the records as results.parquet and results.csv."""
        table = to_table(records)
        self._write("results.parquet", to_parquet(table))
        self._write("results.csv", to_csv(table))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep other processes from running the same sweep here; the operating system lets go when this one ends.

        Raises:
            InputError: another one does.
        """
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{self.path}: another process runs this sweep") from None
            yield

    @contextmanager
    def trial_at_work(self, number: int) -> Iterator[None]:
        """Wait until no worker of a killed sweep is left in the trial's folder, and keep others out of it."""
        with (self.trials / f".{number:04d}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _planned(self) -> dict[str, Any]:
        return parse_json(self._plan.read_bytes(), _SWEEP, str(self._plan))

    def _refuse_another(self, wanted: dict[str, Any]) -> None:
        held = self._planned()
        if held == wanted:
            return
        raise InputError(
            f"{self.path} holds the results of another sweep ({_difference(held, wanted)}); choose another --out"
        )

    def _write(self, name: str, content: bytes) -> None:
        temporary = self.path / f".{name}.part"
        temporary.write_bytes(content)
        temporary.replace(self.path / name)


def _difference(held: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What tells two sweeps apart, in a few words."""
    if held.get("name") != wanted["name"]:
        return f"{held.get('name')!r}, not {wanted['name']!r}"
    if held.get("audit") != wanted["audit"]:
        return "with another audit"
    theirs, ours = held.get("trials", []), wanted["trials"]
    if len(theirs) != len(ours):
        return f"of {len(theirs)} trials, not {len(ours)}"
    number = next(place for place, pair in enumerate(zip(theirs, ours, strict=True), 1) if pair[0] != pair[1])
    return f"its trial {number} has other settings"
