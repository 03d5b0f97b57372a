"""A ClientApp that returns what a test tells it to, messages to ask it with, and the app of docs/flower-app.md."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from fedpriv.engines.inline import assume_server_identity
from tests.docs.pages import ROOT, blocks

Arrays = Mapping[str, np.ndarray]

PAGE = ROOT / "docs" / "flower-app.md"
PROJECT = """
[project]
name = "quickstart"
version = "1.0.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "quickstart.server_app:app"
clientapp = "quickstart.client_app:app"
"""


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


class Old(NumPyClient):
    """Flower's own tutorial: message and reply have records of other names; parameters move by 0.3."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return [value + np.float32(0.3) for value in parameters], 10, {"loss": 1.0}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 0.5, 10, {}


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


def own_app(folder: Path, protected: bool = False) -> Path:
    """The app as a reader of the page has it, with the two lines changed."""
    (folder / "quickstart").mkdir()
    (folder / "quickstart" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(PROJECT)
    texts = {block.title: block.text for block in blocks(PAGE)}
    for title in ("quickstart/task.py", "quickstart/client_app.py", "quickstart/server_app.py", "fedpriv.toml"):
        (folder / title).write_text(texts[title])
    added, line = texts["change"].strip().split("\n\n")
    code = folder / "quickstart" / "client_app.py"
    changed = code.read_text().replace("app = ClientApp()\n", f"{added}\n{line}\n")
    assert changed.count("tap(") == 1
    if protected:
        changed = changed.replace("tap(__file__)]", "tap(__file__), privatise(__file__)]")
        (folder / "fedpriv.toml").write_text(texts["protected.toml"].replace("/var/lib/quickstart", str(folder)))
    code.write_text(changed)
    return folder
