"""Run a sweep: what is missing of it, trial by trial without reports, and the tables of what there is."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from fedpriv.attacks.references import mapped_network, refuse_unaudited
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, RunInterruptedError, reason_of
from fedpriv.core.files import writing
from fedpriv.core.finding import findings
from fedpriv.core.lab.preflight import rehearse, warnings_for
from fedpriv.core.lab.run import resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.engines import refuse_without_ray
from fedpriv.engines.tasks import RayResources, TaskEnded, TaskStarted, run_tasks
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.record import SweepProgress, TrialRecord, failed_record, read_record
from fedpriv.sweep.settings import Refused, Sweep, Trial, refuse_trials

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class TrialTask:
    """What a worker is told."""

    folder: Path  # of the sweep; on a cluster all machines have to see it under this name
    trial: Trial  # what to run
    audit: BaseModel | None  # how its membership is attacked; `None`: not


def check_trials(sweep: Sweep) -> tuple[str, ...]:
    """Build data, network and plans of every kind of trial, with any noise and seed, and return what misleads."""
    refused: dict[str, list[Refused]] = {}
    warnings: dict[str, None] = {}
    for experiment, trials in kinds_of(sweep.trials).items():
        try:
            warnings |= dict.fromkeys(_check(experiment, trials, audited=sweep.audit is not None))
        except InputError as error:
            refused.setdefault(str(error), []).extend((trial.number, trial.settings) for trial in trials)
    refuse_trials(refused, len(sweep.trials), sweep.source)
    return tuple(warnings)


def check_resources(sweep: Sweep) -> None:
    """Refuse a sweep on Ray where there is none."""
    if sweep.resources.engine == "ray":
        refuse_without_ray("resources.engine = 'ray'", ", or run one trial after the other with --inline")


def kinds_of(trials: Sequence[Trial]) -> dict[Experiment, list[Trial]]:
    """Return what trials have in common, with any seed and noise -> the trials that have it, in their order."""
    kinds: dict[Experiment, list[Trial]] = {}
    for trial in trials:
        kinds.setdefault(_kind(trial.experiment), []).append(trial)
    return kinds


def run_sweep(sweep: Sweep, folder: SweepFolder, progress: SweepProgress, retry: bool = False) -> list[TrialRecord]:
    """Run the trials that are not over and write the tables after each."""
    with folder.at_work():
        records = _earlier(sweep, folder, retry)
        progress.found(list(records.values()))
        missing = [trial for trial in sweep.trials if trial.number not in records]
        try:
            with writing(folder.given_command()):
                for record in _outcomes(sweep, folder, missing, progress):
                    records[record.trial] = record
                    folder.write_results([records[number] for number in sorted(records)])
                    progress.ended(record)
                ordered = [records[number] for number in sorted(records)]
                folder.write_results(ordered)
        except (KeyboardInterrupt, RunInterruptedError):
            raise RunInterruptedError("interrupted; the same command goes on with what is missing") from None
    return ordered


def _earlier(sweep: Sweep, folder: SweepFolder, retry: bool) -> dict[int, TrialRecord]:
    records = {}
    for trial in sweep.trials:
        record = folder.record(trial.number)
        if record is not None and retry and record.failed:
            folder.forget_record(trial.number)
        elif record is not None:
            records[trial.number] = record
    return records


def _outcomes(
    sweep: Sweep, folder: SweepFolder, missing: Sequence[Trial], progress: SweepProgress
) -> Iterator[TrialRecord]:
    """The records of trials, as they come; of those that failed, too."""
    tasks = [TrialTask(folder.path.resolve(), trial, sweep.audit) for trial in missing]
    if not tasks:
        return
    for event in _events(sweep, tasks):
        match event:
            case None:
                progress.tick()
            case TaskStarted(index):
                progress.started(missing[index])
            case TaskEnded(index, record, None):
                yield record
            case TaskEnded(index, _, error):
                trial = missing[index]
                name = _label(trial.number)
                record = failed_record(trial.experiment, name, trial.number, trial.settings, error or "")
                folder.write_record(record)
                yield record


def _events(sweep: Sweep, tasks: Sequence[TrialTask]) -> Iterator[TaskStarted | TaskEnded | None]:
    if sweep.resources.engine == "inline":
        return _inline(tasks)
    config = sweep.resources
    return run_tasks(run_trial, tasks, RayResources(config.cpus, config.gpus, config.address), _POLL_SECONDS)


def _inline(tasks: Sequence[TrialTask]) -> Iterator[TaskStarted | TaskEnded | None]:
    """As run_tasks, in this process."""
    for index, task in enumerate(tasks):
        yield TaskStarted(index)
        try:
            ended = TaskEnded(index, run_trial(task))
        except RunInterruptedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever stops one trial is put on its record, and the rest goes on
            ended = TaskEnded(index, error=reason_of(error))
        yield ended


# ---- before anything starts ------------------------------------------------------------------------------------------


def _kind(experiment: Experiment) -> Experiment:
    """What trials that are built alike have in common: all but the seed and how much noise there is."""
    mechanism = experiment.mechanism
    noisy = mechanism.with_some_noise()
    # Whether clients stop early depends on the noise.
    federation = experiment.federation.model_copy(update={"target_epsilon": None, "target_ceiling": None})
    return experiment.model_copy(update={"seed": 0, "mechanism": noisy, "federation": federation})


def _check(experiment: Experiment, trials: Sequence[Trial], *, audited: bool) -> tuple[str, ...]:
    if audited:
        refuse_unaudited(experiment)
    world = build_world(experiment)
    for trial in trials:
        for finding in findings():
            finding.check_trial(trial.experiment, world)
    if audited:
        mapped_network(world.model)
    return (*warnings_for(world), *rehearse(world))


# ---- one trial ------------------------------------------------------------------------------------------------------


def run_trial(task: TrialTask) -> TrialRecord:
    """Bring a trial to its record, from where an earlier start left it."""
    folder, number = SweepFolder.open(task.folder), task.trial.number
    with folder.trial_at_work(number), folder.traceback_kept(number):
        done = folder.record(number)
        if done is not None:
            return done
        began = time.monotonic()
        run = _run(folder.trial(number), task.trial.experiment)
        if task.audit is not None:
            _audit(run, task.audit)
        for finding in findings():
            finding.measure_trial(run)
        settings = task.trial.settings
        record = read_record(run, _label(number), number, settings, seconds=time.monotonic() - began)
        folder.write_record(record)
        return record


def _label(number: int) -> str:
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


def _audit(run: RunFolder, audit: BaseModel) -> None:
    try:
        for finding in findings():
            if finding.audit is type(audit):
                finding.audit_trial(run, audit)
    except InputError as error:
        raise InputError(f"the audit is refused: {error}") from None


# ---- what a sweep will cost: the first rounds of one trial of each kind, timed, and the rest reckoned from them ------


@dataclass(frozen=True)
class Cost:
    """What one trial takes, without attacks."""

    seconds: float  # CPU seconds of all threads
    size: float  # bytes on disk

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.seconds + other.seconds, self.size + other.size)

    def times(self, number: int) -> "Cost":
        """The cost of so many."""
        return Cost(number * self.seconds, number * self.size)

    def beyond(self, other: "Cost") -> "Cost":
        """What this costs more than another; timings of next to nothing may differ the wrong way: then nothing."""
        return Cost(max(0.0, self.seconds - other.seconds), max(0.0, self.size - other.size))


@dataclass(frozen=True)
class Kind:
    """Trials that differ in seed and amount of noise only."""

    trials: Sequence[Trial]  # all of them
    each: Cost  # what one costs

    @property
    def all(self) -> Cost:
        """What all of them cost."""
        return self.each.times(len(self.trials))


def estimate(sweep: Sweep) -> Iterator[Kind]:
    """Time the first round of one trial of each kind, and reckon what all of its kind take.

    A trial is linear in its rounds and in the passes of a round: preparation, an exchange and an evaluation a round,
    and the passes. So three short runs tell it: one round of one pass, a round more, a pass more.
    """
    _timed(_shortened(sweep.trials[0].experiment, 1, 1))  # what a process does once is no part of a trial
    for trials in kinds_of(sweep.trials).values():
        yield Kind(trials, _cost(trials[0].experiment))


def untimed(sweep: Sweep) -> list[str]:
    """What the trials do besides training, which the estimate leaves out."""
    experiments = [trial.experiment for trial in sweep.trials]
    asked = {
        "attacks on uploads": any(experiment.adversary.attacks for experiment in experiments),
        "the audit": sweep.audit is not None,
    }
    measured = dict.fromkeys(word for trial in sweep.trials for word in trial.asked)
    return [*(name for name, wanted in asked.items() if wanted), *measured]


def _cost(experiment: Experiment) -> Cost:
    rounds, passes = experiment.federation.rounds, experiment.training.local_epochs
    if experiment.federation.algorithm not in ("fedsgd", "fedavg"):
        return _timed(_shortened(experiment, rounds, passes))  # one round that has no passes to leave out
    if experiment.federation.algorithm == "fedsgd":
        passes = 1
    shortest = _timed(_shortened(experiment, 1, 1))
    cost = shortest
    if rounds > 1:
        cost += _timed(_shortened(experiment, 2, 1)).beyond(shortest).times(rounds - 1)
    if passes > 1:
        cost += _timed(_shortened(experiment, 1, 2)).beyond(shortest).times(rounds * (passes - 1))
    return cost


def _shortened(experiment: Experiment, rounds: int, passes: int) -> Experiment:
    changes = {
        "federation": experiment.federation.model_copy(update={"rounds": rounds}),
        "training": experiment.training.model_copy(update={"local_epochs": passes}),
        "adversary": experiment.adversary.model_copy(update={"attacks": ()}),
    }
    return experiment.model_copy(update=changes)


def _timed(experiment: Experiment) -> Cost:
    with tempfile.TemporaryDirectory(prefix="fedpriv-") as folder:
        path, began = Path(folder) / "run", time.process_time()
        start_run(experiment, path, "", Silent())
        seconds = time.process_time() - began
        return Cost(seconds, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
