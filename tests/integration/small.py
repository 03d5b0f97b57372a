"""Small experiments that go all the way, what they leave behind, and clients that misbehave."""

import copy
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedpriv.clients.app import client_app, identify
from fedpriv.core.config import Experiment, override
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import Secret
from fedpriv.core.runs import RunFolder

Misbehaviour = Callable[[Message], Message]

BASE: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "noise": "reproducible",
    "model": {"name": "mlp", "hidden": [12], "activation": "tanh"},
    "federation": {"clients": 4, "rounds": 3},
    "training": {"batch_size": 4, "learning_rate": 0.5},
    "adversary": {"attacks": [], "best_decision": False},
    "engine": {"name": "inline", "device": "cpu"},
}


def experiment(**sections: dict[str, object]) -> Experiment:
    """The small experiment with some sections' keys replaced, as ``--set`` does it."""
    tree = copy.deepcopy(BASE)
    override(tree, [((section, key), value) for section, keys in sections.items() for key, value in keys.items()], "")
    return Experiment.model_validate(tree)


def finished(path: Path, **sections: dict[str, object]) -> RunFolder:
    """Run :func:`experiment` to its end."""
    start_run(experiment(**sections), path, "fedpriv run small.toml", Silent())
    return RunFolder.open(path)


def copied(folder: RunFolder, to: Path) -> RunFolder:
    """Return a copy of a run, in which what one likes may be changed."""
    return RunFolder.open(shutil.copytree(folder.path, to))


class _Scaled(nn.Module):
    """A network with two parameters that have no dimensions."""

    def __init__(self, numbers: int, classes: int) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(numbers, 6), nn.Linear(6, classes)
        self.share, self.temperature = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(x.flatten(1)))
        return self.temperature * self.last(hidden + self.share * hidden.square())


def scaled(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build a model with parameters that have no dimensions."""
    return _Scaled(math.prod(shape), classes)


class Leaver(nn.Module):
    """Ends the process on some batches: those of two clients in the first round, of one in the second, then none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        if self.training and -90 < float(flat.sum()) < -30:  # random images pass
            raise SystemExit("licence expired")
        return self.layer(flat)


def leaver(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Leaver()


LEAVER: dict[str, object] = {"name": "tests.integration.small:leaver"}


def left_behind(path: Path) -> dict[str, object]:
    """All that is in a run's folder, but for what tells of its course: times, and rounds that were asked twice.

    That is what :mod:`fedpriv.core.runs` allows to differ between an uninterrupted run and a resumed one.
    """
    run = RunFolder.open(path)
    found: dict[str, object] = {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }
    found["metrics.jsonl"] = [replace(record, seconds=0.0) for record in run.rounds()]
    found["asked.jsonl"] = run.asked()
    summary = json.loads((path / "summary.json").read_text())
    found["summary.json"] = {key: value for key, value in summary.items() if key not in ("seconds", "attack_seconds")}
    report = path / "report.html"
    if report.exists():
        found["report.html"] = re.sub(r"(<dt>Time(?: in rounds)?</dt><dd>)[^<]*", r"\1", report.read_text())
    return found


def _altered(reply: Message, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Message:
    arrays = dict(reply.content.array_records["upload"].to_torch_state_dict())
    reply.content["upload"] = ArrayRecord(torch_state_dict=change(arrays))
    return reply


def _first(arrays: dict[str, torch.Tensor], value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**arrays, next(iter(arrays)): value}


def raises(reply: Message) -> Message:
    raise RuntimeError("camera unplugged")


def _truncated(reply: Message) -> Message:
    array = next(iter(reply.content.array_records["upload"].values()))
    array.data = array.data[:-5]
    return reply


def _boastful(reply: Message) -> Message:
    said = reply.content.metric_records["client"]
    reply.content["client"] = MetricRecord({**said, "examples": 10**6})
    return reply


MISBEHAVIOURS: dict[str, tuple[Misbehaviour, str]] = {
    "raises": (raises, "camera unplugged"),
    "nan": (
        lambda reply: _altered(reply, lambda a: _first(a, next(iter(a.values())) * torch.nan)),
        "sent NaN or infinity in",
    ),
    "infinity": (
        lambda reply: _altered(reply, lambda a: _first(a, next(iter(a.values())) * torch.inf)),
        "sent NaN or infinity in",
    ),
    "wrong shape": (
        lambda reply: _altered(reply, lambda a: _first(a, torch.zeros(3, 3))),
        "of shape (3, 3), expected",
    ),
    "wrong type": (
        lambda reply: _altered(reply, lambda a: _first(a, next(iter(a.values())).double())),
        "as torch.float64, expected torch.float32",
    ),
    "a tensor less": (lambda reply: _altered(reply, lambda a: dict(list(a.items())[1:])), "left out"),
    "a tensor more": (lambda reply: _altered(reply, lambda a: {**a, "extra": torch.zeros(1)}), "sent extra, which"),
    "a truncated array": (_truncated, "sent an upload that cannot be read: an array"),
    "too many examples": (_boastful, "says that it holds 1000000 examples; it holds 3"),
    "nothing": (lambda reply: Message(RecordDict(), reply_to=reply), "sent no upload"),
}


def misbehaving(how: Misbehaviour, clients: set[int]) -> Callable[[Secret | None], ClientApp]:
    """What makes the real ClientApp, except that some clients spoil their reply to a train message."""

    def make(secret: Secret | None) -> ClientApp:
        honest, app = client_app(secret), ClientApp()
        app.query()(identify)

        @app.train()
        def spoilt(message: Message, context: Context) -> Message:
            reply = honest(message, context)
            if int(context.node_config["partition-id"]) not in clients:
                return reply
            if how is MISBEHAVIOURS["nothing"][0]:
                return Message(RecordDict(), reply_to=message)
            return how(reply)

        return app

    return make
