"""What a client message costs beyond the training itself, on the inline engine.

Usage: python -m benchmarks.message [--json FILE]

Side by side, interleaved: the whole exchange (serialise the global state, call the ClientApp, check its reply) and the
training alone, the very same function on the same batches. The difference is the overhead of one message.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from fedpriv.clients.app import client_app
from fedpriv.clients.training import local_upload
from fedpriv.config import DataConfig, Experiment, FederationConfig, TrainingConfig
from fedpriv.engines.identity import assume_server_identity
from fedpriv.engines.inline import InlineGrid
from fedpriv.mechanisms import MechanismSettings, mechanism_settings
from fedpriv.models.mlp import MlpSettings
from fedpriv.server.exchange import ask_clients, find_clients
from fedpriv.server.uploads import allowed_uploads
from fedpriv.world import World, build_world

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
    nodes = find_clients(grid, len(clients), timeout=10)
    text, allowed = world.experiment.model_dump_json(), allowed_uploads(world)
    whole, training = [], []
    for number in range(1, _REPEATS + _WARMUP + 1):
        began = time.perf_counter()
        ask_clients(grid, nodes, clients, world.initial, allowed, text, number, None)
        middle = time.perf_counter()
        for client in clients:
            local_upload(world, client, world.initial, number)
        whole.append((middle - began) / len(clients))
        training.append((time.perf_counter() - middle) / len(clients))
    differences = [a - b for a, b in zip(whole, training, strict=True)]
    return {
        "exchange_ms": 1e3 * statistics.median(whole[_WARMUP:]),
        "training_ms": 1e3 * statistics.median(training[_WARMUP:]),
        "overhead_ms": 1e3 * statistics.median(differences[_WARMUP:]),
    }


def main() -> None:
    """Measure two sizes of model with and without a mechanism and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for hidden in ((256, 160), (1024, 896)):
        for mechanism in (mechanism_settings({}), mechanism_settings({"name": "vmf", "epsilon": 100.0})):
            world = build_world(_experiment(hidden, mechanism))
            parameters = sum(value.numel() for value in world.initial.parameters.values())
            rows.append({"parameters": parameters, "mechanism": mechanism.name, **measure(world)})
    print(f"{'parameters':>10}  {'mechanism':<9}  {'exchange':>9}  {'training':>9}  {'overhead':>9}   (median ms)")
    for row in rows:
        print(
            f"{row['parameters']:>10}  {row['mechanism']:<9}  {row['exchange_ms']:>9.3f}  {row['training_ms']:>9.3f}  "
            f"{row['overhead_ms']:>9.3f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
