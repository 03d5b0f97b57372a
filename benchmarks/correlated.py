"""Correlated noise against independent noise at one epsilon: accuracy, and what a round costs.

``python -m benchmarks.correlated [--seeds 5] [--bands 1,4,8,10,20] [--clip 0.25] [--rate 0.05]``: Fashion-MNIST, 1,000
clients of 60 images, 100 a round in turns (each client every 10 rounds), 200 rounds, a linear model, (8, 1e-5) for a
client's whole data under replace-one. Choice of clients, noise, sum, step and evaluation are those of a run; clients
are trained together, without messages. The cost is CPU time of rounds that take turns between the bands.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import t

from fedpriv.accounting.correlated import sensitivity
from fedpriv.core.config import Experiment
from fedpriv.core.plan import participants
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.world import State, World, build_world
from fedpriv.server.aggregation import CentralNoise, ServerOptimizer
from fedpriv.server.evaluation import evaluate_all
from fedpriv.server.uploads import Upload
from studies.arguments import StudyParser, whole, wholes
from studies.results import Table

BATCH, COSTED, REPEATS = 20, 40, 5


def settings(seed: int, band: int, clip: float, rounds: int) -> Experiment:
    """The experiment of a seed and a band."""
    return Experiment.model_validate({
        "seed": seed,
        "noise": "reproducible",
        "data": {"name": "fashion-mnist", "train_examples": 60_000},
        "model": {"name": "mlp", "hidden": []},
        "federation": {"clients": 1000, "clients_per_round": 100, "rounds": rounds, "algorithm": "fedavg"},
        "training": {"batch_size": BATCH},
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
        share = evaluate_all(self.world, self.optimizer.state, self.world.experiment.federation.rounds).accuracy
        if share is None:
            raise ValueError("every test image was evaluated, and there is no accuracy")
        return share


def updates(world: World, clients: tuple[int, ...], before: State, number: int, rate: float) -> list[Upload]:
    """Each client's change of a linear model by one pass of SGD; the server clips it."""
    (weight, start), (bias, offset) = before.parameters.items()
    rows = [world.partitions[client] for client in clients]
    orders = [numpy_stream(world.experiment.seed, "order", client, number).permutation(len(mine))
              for client, mine in zip(clients, rows, strict=True)]  # fmt: skip
    picked = torch.from_numpy(np.stack([mine[order] for mine, order in zip(rows, orders, strict=True)]))
    inputs = world.network_input(world.dataset.x_train[picked.flatten()]).reshape(*picked.shape, -1)
    targets = torch.nn.functional.one_hot(world.dataset.y_train[picked], len(offset)).to(inputs)
    w, b = start.repeat(len(clients), 1, 1), offset.repeat(len(clients), 1, 1)
    for first in range(0, picked.shape[1] - BATCH + 1, BATCH):
        x, y = inputs[:, first : first + BATCH], targets[:, first : first + BATCH]
        slope = ((x @ w.transpose(1, 2) + b).softmax(2) - y) / BATCH
        w, b = w - rate * slope.transpose(1, 2) @ x, b - rate * slope.sum(1, keepdim=True)
    return [
        Upload(client, len(mine), State({weight: w[row] - start, bias: b[row, 0] - offset}, {}))
        for row, (client, mine) in enumerate(zip(clients, rows, strict=True))
    ]


def interval(values: list[float]) -> str:
    """The mean in per cent, and its 95 % interval (Student's t)."""
    half = float(t.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    middle = float(np.mean(values))
    return f"{100 * middle:.1f} [{100 * (middle - half):.1f}, {100 * (middle + half):.1f}]"


class Cost(NamedTuple):
    """Of a band."""

    ratio: float  # of a round's CPU time to that of independent noise
    kept: int  # vectors of noise


def costs(bands: list[int], make: Callable[[int], Training]) -> list[Cost]:
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
    """Print a row for each band: noise, accuracy over the seeds, what it gains on band 1, cost and memory."""
    parser = StudyParser("benchmarks.correlated", __doc__)
    parser.add_argument("--seeds", type=whole(2), default=5)
    parser.add_argument("--rounds", type=whole(1), default=200)
    parser.add_argument("--bands", type=wholes, default="1,4,8,10,20")
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--rate", type=float, default=0.05)
    with parser.parsed() as asked:
        bands = list(asked.bands)

        def make(seed: int, band: int) -> Training:
            return Training(settings(seed, band, asked.clip, asked.rounds), asked.rate)

        found: dict[int, list[float]] = {}
        rows = []
        spent = costs(bands, lambda band: make(1, band))
        for band, cost in zip(bands, spent, strict=True):
            found[band] = []
            for seed in range(1, asked.seeds + 1):
                run = make(seed, band)
                for number in range(1, asked.rounds + 1):
                    run.round(number)
                found[band].append(run.accuracy())
            plan = run.world.plans[0]
            pattern = plan.correlation
            if pattern is None:
                raise ValueError("correlated noise has a pattern")
            more = [a - b for a, b in zip(found[band], found[bands[0]], strict=True)]
            moved = f"{sensitivity(pattern, pattern.participations):.3f}"
            gained = "" if band == bands[0] else interval(more)
            sigma = f"{plan.config.noise:.3f}"
            rows.append((str(band), moved, sigma, interval(found[band]), gained, f"{cost.ratio:.3f}", str(cost.kept)))
        heads = ("band", "sensitivity of C", "sigma", "accuracy, %", "gained, points", "CPU of a round", "kept vectors")
        print(Table.of(heads, rows), end="")


if __name__ == "__main__":
    main()
