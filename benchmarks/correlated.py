"""Correlated noise against independent noise at one epsilon: accuracy, and what a round costs.

A linear model on Fashion-MNIST, 1,000 clients of so many images, 100 a round in turns (each every 10 rounds), (8, 1e-5)
for a client's whole data under replace-one. Each band has the clip norm that is best on a seed of its own. Choice of
clients, noise, sum, step and evaluation are those of a run; clients are trained together, without messages. The cost is
CPU time of rounds that take turns between the bands.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from fedpriv.accounting.correlated import sensitivity
from fedpriv.core.config import Experiment
from fedpriv.core.plan import participants
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.world import State, World, build_world
from fedpriv.server.aggregation import CentralNoise, ServerOptimizer
from fedpriv.server.evaluation import evaluate
from fedpriv.server.uploads import Upload
from studies.arguments import StudyParser, whole, wholes
from studies.results import Table, student

COSTED, REPEATS = 40, 5
CLIPS, CHOSEN_BY = (0.025, 0.05, 0.1, 0.2, 0.4), 101
HEADS = (
    *("band", "sensitivity of C", "sigma", "clip norm", "accuracy, %", "gained, points"),
    *("CPU of a round, over band 1", "noise vectors kept"),
)


def settings(seed: int, band: int, clip: float, rounds: int, images: int) -> Experiment:
    """The experiment of a seed and a band."""
    return Experiment.model_validate({
        "seed": seed,
        "noise": "reproducible",
        "data": {"name": "fashion-mnist", "train_examples": 1000 * images},
        "model": {"name": "mlp", "hidden": []},
        "federation": {"clients": 1000, "clients_per_round": 100, "rounds": rounds, "algorithm": "fedavg"},
        "training": {"batch_size": min(images, 20)},
        "adversary": {"attacks": []},
        "mechanism": {"name": "correlated", "band": band, "target_epsilon": 8.0, "clip_norm": clip},
    })  # fmt: skip


class Training:
    """A run's rounds, one after the other."""

    def __init__(self, experiment: Experiment, rate: float) -> None:
        self.world, self._rate = build_world(experiment), rate
        self.noise = CentralNoise(self.world)
        self.optimizer = ServerOptimizer(experiment, self.world.initial)

    def round(self, number: int) -> None:
        """Take one round."""
        clients = participants(self.world.experiment, number, None, self.world.secret)
        uploads = updates(self.world, clients, self.optimizer.state, number, self._rate)
        self.optimizer.step(self.noise.mean(number, uploads))

    def accuracy(self) -> float:
        """The accuracy on all test images after the last round."""
        return evaluate(self.world, self.optimizer.state)[1]


def updates(world: World, clients: tuple[int, ...], before: State, number: int, rate: float) -> list[Upload]:
    """Each client's change of a linear model by one pass of SGD; the server clips it."""
    batch = world.experiment.training.batch_size
    (weight, start), (bias, offset) = before.parameters.items()
    rows = [world.partitions[client] for client in clients]
    orders = [numpy_stream(world.experiment.seed, "order", client, number).permutation(len(mine))
              for client, mine in zip(clients, rows, strict=True)]  # fmt: skip
    picked = torch.from_numpy(np.stack([mine[order] for mine, order in zip(rows, orders, strict=True)]))
    inputs = world.network_input(world.dataset.x_train[picked.flatten()]).reshape(*picked.shape, -1)
    targets = torch.nn.functional.one_hot(world.dataset.y_train[picked], len(offset)).to(inputs)
    w, b = start.repeat(len(clients), 1, 1), offset.repeat(len(clients), 1, 1)
    for first in range(0, picked.shape[1] - batch + 1, batch):
        x, y = inputs[:, first : first + batch], targets[:, first : first + batch]
        slope = ((x @ w.transpose(1, 2) + b).softmax(2) - y) / batch
        w, b = w - rate * slope.transpose(1, 2) @ x, b - rate * slope.sum(1, keepdim=True)
    return [
        Upload(client, len(mine), State({weight: w[row] - start, bias: b[row, 0] - offset}, {}))
        for row, (client, mine) in enumerate(zip(clients, rows, strict=True))
    ]


in_points = partial(student, places=".1f", factor=100)


class Cost(NamedTuple):
    """Of a band."""

    ratio: float  # of a round's CPU time to that of independent noise
    kept: int  # vectors of noise


def costs(bands: Sequence[int], make: Callable[[int], Training]) -> list[Cost]:
    """Rounds of all bands in turns: the median over repeats of the ratio of CPU times."""
    runs, spent = [make(band) for band in bands], np.zeros((REPEATS, len(bands)))
    for number in range(1, REPEATS * COSTED + 1):
        for place, run in enumerate(runs):
            began = time.process_time()
            run.round(number)
            spent[(number - 1) // COSTED, place] += time.process_time() - began
    ratios = np.median(spent[1:] / spent[1:, :1], axis=0)  # the first ones fill the memory of noise
    return [Cost(float(ratio), run.noise.kept) for ratio, run in zip(ratios, runs, strict=True)]


def main() -> None:
    """Print a row for each band: noise, accuracy over the seeds, what it gains on the first, cost and memory."""
    parser = StudyParser("benchmarks.correlated", __doc__)
    parser.add_argument("--seeds", type=whole(2), default=5)
    parser.add_argument("--rounds", type=whole(1), default=200)
    parser.add_argument("--bands", type=wholes, default="1,10")
    parser.add_argument("--images", type=whole(1), default=10)
    parser.add_argument("--rate", type=float, default=0.15)
    with parser.parsed() as asked:

        def trained(seed: int, band: int, clip: float) -> Training:
            run = Training(settings(seed, band, clip, asked.rounds, asked.images), asked.rate)
            for number in range(1, asked.rounds + 1):
                run.round(number)
            return run

        spent = costs(asked.bands, lambda band: Training(settings(1, band, 0.1, 200, asked.images), asked.rate))
        rows: list[tuple[str, ...]] = []
        first: list[float] = []
        for band, cost in zip(asked.bands, spent, strict=True):
            clip = max(CLIPS, key=lambda each: trained(CHOSEN_BY, band, each).accuracy())
            runs = [trained(seed, band, clip) for seed in range(1, asked.seeds + 1)]
            shares = [run.accuracy() for run in runs]
            first = first or shares
            gained = "" if shares is first else in_points([a - b for a, b in zip(shares, first, strict=True)])
            plan, pattern = runs[0].world.plans[0], runs[0].world.plans[0].correlation
            moved = 0.0 if pattern is None else sensitivity(pattern, pattern.participations)
            numbers = (f"{band}", f"{moved:.3f}", f"{plan.config.noise:.3f}", f"{clip:g}")
            rows.append((*numbers, in_points(shares), gained, f"{cost.ratio:.3f}", f"{cost.kept}"))
        print(Table(HEADS, rows), end="")


if __name__ == "__main__":
    main()
