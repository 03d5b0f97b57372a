"""Test accuracy with distributed and with central noise at the same epsilon: ``python -m benchmarks.trust``.

Clients, rounding, shares and decoding are those of a run; the masks, which cancel in the sum exactly, are left out: for
100 clients they take minutes a round.
"""

from statistics import mean, stdev

import numpy as np

from fedpriv.clients.training import local_upload
from fedpriv.config import Experiment
from fedpriv.lattice import decoded, encoded
from fedpriv.masking import flat, split
from fedpriv.server.aggregation import ServerOptimizer
from fedpriv.server.central import noised_mean
from fedpriv.server.evaluation import evaluate_all
from fedpriv.server.uploads import Upload
from fedpriv.world import State, World, build_world

SEEDS = range(1, 6)


def settings(mechanism: str, seed: int) -> Experiment:
    """The experiment of configs/sweeps/trust.toml, without attacks."""
    tree = {
        "seed": seed,
        "noise": "reproducible",
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": []},
        "federation": {
            "clients": 100,
            "rounds": 8,
            "weighting": "uniform",
            "secure_aggregation": mechanism == "distributed",
        },
        "training": {"batch_size": 1, "learning_rate": 4.0},
        "adversary": {"attacks": []},
        "mechanism": {"name": mechanism, "target_epsilon": 8.0},
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


def accuracy(mechanism: str, seed: int) -> float:
    """The accuracy after the last round."""
    world = build_world(settings(mechanism, seed))
    optimizer = ServerOptimizer(world.experiment, world.initial)
    for number in range(1, world.experiment.federation.rounds + 1):
        before = optimizer.state
        if mechanism == "distributed":
            optimizer.step(shared_mean(world, number, before))
            continue
        uploads = [Upload(client, 1, local_upload(world, client, before, number)) for client in range(100)]
        optimizer.step(noised_mean(world, number, tuple(uploads)))
    found = evaluate_all(world, optimizer.state, world.experiment.federation.rounds).accuracy
    if found is None:
        raise ValueError("every test image was evaluated, and there is no accuracy")
    return found


def main() -> None:
    """Print mean and deviation over the seeds."""
    for mechanism in ("central", "distributed"):
        found = [accuracy(mechanism, seed) for seed in SEEDS]
        print(f"{mechanism}: {mean(found):.1%} ± {stdev(found):.1%} ({', '.join(f'{each:.1%}' for each in found)})")


if __name__ == "__main__":
    main()
