"""Small Flower apps of digits, each with other privacy software, and an audit of them in this process."""

import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.engines.inline import InlineGrid, assume_server_identity, run_server
from fedpriv.flower.app_settings import TapSettings
from fedpriv.flower.audit.audit import summed_up
from fedpriv.flower.audit.observers import ObservedApp, observing_mods, observing_strategies
from fedpriv.flower.audit.records import Answer, Audit, Claim
from fedpriv.flower.audit.simulation import Simulated, read_answers
from fedpriv.flower.noise import numpy_is_seeded

PROJECT = """
[project]
name = "digits"
version = "1.0.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "digits.server_app:app"
clientapp = "digits.client_app:app"
[tool.flwr.app.config]
rounds = 2
[tool.flwr.federations]
default = "local"
[tool.flwr.federations.local]
options.num-supernodes = 2
"""

CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{imports}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat, self.out = nn.Flatten(), nn.Linear(64, 10)
        {parts}

    def forward(self, x):
        return self.out(self.flat(x)){scaled}

def load_data(partition):
    digits = load_digits()
    rows = slice(100 * partition, 100 * partition + {size})
    images = torch.tensor(digits.images[rows], dtype=torch.float32)[:, None] / 16
    return DataLoader(TensorDataset(images, torch.tensor(digits.target[rows])), batch_size=8)

app = ClientApp(mods=[{mods}])

@app.train()
def train(message, context):
    net, loader = Net(), load_data(context.node_config["partition-id"])
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    examples = len(loader.dataset)
    optimizer = torch.optim.SGD(net.train().parameters(), lr=0.5)
    model = net
    {private}
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    metrics = MetricRecord({{"num-examples": examples}})
    {after}
    return Message(RecordDict({{"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}}), reply_to=message)
"""

SERVER = """
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import *
{imports}
from digits.client_app import Net

app = ServerApp()

@app.main()
def main(grid, context):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = ArrayRecord(Net().state_dict())
    strategy = {strategy}
    rounds = int(context.run_config.get("rounds", {rounds}))
    app.result = strategy.start(grid, start, num_rounds=rounds)
"""

AVERAGE = "FedAvg(fraction_evaluate=0.0)"
USUAL = {"imports": "", "parts": "", "scaled": "", "size": "16", "mods": "", "private": "", "after": ""}
LOCAL = {"imports": "from flwr.clientapp.mod import LocalDpMod", "mods": "LocalDpMod(1.0, 1.0, 8.0, 1e-5)"}
SCALE = {"parts": "self.scale = nn.Parameter(torch.tensor(1.0))", "scaled": " * self.scale"}
SCALAR = LOCAL | SCALE
UNEVEN = {"size": "(91 if partition == 0 else 1)"}
OPACUS = {
    "imports": "from opacus import PrivacyEngine",
    "private": """engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=1.1, max_grad_norm=1.0)""",
    "after": 'metrics["epsilon"] = engine.get_epsilon(1e-5)',
}


def write_app(
    folder: Path, client: Mapping[str, str], strategy: str = AVERAGE, imports: str = "", rounds: int = 2
) -> Path:
    """Write an app whose client and strategy are these."""
    (folder / "digits").mkdir(parents=True)
    (folder / "digits" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "digits" / "client_app.py").write_text(CLIENT.format(**USUAL | client))
    (folder / "digits" / "server_app.py").write_text(SERVER.format(strategy=strategy, imports=imports, rounds=rounds))
    return folder


@contextmanager
def importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The app's package is that of this folder, until the block ends."""
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(folder))
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "digits"]:
                del sys.modules[name]


@dataclass(frozen=True)
class Observed:
    """An audit, what it is made of, and the arrays that the server ended with."""

    audit: Audit
    answers: tuple[Answer, ...]
    run: Simulated
    arrays: dict[str, np.ndarray]

    @property
    def claims(self) -> dict[str, Claim]:
        """By what makes them."""
        return {claim.what: claim for claim in self.audit.claims}


def observed(app: Path, out: Path, clients: int, monkeypatch: pytest.MonkeyPatch) -> Observed:
    """Audit an app with its clients in this process, without attacks."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    monkeypatch.setenv("FEDPRIV_RUNS", str(out))
    torch.seed()  # other tests, in the same process, seed both generators
    if numpy_is_seeded():
        np.random.set_bit_generator(np.random.MT19937())
    assume_server_identity(1)
    with (
        importable(app, monkeypatch),
        observing_strategies() as notes,
        observing_mods(out, TapSettings(), app) as mods,
    ):
        client, server = (importlib.import_module(f"digits.{each}_app").app for each in ("client", "server"))
        run_server(server, InlineGrid(ObservedApp(client, out), clients))  # type: ignore[arg-type]
    run, answers = Simulated(tuple(mods), notes.layers, tuple(notes.rounds)), read_answers(out)
    arrays = {name: array.numpy() for name, array in server.result.arrays.items()}
    return Observed(summed_up("digits", run, answers, None, out), answers, run, arrays)
