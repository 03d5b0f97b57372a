"""One trial of a sweep: a run, an audit where it is asked for, and the record, which says that the trial is over.

No report is drawn: that takes longer than a small run.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from fedpriv.config import Experiment
from fedpriv.errors import InputError, RunFailedError
from fedpriv.lab.audit import audit_run
from fedpriv.lab.run import resume_run, start_run
from fedpriv.progress import Silent
from fedpriv.runs import RunFolder
from fedpriv.sweep import AuditConfig, SweepFolder, Trial, TrialRecord, read_record

__all__ = ["TrialTask", "label", "run_trial"]


@dataclass(frozen=True)
class TrialTask:
    """What a worker is told.

    Attributes:
        folder: of the sweep; on a cluster all machines have to see it under this name.
        trial: what to run.
        audit: how its membership is attacked; ``None``: not.
    """

    folder: Path
    trial: Trial
    audit: AuditConfig | None


def run_trial(task: TrialTask) -> TrialRecord:
    """Bring a trial to its record, from where an earlier start left it.

    Raises:
        InputError: the settings do not fit, or the sweep's folder is not on this machine.
        RunFailedError: run or audit could not be finished.
    """
    folder, number = SweepFolder.open(task.folder), task.trial.number
    with folder.trial_at_work(number):
        done = folder.record(number)
        if done is not None:
            return done
        began = time.monotonic()
        run = _run(folder.trial(number), task.trial.experiment)
        if task.audit is not None:
            _audit(run, task.audit)
        settings = task.trial.settings
        record = read_record(run, label(number), number, settings, seconds=time.monotonic() - began)
        folder.write_record(record)
        return record


def label(number: int) -> str:
    """What records call the folder of a trial: the same wherever the sweep's folder lies."""
    return f"trials/{number:04d}"


def _run(path: Path, experiment: Experiment) -> RunFolder:
    if (path / "config.toml").is_file():
        # Drawn on demand while the trial was unfinished: it would contradict the results.
        (path / "report.html").unlink(missing_ok=True)
        resume_run(path, Silent())
    else:
        # Killed before anything was computed.
        shutil.rmtree(path, ignore_errors=True)
        start_run(experiment, path, f"fedpriv run {path / 'config.toml'}", Silent())
    return RunFolder.open(path)


def _audit(run: RunFolder, audit: AuditConfig) -> None:
    try:
        audit_run(run, audit.references, audit.pairs, Silent())
    except RunFailedError as error:
        # A refuted ledger is a result, which the record shows as one; it is written before it is told.
        if not (run.path / "membership.json").is_file():
            raise error
    except InputError as error:
        raise InputError(f"the audit is refused: {error}") from None
