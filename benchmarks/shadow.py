"""What training reference models together saves over training them one after another.

MLP(128) on Fashion-MNIST (FEDPRIV_DATA names its folder), plain SGD. All ways train the same models on the same
batches, but for noise, of which ``client`` draws other numbers; they take turns, and are compared by the median:
``stacked`` (attacks.membership), ``loop`` (the shortest plain loop of PyTorch, with prepared images; for Gaussian noise
with fedpriv's operator) and ``client`` (one after another as a client of a run trains). The ratio compares the fastest
of each way's numbers of threads. The floor is the time of nothing but the two large matrix products of each step, with
all threads; ``draw`` that of nothing but the noise.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.measure import in_turns, medians, options, report, save, seconds
from fedpriv.attacks.references import Pool, Reference, train_references, usual_schedule
from fedpriv.clients.training import local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.randomness import Secret, numpy_stream
from fedpriv.core.world import State, World, build_world, network_of
from fedpriv.gradients import Vector, find_route, per_example_gradients
from fedpriv.gradients.normal import standard_normal
from studies.arguments import whole

STEPS = 96
RATE = 0.1
TRIED = 8  # examples on which the way of the gradients is found out
MECHANISMS: dict[str, dict[str, object]] = {
    "none": {"name": "none"},
    "gaussian": {"name": "gaussian", "sigma": 1.0, "clip_norm": 1.0},
}


def main() -> None:
    """Measure, print a table, and write the rows."""
    parser = options("shadow", __doc__)
    parser.add_argument("--models", type=whole(1), default=32)
    parser.add_argument("--batches", nargs="+", type=whole(1), default=[4, 8, 32])
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--repeats", type=whole(1), default=5)
    parser.add_argument("--threads", nargs="+", type=whole(1), default=sorted({1, os.cpu_count() or 1}))
    with parser.parsed() as asked:
        rows = [_row(batch, mechanism, asked) for mechanism in asked.mechanisms for batch in asked.batches]
        print(f"MLP(128), {asked.models} models, microseconds a step of one model:")
        figures = {name: f"{{{name}_us:.0f}}" for name in ("loop", "client", "stacked", "floor", "draw")}
        ratios = {"x loop": "{ratio_to_loop:.1f}", "x client": "{ratio_to_client:.1f}"}
        columns = {"mechanism": "{mechanism}", "batch": "{batch}", **figures, **ratios}
        report({**columns, "difference": "{largest_difference:.1g}"}, rows)
        about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "torch": torch.__version__, "cores": os.cpu_count()}
        save(asked.json, rows=rows, **about, models=asked.models, threads=asked.threads)


def _row(batch: int, mechanism: str, arguments: argparse.Namespace) -> dict[str, Any]:
    world = _world(batch, mechanism)
    pool, references = _pool(world), _references(world, arguments.models)
    ways: dict[str, Callable[[], list[Vector]]] = {
        "stacked": partial(_stacked, world, pool, references),
        "loop": partial(_loop if mechanism == "none" else _private_loop, world, pool, references),
        "client": partial(_as_clients, world, references),
    }
    trained = {name: way() for name, way in ways.items()}
    same = ("loop", "client") if mechanism == "none" else ("loop",)  # a client's noise is keyed by its run's secret
    times = in_turns(
        {(name, threads): partial(_timed, way, threads) for threads in arguments.threads for name, way in ways.items()},
        arguments.repeats,
    )
    steps = arguments.models * world.plans[0].steps_per_round
    us = {key: 1e6 * taken / steps for key, taken in medians(times).items()}
    best = {name: min(us[name, threads] for threads in arguments.threads) for name in ways}
    torch.set_num_threads(max(arguments.threads))
    return {
        "mechanism": mechanism,
        "batch": batch,
        **{f"{name}_us": value for name, value in best.items()},
        "us_by_threads": {f"{name}, {threads}": value for (name, threads), value in us.items()},
        "floor_us": _products_us(batch, arguments.models),
        "draw_us": 0.0 if mechanism == "none" else _draw_us(world),
        "ratio_to_loop": best["loop"] / best["stacked"],
        "ratio_to_client": best["client"] / best["stacked"],
        "largest_difference": max(_difference(trained["stacked"], trained[name]) for name in same),
    }


def _timed(way: Callable[[], object], threads: int) -> float:
    torch.set_num_threads(threads)
    return seconds(way)


def _world(batch: int, mechanism: str) -> World:
    settings = {
        "model": {"name": "mlp", "hidden": [128]},
        "federation": {"clients": 1, "rounds": 1, "algorithm": "fedavg"},
        "training": {"batch_size": batch, "learning_rate": RATE},
        "mechanism": MECHANISMS[mechanism],
        "adversary": {"attacks": []},
        "engine": {"device": "cpu"},
    }
    data = {"name": "fashion-mnist", "train_examples": STEPS * batch}
    return build_world(Experiment.model_validate({**settings, "data": data}))


def _pool(world: World) -> Pool:
    return Pool(world.network_input(world.dataset.x_train), world.dataset.y_train)


def _references(world: World, count: int) -> list[Reference]:
    """Each on a draw of its own, as large as the target's data and with repetitions."""
    examples = len(world.partitions[0])
    return [
        Reference(seed, (numpy_stream(seed, "benchmark shares").choice(examples, examples),)) for seed in range(count)
    ]


def _stacked(world: World, pool: Pool, references: Sequence[Reference]) -> list[Vector]:
    stack = train_references(world, pool, references, usual_schedule(world.experiment), [1])[1]
    return [{name: value[index] for name, value in stack.items()} for index in range(len(references))]


def _network(world: World) -> nn.Module:
    model = network_of(world.experiment, world.dataset)
    world.initial.load_into(model)
    return model


def _loop(world: World, pool: Pool, references: Sequence[Reference]) -> list[Vector]:
    """One after another, nothing but what PyTorch needs."""
    plan = world.plans[0]
    models = []
    for reference in references:
        model = _network(world)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for step in plan.steps(1):
            rows = torch.from_numpy(reference.shares[0][plan.sampling.batch(reference.seed, 0, step)])
            optimizer.zero_grad()
            functional.cross_entropy(model(pool.images[rows]), pool.labels[rows]).backward()
            optimizer.step()
        models.append({name: value.detach() for name, value in model.named_parameters()})
    return models


def _private_loop(world: World, pool: Pool, references: Sequence[Reference]) -> list[Vector]:
    loss = partial(functional.cross_entropy, reduction="none")
    models, route = [], find_route(_network(world), loss, pool.images[:TRIED], pool.labels[:TRIED])
    for reference in references:
        plan, model = replace(world.plans[0], seed=reference.seed), _network(world)
        parameters = dict(model.named_parameters())
        for step in plan.steps(1):
            rows = torch.from_numpy(reference.shares[0][plan.batch(step)])
            gradients = per_example_gradients(
                model, loss, pool.images[rows], pool.labels[rows], route=route, often=plan.asks_often
            )
            with torch.no_grad():
                for name, value in plan.release_gradient(
                    gradients, Secret.of_seed(plan.seed).stream("noise", 0, step)
                ).items():
                    parameters[name].sub_(value, alpha=RATE)
        models.append({name: value.detach() for name, value in parameters.items()})
    return models


def _as_clients(world: World, references: Sequence[Reference]) -> list[Vector]:
    models = []
    for reference in references:
        plans = (replace(world.plans[0], seed=reference.seed),)
        own = replace(world, partitions=reference.shares, plans=plans)
        upload: State = local_upload(own, 0, world.initial, 1)
        models.append({name: world.initial.parameters[name] + value for name, value in upload.parameters.items()})
    return models


def _products_us(batch: int, models: int) -> float:
    x, errors = torch.randn(models, batch, 784), torch.randn(models, batch, 128)
    weights = torch.randn(models, 128, 784)

    def products() -> None:
        torch.bmm(x, weights.mT)
        weights.baddbmm_(errors.mT, x, alpha=-1e-9)

    return 1e6 * statistics.median(seconds(products) for _ in range(30)) / models


def _draw_us(world: World) -> float:
    numbers = sum(value.numel() for value in world.initial.parameters.values())
    stream = Secret.of_seed(0).stream("benchmark")
    draw = partial(standard_normal, numbers, stream, torch.float32)
    return 1e6 * statistics.median(seconds(draw) for _ in range(30))


def _difference(left: list[Vector], right: list[Vector]) -> float:
    pairs = zip(left, right, strict=True)
    return max(float((ours[name] - theirs[name]).abs().max()) for ours, theirs in pairs for name in ours)


if __name__ == "__main__":
    main()
