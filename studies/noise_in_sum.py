"""Noise in the sum: how well logistic regression trains with privatise under Flower's SecAgg+, and without both.

scikit-learn's digits dealt out to the clients, one step on all of them in each round; Flower's simulation with FedAvg
and SecAggPlusWorkflow, whose other settings are its own. The test digits are 297 others. Needs Ray; with --inline the
same mods and workflow run in one process, without Ray's waiting.
"""

import copy
import json
import logging
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from sklearn.datasets import load_digits

from fedpriv.core.errors import InputError
from fedpriv.core.numbers import several
from fedpriv.engines.inline import InlineGrid, run_server
from fedpriv.flower import privatise
from studies.arguments import StudyParser, whole, wholes
from studies.local_noise import CLASSES, TRAINED, Floats, features, order

RATE, CLIP_NORM = 8.0, 0.5
NEIGHBOURS, THRESHOLD = 5, 4
"""With how many clients, itself included, a client shares keys, and how many must answer: 80 of 100 are in a sum."""

SETTINGS = """
[mechanism]
name = "distributed"
target_epsilon = {epsilon}
clip_norm = {clip_norm}
survivors = {survivors}

[privatise]
rounds = {rounds}
folder = "{folder}"
"""


class Client(NumPyClient):
    """Takes one step of logistic regression on its digits."""

    def __init__(self, rows: Floats, labels: Floats) -> None:
        """Take images (N, d) and labels (N, 10)."""
        self.rows, self.labels = rows, labels

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        """Return the weights after the step."""
        scores = self.rows @ parameters[0]
        likely = np.exp(scores - scores.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
        step = RATE / len(self.rows) * self.rows.T @ (self.labels - likely)
        return [(parameters[0] + step).astype(np.float32)], len(self.rows), {}


class OneProcess(InlineGrid):
    """Messages share no records, as over a network; Flower's mod takes keys out of them."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Have each message answered."""
        copies = list(messages)
        for message in copies:
            message.content = copy.deepcopy(message.content)
        return super().push_messages(copies)


def trained(mods: list[Any], clients: int, rounds: int, seed: int, inline: bool) -> Floats:
    """Return the weights (d, 10) after a simulation."""
    rows, labels = features(False), np.eye(CLASSES)[load_digits().target[order()]]
    dealt = np.random.default_rng(seed).permutation(TRAINED)
    found: list[Floats] = []
    server = ServerApp()

    def client_fn(context: Context) -> Any:
        own = dealt[int(context.node_config["partition-id"]) :: clients]
        return Client(rows[own], labels[own]).to_client()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        start = ndarrays_to_parameters([np.zeros((rows.shape[1], CLASSES), np.float32)])
        strategy = FedAvg(
            fraction_evaluate=0.0, min_fit_clients=clients, min_available_clients=clients, initial_parameters=start
        )
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=rounds), strategy=strategy)
        summing = SecAggPlusWorkflow(num_shares=NEIGHBOURS, reconstruction_threshold=THRESHOLD)
        DefaultWorkflow(fit_workflow=summing if mods else None)(grid, legacy)
        found.append(next(iter(legacy.state.array_records["parameters"].values())).numpy())

    app = ClientApp(client_fn=client_fn, mods=mods)
    if inline:
        run_server(server, OneProcess(app, clients))
        return found[0]
    run_simulation(server, app, clients, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    return found[0]


def accuracy(weights: Floats) -> float:
    """Return the share of test digits that are right."""
    scores = features(False)[TRAINED:] @ weights
    return float((scores.argmax(1) == load_digits().target[order()][TRAINED:]).mean())


def protected(clients: int, rounds: int, epsilon: float, seed: int, inline: bool) -> tuple[float, str]:
    """Return the accuracy with privatise, and what the worst client's ledger says."""
    with tempfile.TemporaryDirectory() as home:
        path, ledgers = Path(home) / "fedpriv.toml", Path(home) / "privacy"
        survivors = clients // NEIGHBOURS * THRESHOLD
        own = {"epsilon": epsilon, "clip_norm": CLIP_NORM, "survivors": survivors, "rounds": rounds, "folder": ledgers}
        path.write_text(SETTINGS.format(**own))
        right = accuracy(trained([secaggplus_mod, privatise(path)], clients, rounds, seed, inline))
        lines = [json.loads(each.read_text()) for each in ledgers.glob("client-*.json")]
    worst = max(lines, key=lambda line: line["epsilon"])
    claim = f"epsilon {worst['epsilon']:.3f} at delta {worst['delta']:g} ({worst['adjacency']})"
    noise = f"sigma {worst['noise']:.2f} on the sum of {survivors}"
    return right, f"{claim}, {several(worst['participations'], 'round')}, {len(lines)} clients, {noise}"


def main() -> None:
    """Print one line for each seed."""
    parser = StudyParser("studies.noise_in_sum", __doc__)
    parser.add_argument("--clients", type=whole(NEIGHBOURS), default=100, help="number of clients")
    parser.add_argument("--rounds", type=whole(1), default=30, help="rounds")
    parser.add_argument("--epsilon", type=float, default=8.0, help="of a client's whole run")
    parser.add_argument("--seeds", type=wholes, default=(1, 2, 3), help="a run for each")
    parser.add_argument("--inline", action="store_true", help="in one process, without Ray")
    with parser.parsed() as asked:
        if not asked.inline and find_spec("ray") is None:
            raise InputError("Flower's simulation needs Ray: pip install 'fedpriv[ray]'; --inline does without")
        for name in ("flwr", "fedpriv"):
            logging.getLogger(name).setLevel(logging.ERROR)
        for seed in asked.seeds:
            without = accuracy(trained([], asked.clients, asked.rounds, seed, asked.inline))
            right, said = protected(asked.clients, asked.rounds, asked.epsilon, seed, asked.inline)
            print(f"seed {seed}: accuracy {right:.3f}, without {without:.3f}; {said}", flush=True)


if __name__ == "__main__":
    main()
