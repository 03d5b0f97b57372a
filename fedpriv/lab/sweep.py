"""Run a sweep: what is missing of it, trial by trial, and the tables of what there is."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedpriv.attacks.membership.stacked import StackedNetwork
from fedpriv.config import Experiment
from fedpriv.engines.tasks import Ended, Started, TaskResources, run_tasks
from fedpriv.errors import InputError, RunInterruptedError, reason_of
from fedpriv.files import writing
from fedpriv.lab.preflight import warnings_for
from fedpriv.lab.rehearsal import rehearse
from fedpriv.lab.trial import TrialTask, label, run_trial
from fedpriv.sweep import Sweep, SweepFolder, SweepProgress, Trial, TrialRecord
from fedpriv.sweep.file import plain_settings, refuse_trials
from fedpriv.sweep.record import failed_record
from fedpriv.world import build_world

__all__ = ["check_trials", "run_sweep"]

_POLL_SECONDS = 0.5
_MIB = 1 << 20


def check_trials(sweep: Sweep) -> tuple[str, ...]:
    """Build data, network and plans of every kind of trial, with any noise and seed, and return what misleads.

    Raises:
        InputError: some trials cannot run; all of them are named.
    """
    kinds: dict[Experiment, list[Trial]] = {}
    for trial in sweep.trials:
        kinds.setdefault(_kind(trial.experiment), []).append(trial)
    refused: dict[str, list[str]] = {}
    warnings: dict[str, None] = {}
    for experiment, trials in kinds.items():
        try:
            warnings |= dict.fromkeys(_check(experiment, audited=sweep.audit is not None))
        except InputError as error:
            refused.setdefault(str(error), []).extend(
                f"{one.number} ({plain_settings(one.settings)})" for one in trials
            )
    refuse_trials(refused, len(sweep.trials), sweep.source)
    return tuple(warnings)


def run_sweep(sweep: Sweep, folder: SweepFolder, progress: SweepProgress, retry: bool = False) -> list[TrialRecord]:
    """Run the trials that are not over and write the tables after each.

    Args:
        sweep: what is to be run.
        folder: of :meth:`SweepFolder.prepare`.
        progress: told what happens.
        retry: whether trials that failed are made again.

    Raises:
        InputError: another process runs the same sweep, or the resources are not there.
        RunFailedError: the results cannot be written.
        RunInterruptedError: Ctrl-C; what is over stays over.
    """
    with folder.at_work():
        records = _earlier(sweep, folder, retry)
        progress.found(list(records.values()))
        missing = [trial for trial in sweep.trials if trial.number not in records]
        try:
            with writing(folder.command()):
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
    found = {}
    for trial in sweep.trials:
        record = folder.record(trial.number)
        if record is not None and retry and record.failed:
            folder.forget_record(trial.number)
        elif record is not None:
            found[trial.number] = record
    return found


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
            case Started(index):
                progress.started(missing[index])
            case Ended(index, record, None):
                yield record
            case Ended(index, _, error):
                trial = missing[index]
                name = label(trial.number)
                record = failed_record(trial.experiment, name, trial.number, trial.settings, error or "")
                folder.write_record(record)
                yield record


def _events(sweep: Sweep, tasks: Sequence[TrialTask]) -> Iterator[Started | Ended | None]:
    if sweep.resources.engine == "inline":
        return _inline(run_trial, tasks)
    config = sweep.resources
    return run_tasks(run_trial, tasks, TaskResources(config.cpus, config.gpus, config.address), _POLL_SECONDS)


def _inline(function: Callable[[Any], Any], arguments: Sequence[Any]) -> Iterator[Started | Ended | None]:
    """As run_tasks, in this process."""
    for index, argument in enumerate(arguments):
        yield Started(index)
        yield _called(function, argument, index)


def _called(function: Callable[[Any], Any], argument: Any, index: int) -> Ended:
    try:
        return Ended(index, function(argument))
    except RunInterruptedError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever stops one trial is put on its record, and the rest goes on
        return Ended(index, error=reason_of(error))


# ---- before anything starts ------------------------------------------------------------------------------------------


def _kind(experiment: Experiment) -> Experiment:
    """What trials have in common that can or cannot be built alike: all but the seed and how much noise there is.

    The first needs no calibration then, which may take seconds a trial.
    """
    mechanism = experiment.mechanism
    some = mechanism.with_some_noise()
    # Whether clients stop early depends on the noise.
    federation = experiment.federation.model_copy(update={"target_epsilon": None})
    return experiment.model_copy(update={"seed": 0, "mechanism": some, "federation": federation})


def _check(experiment: Experiment, *, audited: bool) -> tuple[str, ...]:
    world = build_world(experiment)
    if audited:
        StackedNetwork(world.model, experiment.engine.gradient_memory * _MIB)
    return (*warnings_for(world), *rehearse(world))
