"""Start or resume a run and bring it to its summary; the report is written afterwards."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedpriv.algorithms.rounds.ledger import label_ceilings
from fedpriv.clients.app import client_app
from fedpriv.core.algorithm import algorithm_of, preparation_of
from fedpriv.core.asked_log import check_complete, check_unchanged, replay
from fedpriv.core.budget import Budget
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, RunFailedError, RunInterruptedError
from fedpriv.core.figure import refuse_exceeded
from fedpriv.core.files import locked, stopped, writing
from fedpriv.core.finding import Finding, all_found, findings, records_found
from fedpriv.core.finished import final_state
from fedpriv.core.lab.attack_stage import Leakage, attack_observations, planned_attacks
from fedpriv.core.lab.preflight import rehearse, warnings_for
from fedpriv.core.lab.summary import Ending, early_end, versions
from fedpriv.core.numbers import several
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import Secret
from fedpriv.core.records import (
    COMPLETED,
    DataFacts,
    Holders,
    ModelFacts,
    Partition,
    Stop,
    Summary,
    last_evaluated,
    members_text,
)
from fedpriv.core.runs import RunFolder
from fedpriv.core.trackers import check_trackers
from fedpriv.core.world import World, build_world
from fedpriv.engines import check_engine, choose_engine, run_engine
from fedpriv.server.aggregation import ServerOptimizer
from fedpriv.server.app import server_app

_SHOWN_CLIENTS = 1000  # clients of whom referee/partition.json says how many examples of each class they hold


@dataclass(frozen=True)
class Engine:
    """Who runs the rounds."""

    name: str  # for the summary and the report
    run: Callable[[World, RunFolder, Progress], None]  # runs the federation and leaves its files in the run's folder


def check_experiment(experiment: Experiment) -> tuple[str, ...]:
    """Try all that a run needs without running it, and return one line for each thing that misleads."""
    return _checked(build_world(experiment))


def _built(experiment: Experiment, secret: Secret, progress: Progress) -> World:
    """Build the world; what takes minutes for a large network is announced."""
    if experiment.model.is_own and experiment.mechanism.protects:
        progress.stage(
            f"building {experiment.model.name}, and trying it on random examples: no example may influence another's "
            "gradient; this takes as long as a few dozen steps"
        )
    return build_world(experiment, secret)


def _checked(world: World) -> tuple[str, ...]:
    check_trackers(world.experiment)
    check_engine(world.experiment.engine)
    return (*warnings_for(world), *rehearse(world))


def start_run(
    experiment: Experiment, path: Path, command: str, progress: Progress, engine: Engine | None = None
) -> Summary:
    """Run an experiment in a new folder.

    Args:
        experiment: the settings.
        path: the run's folder; made here, must not hold anything yet.
        command: the command that repeats the run, for the report.
        progress: told what happens.
        engine: runs the rounds; ``None``: the experiment's engine.

    Raises:
        InputError: the settings do not fit the data, the model or the machine; nothing was written.
        RunFailedError: the run could not be finished (the folder says why), or an attack exceeds a proven ceiling.
        RunInterruptedError: Ctrl-C; the run can be resumed.
    """
    secret = Secret.drawn() if experiment.keeps_secret else Secret.of_seed(experiment.seed)
    world = _built(experiment, secret, progress)
    warnings = _checked(world)
    folder = RunFolder.create(path, experiment)
    with locked(folder.path):
        with writing(folder.to_resume):
            if experiment.keeps_secret:
                folder.keep_secret(secret)
            folder.write_text("command.txt", command + "\n")
        return _Run(world, folder, warnings, progress, engine or _simulation(experiment)).finish()


def resume_run(path: Path, progress: Progress) -> Summary:
    """Finish an interrupted run; its parameters, observations and ledger are those of an uninterrupted one.

    Raises:
        InputError: the folder is no run's, is damaged, or another process is writing it.
        RunFailedError: the run could not be finished.
    """
    folder = RunFolder.open(path)
    with locked(path):
        experiment, summary = folder.experiment(), folder.summary()
        world = _built(experiment, folder.secret(experiment), progress)
        check_unchanged(world, folder)
        check_complete(folder, experiment.federation.rounds)
        if (checkpoint := folder.load_checkpoint()) is not None:
            # Once the run goes on, what it does not fit ends it, and the folder says so.
            ServerOptimizer(experiment, world.initial).load(checkpoint.tensors, checkpoint.round)
        ended = summary is not None and summary.status == COMPLETED
        progress.stage(
            f"{path} is complete: running its attacks and writing its report again" if ended else f"resuming {path}"
        )
        return _Run(world, folder, warnings_for(world), progress, _simulation(experiment)).finish()


def _simulation(experiment: Experiment) -> Engine:
    """The engine that the experiment names."""

    def run(world: World, folder: RunFolder, progress: Progress) -> None:
        clients = client_app(world.secret)
        clients.origin = world.origin
        federation = experiment.federation
        server = server_app(world, folder, progress)
        run_engine(server, clients, federation.clients, experiment.engine, federation.round_timeout)

    return Engine(choose_engine(experiment.engine), run)


@dataclass(frozen=True)
class _Run:
    """A run that begins or goes on."""

    world: World
    folder: RunFolder
    warnings: tuple[str, ...]
    progress: Progress
    engine: Engine
    began: float = field(default_factory=time.monotonic)

    def finish(self) -> Summary:
        """Train, attack, and write the summary, however the run ends."""
        folder, progress = self.folder, self.progress
        progress.stage(_headline(self.world))
        if left_out := self.world.dataset.left_out:
            progress.stage(left_out)
        for text in self.warnings:
            progress.warn(text)
        try:
            folder.remove_parts()
            folder.write_partition(_partition(self.world))
            leakage = self._train_and_attack()
        except (RunFailedError, InputError) as error:
            self._end_early("failed", str(error))
            raise
        except OSError as error:
            failure = stopped(error, folder.to_resume)
            self._end_early("failed", str(failure))
            raise failure from None
        except KeyboardInterrupt:
            progress.stage("interrupted: writing the ledger, the summary and the report so far")
            reason = f"interrupted; finish it with: {folder.to_resume}"
            self._end_early("interrupted", reason)
            raise RunInterruptedError(reason) from None
        with writing(folder.to_resume):
            summary = self._close(COMPLETED, None, leakage)
        refuse_exceeded(rate.figure for rate in summary.rates)
        return summary

    def _train_and_attack(self) -> Leakage:
        experiment, engine = self.world.experiment, self.engine
        self.progress.stage(
            f"training: {several(experiment.federation.clients, 'client')}, {engine.name} engine on {self.world.device}"
        )
        engine.run(self.world, self.folder, self.progress)
        experiment.model.save(self._trained, self.folder.path / "checkpoint")
        if not experiment.adversary.attacks:
            return Leakage()
        self.progress.stage(f"attacking: {', '.join(experiment.adversary.attacks)}")
        return attack_observations(self.world, self.folder, planned_attacks(self.world), self.progress)

    def _trained(self) -> nn.Module:
        """The network with what it has learnt."""
        final_state(self.folder, self.world, "save").load_into(self.world.model)
        return self.world.model

    def _end_early(self, status: str, reason: str) -> None:
        """Write what there is; where even that cannot be written, the reason for the end still has to be reported."""
        with suppress(OSError):
            self._close(status, reason, Leakage())

    def _close(self, status: str, reason: str | None, leakage: Leakage) -> Summary:
        """Write ledger and summary, however the run ended."""
        world, folder, experiment = self.world, self.folder, self.world.experiment
        # Files can vanish while a run goes on, too: no ledger is better than one with too few rounds.
        check_complete(folder, experiment.federation.rounds)
        preparation, ledger = preparation_of(experiment), algorithm_of(experiment).ledger(world, folder)
        if preparation is not None:
            ledger = replace(ledger, labels=preparation.claim(world))
        folder.write_json("ledger.json", ledger.to_json())  # first: what a finding of a plug-in raises loses no proof
        for finding in findings():
            _conclude(finding, world, folder)
        if not algorithm_of(experiment).protects:
            folder.write_label_ceilings(label_ceilings(world, folder))
        records = folder.rounds()
        last, tested = (records[-1] if records else None), last_evaluated(records)
        stops = _stops(world, folder)
        ending = Ending(
            experiment,
            status,
            records,
            ledger.worst,
            leakage,
            world.dataset.kind,
            stops,
            all_found(folder),
            algorithm_of(experiment).about_accuracy(world, tested),
            is_next=world.dataset.is_next,
            ledger=ledger,
            partition=folder.partition(),
        )
        summary = Summary(
            name=experiment.name,
            settings=folder.settings_digest(),
            status=status,
            reason=reason or early_end(experiment, last, stops),
            rounds=last.round if last else 0,
            test_accuracy=tested.accuracy if tested else None,
            test_loss=tested.loss if tested else None,
            evaluated_round=tested.round if tested else None,
            evaluated_examples=tested.evaluated if tested else None,
            ledger=ledger.worst,
            stops=stops,
            seconds=time.monotonic() - self.began,
            attack_seconds=leakage.seconds,
            warnings=tuple(dict.fromkeys((*self.warnings, *leakage.refused_words))),
            refusals=leakage.refused_words,
            versions=versions(),
            data=_data(world),
            model=_model(world),
            device=str(world.device),
            engine=self.engine.name,
            command=folder.command(),
            **ending.of_attacks,
        )
        # What was found of the finished model stays when the run is resumed, which changes no model.
        folder.write_summary(summary.with_found(records_found(folder)) if status == COMPLETED else summary)
        return summary


def _conclude(finding: Finding[Any], world: World, folder: RunFolder) -> None:
    """Have a finding measured; an error says which one it is, and how the run is finished."""
    try:
        finding.conclude(world, folder)
    except (InputError, RunFailedError) as error:
        raise type(error)(f"finding {finding.name}: {error}; when it is mended: {folder.to_resume}") from error
    except Exception as error:
        error.add_note(f"finding {finding.name}; when it is mended: {folder.to_resume}")
        raise


def _headline(world: World) -> str:
    parameters = sum(value.numel() for value in world.initial.parameters.values())
    mechanism = algorithm_of(world.experiment).protects or world.experiment.mechanism.name
    return (
        f"{world.experiment.name}: {world.dataset.name}, {len(world.dataset.y_train)} training examples; "
        f"{', '.join((world.experiment.model.name, *world.experiment.model.notes))}, {parameters} parameters; "
        f"mechanism {mechanism}"
    )


def _data(world: World) -> DataFacts:
    dataset = world.dataset
    return DataFacts(
        name=dataset.name,
        source=dataset.source,
        train_examples=len(dataset.y_train),
        test_examples=len(dataset.y_test),
        **({} if dataset.text is None else {"task": dataset.text.task}),
        **({"notes": dataset.notes} if dataset.notes else {}),
    )


def _model(world: World) -> ModelFacts:
    tensors = tuple(value.numel() for value in world.initial.parameters.values())
    notes = {"notes": settings.notes} if (settings := world.experiment.model).notes else {}
    return ModelFacts(name=settings.name, parameters=sum(tensors), tensors=tensors, **notes)


def _stops(world: World, folder: RunFolder) -> tuple[Stop, ...]:
    """The clients that are no longer selected after the rounds so far."""
    asked = folder.asked()
    budget = Budget(world.experiment, world.plans)
    replay(budget, asked)
    following = max((line.round for line in asked), default=0) + 1
    if following <= world.experiment.federation.rounds:
        budget.left(following)
    return budget.stops


def _partition(world: World) -> Partition:
    """How the data are shared; of very many clients only the first have a row each."""
    labels, shown = world.true_labels, range(min(len(world.partitions), _SHOWN_CLIENTS))
    counts = tuple(tuple(world.class_counts_of(labels, client)) for client in shown)
    groups = [(size, np.flatnonzero(world.sizes == size).tolist()) for size in np.unique(world.sizes).tolist()]
    return Partition(
        partition=world.experiment.data.partition,
        class_names=tuple(world.dataset.counted),
        clients=counts,
        groups=tuple(Holders(size, len(clients), members_text(clients)) for size, clients in groups),
        classes=tuple(world.dataset.kinds(labels).bincount(minlength=len(world.dataset.counted)).tolist()),
    )
