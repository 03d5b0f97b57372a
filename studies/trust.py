"""The tables of docs/trust.md: ``python -m studies trust DIR`` with a sweep of configs/sweeps/trust.toml, and without.

Without a folder it is test accuracy with distributed and with central noise at the same epsilon. Distributed noise is
whole with 67 (the default), 90 and all of 100 clients. Central noise of larger deviations tells why they differ: 1.22
times, as 100 shares have of which 67 are whole, and as much as distributed noise has in all. Clients, rounding, shares
and decoding are those of a run; the masks, which cancel in the sum exactly, are left out.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.attacks.intervals import rate_interval
from fedpriv.clients.training import local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.records import Summary
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import State, World, build_world
from fedpriv.mechanisms.machinery.quantisation import decoded, encoded
from fedpriv.mechanisms.machinery.whole_numbers import flat, least_survivors, split
from fedpriv.server.aggregation import CentralNoise, ServerOptimizer
from fedpriv.server.evaluation import evaluate
from fedpriv.server.uploads import Upload
from fedpriv.sweep.folder import SweepFolder
from studies.arguments import StudyParser
from studies.results import Table, student

SEEDS, CLIENTS = range(1, 21), 100


def main() -> None:
    """Print one row for each place of the noise and listener, all seeds together; or the accuracies alone."""
    parser = StudyParser("studies.trust", __doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    with parser.parsed() as asked:
        if asked.folder is None:
            _print_accuracies()
        else:
            print(_table(asked.folder), end="")


def _table(path: Path) -> Table:
    rows: dict[tuple[str, str], list[Summary]] = defaultdict(list)
    for record in SweepFolder.open(path).records():
        folder = RunFolder.open(path / record.folder)
        experiment, summary = folder.experiment(), folder.summary()
        if summary is None or record.failed:
            raise InputError(f"{record.folder} is not completed")
        rows[_noise(experiment), experiment.adversary.threat_model].append(summary)
    if not rows:
        raise InputError(f"{path} has no trials")
    cells = [
        (
            *key,
            student([summary.test_accuracy for summary in summaries]),
            _rate(summaries, "recovered"),
            _rate(summaries, "identified"),
        )
        for key, summaries in rows.items()
    ]
    return Table(("noise", "who listens", "test accuracy", "recovered", "picked out of 100"), cells)


def _noise(experiment: Experiment) -> str:
    """The mechanism, and with how many clients' shares its noise is whole."""
    mechanism, asked = experiment.mechanism, experiment.federation.asked
    survivors = mechanism.shared_by(asked).least_in_sum
    return f"{mechanism.name}, {survivors} of {asked} survivors" if survivors else mechanism.name


def _rate(summaries: list[Summary], what: str) -> str:
    """How many images of all seeds together, with Wilson's 95 % interval."""
    made = [attack for summary in summaries for attack in summary.attacks if attack.upload == "protected"]
    if not made:
        raise InputError("a trial has no attack on protected uploads, as those of configs/sweeps/trust.toml")
    hits, images = sum(getattr(attack, what) for attack in made), sum(attack.victims for attack in made)
    rate = rate_interval(hits, images)
    return f"{hits} of {images} [{rate.low:.0%}, {rate.high:.0%}]"


def _print_accuracies() -> None:
    """Each row's accuracy over the seeds, and how much it has less than central noise with the same seed."""
    first: list[float] = []
    for title, mechanism in rows().items():
        shares = [accuracy(settings(seed, **mechanism)) for seed in SEEDS]
        first = first or shares
        less = [a - b for a, b in zip(first, shares, strict=True)]
        print(f"{title}: {student(shares)}{'' if shares is first else f'; less than central by {student(less)}'}")


def rows() -> dict[str, dict[str, Any]]:
    """Return the mechanism of each row."""
    central, distributed = (build_world(settings(1, name)).plans[0].config for name in ("central", "distributed"))
    sigma = central.noise_on_mean(CLIENTS, CLIENTS) * CLIENTS / central.bound
    in_all = distributed.noise_on_mean(CLIENTS, CLIENTS) / central.noise_on_mean(CLIENTS, CLIENTS)
    least = least_survivors(CLIENTS)
    found: dict[str, dict[str, Any]] = {"central": {"name": "central"}}
    for survivors in (least, 90, CLIENTS):
        found[f"distributed, {survivors} survivors"] = {"name": "distributed", "survivors": survivors}
    for times in (math.sqrt(CLIENTS / least), in_all):
        found[f"central, {times:.2f} sigma"] = {"name": "central", "sigma": times * sigma}
    return found


def settings(seed: int, name: str, **mechanism: float) -> Experiment:
    """The experiment of configs/sweeps/trust.toml, without attacks; with epsilon 8 or a noise of its own."""
    noise = {} if "sigma" in mechanism else {"target_epsilon": 8.0}
    tree = {
        "seed": seed,
        "noise": "reproducible",
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": []},
        "federation": {
            "clients": CLIENTS,
            "rounds": 8,
            "weighting": "uniform",
            "secure_aggregation": name == "distributed",
        },
        "training": {"batch_size": 1, "learning_rate": 4.0},
        "adversary": {"attacks": []},
        "mechanism": {"name": name, **noise, **mechanism},
    }
    return Experiment.model_validate(tree)


def shared_mean(world: World, number: int, before: State) -> State:
    """The mean of a round under distributed noise, of all clients."""
    initial, total = world.initial, np.zeros(0, dtype=np.uint32)
    share = world.plans[0].share_of_noise
    for client in range(len(world.plans)):
        update = flat(local_upload(world, client, before, number).parameters) / share.bound
        noise = world.secret.stream("share", client, number).numpy()
        words = encoded(update, share.variance, world.signs(number), noise)
        total = words if client == 0 else total + words
    dimension = sum(value.numel() for value in initial.parameters.values())
    values = decoded(total, dimension, world.signs(number)) * (share.bound / len(world.plans))
    return State(split(values, initial.parameters), initial.buffers)


def accuracy(experiment: Experiment) -> float:
    """The accuracy after the last round."""
    world = build_world(experiment)
    optimizer = ServerOptimizer(world.experiment, world.initial)
    for number in range(1, experiment.federation.rounds + 1):
        before = optimizer.state
        if experiment.mechanism.noise_at == "sum":
            optimizer.step(shared_mean(world, number, before))
            continue
        uploads = [Upload(client, 1, local_upload(world, client, before, number)) for client in range(CLIENTS)]
        optimizer.step(CentralNoise(world).mean(number, tuple(uploads)))
    return evaluate(world, optimizer.state)[1]


if __name__ == "__main__":
    main()
