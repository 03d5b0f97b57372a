"""What a round of many clients costs: the stacked engine and Ray beside the inline one, and beside pfl-research.

All ways of a set-up take turns in one process (pfl-research in one of its own that waits for its turn), so that
whatever disturbs the machine hits all of them; reported are medians of CPU seconds, and the median of the ratios of
turns. One thread.

- small: MLP(128) and LeNet on MNIST, 100 clients a round, batches of 10, 5 steps, with and without noise. A round is
  what the server waits for: messages to clients, their training, their uploads read and checked; no evaluation.
- flute: FLUTE's set-up: MNIST, logistic regression, 1,000 clients, 10 a round, batches of 10, rate 0.03, one epoch. A
  whole run, evaluation included: inline with one after every round, stacked with one every 20 rounds.
- pfl: pfl-research's CIFAR-10 set-up: 1,000 users of 50 images (280 where the data are the first of the two files), 50
  a round, one epoch, batches of 10, CNN of 1.6 million parameters. A round without evaluation. ``--pfl`` names the
  folder that pfl was installed in (``pip install --no-deps --target FOLDER pfl``, and what it needs); without it, only
  ours is measured.
- ray: one round of 10,000 clients on MNIST, MLP(16), six images each in batches of 2; inline, and on a Ray of this
  machine with an actor a core. CPU seconds are those of all processes. Of wall seconds, inline's are taken once and
  Ray's once a core: with a ratio of 1, Ray with two cores takes half as long. Only a quiet machine shows that.
- messages: bytes of the parameters that a node fetches once a round and of an answer, as Ray pickles them, and CPU
  milliseconds that the server takes for each answer.
- exchange: milliseconds a client of a round's whole exchange inline (serialise the state, call the ClientApp, check its
  reply), of the training alone, the very same function on the same batches, and of their difference.
"""

import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import psutil
import torch
from flwr.app import Message
from torch import nn

from benchmarks.measure import in_turns, medians, options, report, save, seconds
from fedpriv.clients.app import client_app
from fedpriv.clients.training import local_upload
from fedpriv.core.config import DataConfig, EngineConfig, Experiment
from fedpriv.core.plan import participants
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from fedpriv.data.datasets import list_datasets, load_dataset
from fedpriv.diagnosis.cost import cpu_seconds
from fedpriv.engines import run_engine
from fedpriv.engines.inline import InlineGrid, StackedGrid, assume_server_identity
from fedpriv.server.aggregation import ServerOptimizer
from fedpriv.server.app import server_app
from fedpriv.server.exchange import Federation, ask_for_uploads
from fedpriv.server.rules.mean import mean_upload
from studies.arguments import whole

TOLD = "scale: "  # begins what pfl's process says to us
SETUPS = ("small", "flute", "pfl", "ray", "messages", "exchange")
GRIDS = {"inline": InlineGrid, "stacked": StackedGrid}
MODELS: Mapping[str, dict[str, Any]] = {"mlp(128)": {"name": "mlp", "hidden": [128]}, "lenet": {"name": "lenet"}}
MECHANISMS: Mapping[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "gaussian": {"name": "gaussian", "sigma": 1.0},
    "vmf": {"name": "vmf", "kappa": 1000.0},
}
EXCHANGED = ((256, 160), (1024, 896))  # hidden units
EXCHANGING: tuple[dict[str, Any], ...] = ({"name": "none"}, {"name": "vmf", "epsilon": 100.0})
LEAST = 60  # rounds whose exchange is timed
SENT: Mapping[str, dict[str, Any]] = {
    "mlp(16)": {"name": "mlp", "hidden": [16]},
    "lenet": {"name": "lenet"},
    "resnet18": {"name": "torchvision:resnet18", "norm": "group"},
}


def main() -> None:
    """Measure, print a table, and write the rows."""
    parser = options("scale", __doc__)
    parser.add_argument("--only", nargs="+", choices=SETUPS, default=SETUPS, help="set-ups to measure")
    parser.add_argument("--repeats", type=whole(1), default=5, help="turns of every way")
    parser.add_argument("--pfl", type=Path, help="folder that pfl is installed in")
    with parser.parsed() as asked:
        torch.set_num_threads(1)
        rows: list[dict[str, Any]] = []
        if "small" in asked.only:
            rows += [small(model, mechanism, asked.repeats) for model in MODELS for mechanism in MECHANISMS]
        if "flute" in asked.only:
            rows.append(flute(asked.repeats))
        if "pfl" in asked.only:
            rows.append(pfl(asked.pfl, asked.repeats))
        if "ray" in asked.only:
            rows += on_ray(10_000, asked.repeats)
        sent = [messages(model, asked.repeats) for model in SENT] if "messages" in asked.only else []
        both = product(EXCHANGED, EXCHANGING) if "exchange" in asked.only else ()
        parts = [exchange(*each, max(asked.repeats, LEAST)) for each in both]
        _print(rows, sent, parts)
        save(asked.json, rows=rows, messages=sent, exchange=parts, torch=torch.__version__)


def _print(rows: Sequence[dict[str, Any]], sent: Sequence[dict[str, Any]], parts: Sequence[dict[str, Any]]) -> None:
    """A table of times, one of messages, and one of an exchange, where there are any."""
    lines = [
        {"setup": row["setup"], "way": way, "taken": taken, "ratio": ratio, "fast": 1 / ratio}
        for row in rows
        for (way, taken), ratio in zip(row["ways"].items(), row["ratios"].values(), strict=True)
    ]
    columns = {"set-up": "{setup}", "way": "{way}", "seconds": "{taken:.3f}", "of the first way": "{ratio:.2f}"}
    if lines:
        report({**columns, "times as fast": "{fast:.2f}"}, lines, words=2)
    sizes = {"parameters, bytes": "{parameters:,}", "an answer, bytes": "{answer:,}"}
    if sent:
        report({"network": "{network}", **sizes, "the server's ms for it": "{ms:.2f}"}, sent)
    if parts:
        columns = {"mechanism": "{mechanism}", "parameters": "{parameters}"}
        report({**columns, **{key: f"{{{key}:.3f}}" for key in ("exchange_ms", "training_ms", "overhead_ms")}}, parts)


def small(model: str, mechanism: str, repeats: int) -> dict[str, Any]:
    """The exchange of a round with 100 clients, inline and stacked."""
    world = build_world(
        _experiment(
            data={"name": "mnist", "train_examples": 5000},
            model=MODELS[model],
            federation={"clients": 100, "rounds": repeats + 2, "algorithm": "fedavg"},
            training={"batch_size": 10, "learning_rate": 0.05},
            mechanism=MECHANISMS[mechanism],
        )
    )
    ways = {name: _rounds(world, grid(client_app(world.secret), 100)) for name, grid in GRIDS.items()}
    return _turns(f"{model}, {mechanism}", ways, repeats)


def flute(repeats: int) -> dict[str, Any]:
    """A whole run of FLUTE's set-up: as it was, and stacked with an evaluation every 20 rounds."""
    sections: dict[str, Any] = {
        "data": {"name": "mnist"},
        "model": {"name": "logistic"},
        "training": {"batch_size": 10, "learning_rate": 0.03},
    }
    federation = {"clients": 1000, "clients_per_round": 10, "rounds": 100, "algorithm": "fedavg"}
    every, seldom = (
        build_world(_experiment(**sections, federation={**federation, **extra}, engine={"name": name}))
        for name, extra in (("inline", {}), ("stacked", {"evaluate_every": 20}))
    )
    ways = {
        "inline, tested every round": partial(cpu_seconds, partial(_run, every)),
        "stacked, every 20": partial(cpu_seconds, partial(_run, seldom)),
    }
    return _turns("FLUTE, 100 rounds", ways, min(repeats, 3), warm=False)


def pfl(folder: Path | None, repeats: int) -> dict[str, Any]:
    """A round of pfl-research's set-up by pfl itself, where it is there, and by ours."""
    there = {status.name for status in list_datasets("") if status.available}
    name = "cifar10-complete" if "cifar10-complete" in there else "cifar10"
    users = len(load_dataset(DataConfig(name=name), 1).x_train) // 50
    world = build_world(
        _experiment(
            data={"name": name},
            model={"name": "benchmarks.scale:cnn"},
            federation={"clients": users, "clients_per_round": 50, "rounds": repeats + 2, "algorithm": "fedavg"},
            training={"batch_size": 10, "learning_rate": 0.1},
        )
    )
    ours = {name: _rounds(world, grid(client_app(world.secret), users)) for name, grid in GRIDS.items()}
    with _pfl_rounds(folder, world) as theirs:
        return _turns(f"pfl-research, CIFAR-10, {users} users", {**theirs, **ours}, repeats)


def on_ray(clients: int, repeats: int) -> list[dict[str, Any]]:
    """A round of many clients, inline and on actors: CPU seconds of all processes, and wall seconds times cores."""
    # Ray takes a second to import, and the other set-ups do without it.
    import ray

    from fedpriv.engines import ray as engine
    from fedpriv.engines.tasks import RayResources

    world = build_world(
        _experiment(
            data={"name": "mnist"},
            model={"name": "mlp", "hidden": [16]},
            federation={"clients": clients, "rounds": repeats + 2, "algorithm": "fedavg"},
            training={"batch_size": 2, "learning_rate": 0.05},
        )
    )
    app, settings = client_app(world.secret), EngineConfig(name="ray", device="cpu")
    os.environ.setdefault("RAY_worker_niceness", "0")  # as inline's, or a busy machine holds up Ray alone
    engine.connect(RayResources.of(settings))
    try:
        cores = int(ray.cluster_resources()["CPU"])
        actors = engine.Actors(partial(engine.start_actors, app, config=settings), cores, lambda: cores)
        grid = engine.RayGrid(app, clients, actors, Event(), None, engine.CALL_SECONDS)
        calls = {"inline": _rounds(world, InlineGrid(app, clients)), f"Ray, {cores} cores": _rounds(world, grid)}
        walls: dict[str, list[float]] = {name: [] for name in calls}

        def taken(name: str) -> float:
            before = _family_seconds()
            walls[name].append(seconds(calls[name]) * (1 if name == "inline" else cores))
            return sum(now - before.get(process, 0.0) for process, now in _family_seconds().items())

        row = _turns(f"{clients:,} clients, CPU s", {name: partial(taken, name) for name in calls}, repeats)
    finally:
        ray.shutdown()
    measured = {name: iter(times[1:]) for name, times in walls.items()}  # the first turn was to warm up
    again = {name: partial(next, times) for name, times in measured.items()}
    return [row, _turns(f"{clients:,} clients, wall s x cores", again, repeats, warm=False)]


class _PackedGrid(InlineGrid):
    """Pickles what Ray would pickle, and says how large it is and when the answers were handed to the server."""

    parameters = answer = 0
    handed = 0.0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        listed = list(messages)
        if listed:
            self.parameters = len(pickle.dumps(listed[0].content))
        return super().push_messages(listed)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        packed = [pickle.dumps(reply) for reply in super().pull_messages(message_ids)]
        self.answer = len(packed[0])
        self.handed = time.process_time()
        return [pickle.loads(each) for each in packed]


def messages(model: str, repeats: int) -> dict[str, Any]:
    """The bytes of a question and an answer, and what the server takes to read an answer and add it to the mean."""
    clients = 8
    world = build_world(
        _experiment(
            data={"name": "cifar10", "train_examples": 100},
            model=SENT[model],
            federation={"clients": clients, "rounds": repeats},
            training={"batch_size": 2},
        )
    )
    grid = _PackedGrid(client_app(world.secret), clients)
    federation = _federation(world, grid)
    taken = []
    for number in range(1, repeats + 1):
        mean_upload(
            ask_for_uploads(federation, number, dict.fromkeys(range(clients), world.initial)).uploads, "examples"
        )
        taken.append(time.process_time() - grid.handed)
    ms = 1e3 * statistics.median(taken) / clients
    return {"network": model, "parameters": grid.parameters, "answer": grid.answer, "ms": ms}


def exchange(hidden: tuple[int, ...], mechanism: dict[str, Any], repeats: int) -> dict[str, Any]:
    """The medians of a round's exchange, of the training alone, and of their difference, for each of eight clients."""
    warm, clients = 5, range(8)
    world = build_world(
        _experiment(
            data={"name": "digits"},
            model={"name": "mlp", "hidden": hidden},
            federation={"clients": len(clients), "rounds": repeats + warm + 1},
            training={"batch_size": 8, "sampling": "fixed"},
            mechanism=mechanism,
        )
    )
    federation = _federation(world, InlineGrid(client_app(world.secret), len(clients)))
    pairs = []
    for number in range(1, repeats + warm + 1):
        whole_ = seconds(partial(ask_for_uploads, federation, number, dict.fromkeys(clients, world.initial)))
        alone = sum(seconds(partial(local_upload, world, client, world.initial, number)) for client in clients)
        pairs.append((whole_, alone, whole_ - alone))
    columns = zip(("exchange_ms", "training_ms", "overhead_ms"), zip(*pairs[warm:], strict=True), strict=True)
    figures = {name: 1e3 * statistics.median(taken) / len(clients) for name, taken in columns}
    return {
        "parameters": sum(value.numel() for value in world.initial.parameters.values()),
        "mechanism": mechanism["name"],
        **figures,
    }


def _family_seconds() -> dict[int, float]:
    """CPU seconds of this process and its children, by number."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {each.pid: sum(each.cpu_times()[:2]) for each in family}


def cnn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """pfl-research's network for CIFAR-10, as its configuration has it: Xavier weights, for images (C, H, W)."""
    channels, height, width = shape
    features = 64 * ((height - 4) // 2) * ((width - 4) // 2)
    network = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(features, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return network


def _turns(setup: str, ways: Mapping[str, Callable[[], float]], repeats: int, *, warm: bool = True) -> dict[str, Any]:
    """Medians of what each way takes, and of that over what the first way took in the same turn."""
    if warm:
        in_turns(ways, 1)
    times = in_turns(ways, repeats)
    first = next(iter(times.values()))
    ratios = {name: [mine / other for mine, other in zip(taken, first, strict=True)] for name, taken in times.items()}
    return {"setup": setup, "ways": medians(times), "ratios": medians(ratios)}


def _experiment(**sections: Any) -> Experiment:
    engine = {"device": "cpu", **sections.pop("engine", {})}
    return Experiment.model_validate({"seed": 1, **sections, "adversary": {"attacks": []}, "engine": engine})


def _federation(world: World, grid: InlineGrid) -> Federation:
    """What a server asks clients by; from now on this process is a server."""
    assume_server_identity(1)
    return Federation(grid, grid.nodes_by_partition(), world, world.experiment.model_dump_json())


def _rounds(world: World, grid: InlineGrid) -> Callable[[], float]:
    """Return what does one round more with each call: exchange, mean and the server's step, without evaluation."""
    federation = _federation(world, grid)
    optimizer = ServerOptimizer(world.experiment, world.initial)

    def round_() -> None:
        number = optimizer.rounds + 1
        replies = ask_for_uploads(
            federation, number, dict.fromkeys(participants(world.experiment, number), optimizer.state)
        )
        optimizer.step(mean_upload(replies.uploads, world.experiment.federation.weighting))

    return partial(cpu_seconds, round_)


def _run(world: World) -> None:
    """All rounds of an experiment, with its evaluations, in a folder that is thrown away."""
    experiment = world.experiment
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder.create(Path(place) / "run", experiment)
        server = server_app(world, folder, Silent())
        run_engine(server, client_app(world.secret), experiment.federation.clients, experiment.engine)


@contextmanager
def _pfl_rounds(folder: Path | None, world: World) -> Iterator[dict[str, Callable[[], float]]]:
    """A process of pfl's that does a round when it is asked to; nothing where there is none, with the reason."""
    if folder is None:
        print("pfl-research is left out: --pfl names no folder that it is installed in", file=sys.stderr)
        yield {}
        return
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "users.npz"
        rows = torch.from_numpy(np.stack(world.partitions))
        data = world.dataset
        images, labels = data.x_train[rows].numpy(), data.y_train[rows].numpy()
        np.savez(file, images=images, labels=labels, mean=np.array(data.mean), std=np.array(data.std))
        path = os.pathsep.join([str(Path.cwd()), str(folder.resolve())])
        errors = Path(place) / "errors.txt"
        with errors.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.scale_pfl", str(file)],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        try:
            started = _told(process) is not None
            if not started:
                reason = " ".join(errors.read_text().strip().splitlines()[-1:])
                print(f"pfl-research is left out: it does not run here: {reason}", file=sys.stderr)
            yield {"pfl-research": partial(_ask, process)} if started else {}
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _ask(process: "subprocess.Popen[str]") -> float:
    """Have pfl do a round, and return the CPU seconds that it took."""
    if process.stdin is not None:
        process.stdin.write("\n")
        process.stdin.flush()
    told = _told(process)
    if told is None:
        raise RuntimeError("pfl's process has ended")
    return float(told)


def _told(process: "subprocess.Popen[str]") -> str | None:
    """Wait until pfl's process says that it is done, and return what it says; ``None``: it has ended."""
    lines = iter(()) if process.stdout is None else iter(process.stdout)
    return next((line.removeprefix(TOLD) for line in lines if line.startswith(TOLD)), None)


if __name__ == "__main__":
    main()
