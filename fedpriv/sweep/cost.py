"""What a sweep will cost: the first rounds of one trial of each kind, timed, and the rest reckoned from them."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpriv.core.config import Experiment
from fedpriv.core.lab.run import start_run
from fedpriv.core.progress import Silent
from fedpriv.sweep.run import kinds_of
from fedpriv.sweep.settings import Sweep, Trial


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
