"""A ClientApp that returns what a test tells it to, and messages to ask it with."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedpriv.engines.identity import assume_server_identity

Arrays = Mapping[str, np.ndarray]


def client(mods: list[Any], trained: Callable[[Arrays], Arrays]) -> ClientApp:
    """Returns ``trained`` of the arrays that it is sent, with a loss."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = RecordDict({"arrays": record(trained(arrays(message)))})
        content["metrics"] = MetricRecord({"train_loss": 0.25, "num-examples": 77})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        content = RecordDict({"arrays": message.content.array_records["arrays"]})
        content["metrics"] = MetricRecord({"accuracy": 0.5, "num-examples": 77})
        return Message(content, reply_to=message)

    return app


def record(values: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in values.items()})


def arrays(message: Message) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}


def question(values: Arrays, kind: str = "train", number: int = 1) -> Message:
    assume_server_identity(1)
    content = RecordDict({"arrays": record(values), "config": ConfigRecord({"lr": 0.1, "server-round": number})})
    return Message(content, 4, kind)


def context(partition: int = 3, run: int = 1) -> Context:
    return Context(run, partition + 1, {"partition-id": partition, "num-partitions": 5}, RecordDict(), {})


def settings(folder: Path, text: str) -> Path:
    path = folder / "fedpriv.toml"
    path.write_text(text)
    return path
