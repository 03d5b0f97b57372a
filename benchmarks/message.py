"""What a client message costs beyond the training itself, on the inline engine.

Usage: python -m benchmarks.message [--json FILE]

Side by side, interleaved: the whole exchange (serialise the global state, call the ClientApp, check its reply) and the
training alone, the very same function on the same batches. The difference is the overhead of one message.
"""

import statistics
from functools import partial

import torch

from benchmarks.measure import options, report, save, seconds
from fedpriv.clients.app import client_app
from fedpriv.clients.training import local_upload
from fedpriv.core.config import DataConfig, Experiment, FederationConfig, TrainingConfig
from fedpriv.core.world import World, build_world
from fedpriv.engines.identity import assume_server_identity
from fedpriv.engines.inline import InlineGrid
from fedpriv.mechanisms import MechanismSettings, mechanism_settings
from fedpriv.models.mlp import MlpSettings
from fedpriv.server.exchange import Federation, Patience, ask_for_uploads, find_clients

_REPEATS = 60
_WARMUP = 5


def _experiment(hidden: tuple[int, ...], mechanism: MechanismSettings) -> Experiment:
    return Experiment(
        data=DataConfig(name="digits"),
        model=MlpSettings(hidden=hidden),
        federation=FederationConfig(clients=8, rounds=_REPEATS + _WARMUP + 1),
        training=TrainingConfig(batch_size=8, sampling="fixed"),
        mechanism=mechanism,
    )


def measure(world: World) -> dict[str, float]:
    """Return the median milliseconds a client of a round's exchange, of the training alone, and of their difference."""
    assume_server_identity(1)
    grid = InlineGrid(client_app(world.secret), world.experiment.federation.clients)
    clients = range(world.experiment.federation.clients)
    nodes = find_clients(grid, len(clients), Patience(10, 10), print).nodes
    federation = Federation(grid, nodes, world, world.experiment.model_dump_json())
    whole, training = [], []
    for number in range(1, _REPEATS + _WARMUP + 1):
        states = dict.fromkeys(clients, world.initial)
        whole.append(seconds(partial(ask_for_uploads, federation, number, states)) / len(clients))
        parts = [seconds(partial(local_upload, world, client, world.initial, number)) for client in clients]
        training.append(sum(parts) / len(clients))
    differences = [a - b for a, b in zip(whole, training, strict=True)]
    return {
        "exchange_ms": 1e3 * statistics.median(whole[_WARMUP:]),
        "training_ms": 1e3 * statistics.median(training[_WARMUP:]),
        "overhead_ms": 1e3 * statistics.median(differences[_WARMUP:]),
    }


def main() -> None:
    """Measure two sizes of model with and without a mechanism and print a table."""
    with options("message", __doc__).parsed() as asked:
        torch.set_num_threads(1)
        rows = []
        for hidden in ((256, 160), (1024, 896)):
            for mechanism in (mechanism_settings({}), mechanism_settings({"name": "vmf", "epsilon": 100.0})):
                world = build_world(_experiment(hidden, mechanism))
                parameters = sum(value.numel() for value in world.initial.parameters.values())
                rows.append({"parameters": parameters, "mechanism": mechanism.name, **measure(world)})
        keys = ("exchange_ms", "training_ms", "overhead_ms")
        columns = {"mechanism": "{mechanism}", "parameters": "{parameters}", **{key: f"{{{key}:.3f}}" for key in keys}}
        report(columns, rows)
        save(asked.json, rows=rows)


if __name__ == "__main__":
    main()
