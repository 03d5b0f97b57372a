"""PATE as configs/pate.toml has it, over several seeds: teachers, plurality, answers, student, and what they cost.

Teachers are trained a second time, outside the app, and must vote as they did in it. What depends on votes (the
plurality, the data-dependent figures) is shown here because MNIST is public; a run never shows it.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from fedpriv.accounting import ORDERS, rdp_to_epsilon
from fedpriv.accounting.votes import smooth_sensitivity
from fedpriv.algorithms.pate.client import teachers_votes
from fedpriv.algorithms.pate.records import Knowledge, Poll, kept_poll, read_answers
from fedpriv.algorithms.pate.server import data_dependent_cost
from fedpriv.algorithms.pate.settings import PateConfig
from fedpriv.algorithms.pate.teachers import asked_rows, teachers
from fedpriv.core.config import Experiment, load_experiment
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import World, build_world
from studies.arguments import StudyParser, whole

_CONFIG = Path(__file__).resolve().parents[1] / "configs" / "pate.toml"


@dataclass(frozen=True)
class SeedResult:
    """One seed: shares from 0 to 1, and epsilons at the run's delta."""

    seed: int
    each: float
    plurality: float
    knowledge: Knowledge
    data_dependent: float
    sanitised: tuple[float, float]


def main() -> None:
    """Print one line a seed, and the means."""
    parser = StudyParser("studies.pate", __doc__)
    parser.add_argument("--seeds", type=whole(1), default=5)
    parser.add_argument("--set", action="append", default=[], help="override a key of the configuration")
    with parser.parsed() as asked:
        seeds = range(7, 7 + asked.seeds)
        experiments = [load_experiment(_CONFIG, [*asked.set, f"seed={seed}"]) for seed in seeds]
        print("seed  each  plurality  answered  right  student  spent  data-dependent  sanitised")
        trials = []
        for experiment in experiments:
            trials.append(_trial(experiment))
            print(_line(trials[-1]), flush=True)
        print(
            f"mean  {fmean(t.each for t in trials):.1%}  {fmean(t.plurality for t in trials):.1%}  "
            f"{fmean(t.knowledge.answered for t in trials):.0f}  {fmean(t.knowledge.right or 0 for t in trials):.1%}  "
            f"{fmean(t.knowledge.student for t in trials):.1%}"
        )


def _trial(experiment: Experiment) -> SeedResult:
    with tempfile.TemporaryDirectory() as place:
        start_run(experiment, Path(place) / "run", "python -m studies pate", Silent())
        folder = RunFolder.open(Path(place) / "run")
        knowledge, poll = folder.read(Knowledge), kept_poll(folder)
        if knowledge is None or poll is None:
            raise RuntimeError("the run left no knowledge")
        world = build_world(experiment, folder.secret(experiment))
        each, plurality = _teachers(world, poll)
        dependent, sanitised = _figures(world, folder, poll)
    return SeedResult(experiment.seed, each, plurality, knowledge, dependent, sanitised)


def _teachers(world: World, poll: Poll) -> tuple[float, float]:
    """How often a teacher, and the plurality, is right on all test images."""
    with cpu_threads(world.experiment.engine.threads):
        votes = np.concatenate(
            [teachers_votes(world, client, world.dataset.x_test).numpy() for client in range(len(world.plans))]
        )
    if not np.array_equal(votes[:, asked_rows(world).numpy()], poll.votes):
        raise RuntimeError("outside the app teachers vote otherwise than in it")
    truth = world.dataset.y_test.numpy()
    counts = np.stack([np.bincount(column, minlength=world.dataset.classes) for column in votes.T])
    return float((votes == truth).mean()), float((counts.argmax(1) == truth).mean())


def _figures(world: World, folder: RunFolder, poll: Poll) -> tuple[float, tuple[float, float]]:
    """The data-dependent epsilon, and mean and deviation of the sanitised one over its noise."""
    pate, answers = PateConfig.required(world.experiment), read_answers(folder)
    aggregator, sanitiser = pate.aggregator_of(teachers(world)), pate.sanitiser
    orders = [float(order) for order in ORDERS if 3 <= order <= 60][::3]
    costs = [data_dependent_cost(aggregator, order, poll.counts, answers, teachers(world))[0] for order in orders]
    cost, local = data_dependent_cost(aggregator, sanitiser.order, poll.counts, answers, teachers(world))
    sensitivity = smooth_sensitivity(local, sanitiser.beta)
    shown = [sanitiser.epsilon(cost, sensitivity, pate.delta, normal) for normal in (-1.0, 0.0, 1.0)]
    return rdp_to_epsilon(orders, costs, pate.delta), (shown[1], (shown[2] - shown[0]) / 2)


def _line(trial: SeedResult) -> str:
    known = trial.knowledge
    return (
        f"{trial.seed}  {trial.each:.1%}  {trial.plurality:.1%}  {known.answered} of {known.asked}  {known.right:.1%}  "
        f"{known.student:.1%}  {known.spent:.3f}  {trial.data_dependent:.3f}  "
        f"{trial.sanitised[0]:.3f} +- {trial.sanitised[1]:.3f}"
    )


if __name__ == "__main__":
    main()
