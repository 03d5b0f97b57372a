"""Engines carry messages; whatever goes wrong in a client or the server is told. Ray: ``test_engine_ray.py``."""

import re
import time
from dataclasses import dataclass, field

import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.logger import warn_deprecated_feature

from fedpriv.core.config import EngineConfig
from fedpriv.core.errors import InputError
from fedpriv.engines import check_engine, choose_engine, run_engine
from fedpriv.engines.inline import assume_server_identity

CLIENTS = 3


def echo_app() -> ClientApp:
    """Replies with its partition and a doubled number; partition 1 raises when asked to train."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        number = int(message.content.metric_records["question"]["number"])
        partition = int(context.node_config["partition-id"])
        answer = MetricRecord({"partition": partition, "double": 2 * number})
        return Message(RecordDict({"answer": answer}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if int(context.node_config["partition-id"]) == 1:
            raise ValueError("no memory left in the sensor")
        return query(message, context)

    return app


@dataclass
class Heard:
    answers: dict[int, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def asking_app(kind: str, heard: Heard) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        while len(nodes := list(grid.get_node_ids())) < CLIENTS:
            time.sleep(0.01)
        question = [
            Message(RecordDict({"question": MetricRecord({"number": 10 + i})}), node, kind)
            for i, node in enumerate(nodes)
        ]
        for reply in grid.send_and_receive(question):
            if reply.has_error():
                heard.errors.append(reply.error.reason)
            else:
                answer = reply.content.metric_records["answer"]
                heard.answers[int(answer["partition"])] = int(answer["double"])

    return app


def test_every_client_gets_its_message_and_its_partition() -> None:
    heard = Heard()
    run_engine(asking_app("query", heard), echo_app(), CLIENTS, EngineConfig(name="inline"))
    assert sorted(heard.answers) == [0, 1, 2]
    assert sorted(heard.answers.values()) == [20, 22, 24]


def test_a_client_that_raises_is_an_error_reply_with_the_reason() -> None:
    heard = Heard()
    run_engine(asking_app("train", heard), echo_app(), CLIENTS, EngineConfig(name="inline"))
    assert sorted(heard.answers) == [0, 2]
    assert len(heard.errors) == 1
    assert "no memory left in the sensor" in heard.errors[0]


def test_what_the_server_raises_reaches_the_caller() -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        raise LookupError("disk full")

    with pytest.raises(LookupError, match="disk full"):
        run_engine(app, echo_app(), CLIENTS, EngineConfig(name="inline"))


@pytest.mark.parametrize(
    ("address", "variable", "expected"),
    [
        ("127.0.0.1:1", "", "engine.address = '127.0.0.1:1'"),
        ("ray://localhost:x", "127.0.0.1:1", "engine.address = 'ray://localhost:x'"),
        ("", "127.0.0.1:1", "RAY_ADDRESS = '127.0.0.1:1'"),
    ],
)
def test_a_cluster_that_does_not_answer_is_bad_input(
    address: str, variable: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(InputError, match=f"{re.escape(expected)}: no Ray cluster answers"):
        run_engine(asking_app("query", Heard()), echo_app(), CLIENTS, EngineConfig(name="ray", address=address))


@pytest.mark.parametrize(
    ("config", "engine"),
    [
        (EngineConfig(device="cpu"), "inline"),
        (EngineConfig(address="auto"), "ray"),
        (EngineConfig(name="inline", address="auto"), "inline"),
        (EngineConfig(name="ray", device="cpu"), "ray"),
    ],
)
def test_auto_means_ray_where_there_is_something_to_share(config: EngineConfig, engine: str) -> None:
    assert choose_engine(config) == engine


def test_flower_still_reads_the_senders_ids_where_we_write_them() -> None:
    """Fails loudly when a new Flower moves the private class that the inline engine fills in."""
    assume_server_identity(77)
    message = Message(RecordDict(), 5, "query")
    assert message.metadata.run_id == 77
    assert message.metadata.dst_node_id == 5


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (EngineConfig(name="ray"), "engine.name = 'ray'"),
        (EngineConfig(address="auto"), "engine.address = 'auto'"),
        (EngineConfig(attack_tasks=2), "engine.attack_tasks = 2"),
    ],
)
def test_what_needs_ray_says_how_to_get_it(config: EngineConfig, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_engine(config)
    monkeypatch.setattr("fedpriv.engines._has_ray", lambda: False)
    check_engine(EngineConfig())
    with pytest.raises(InputError, match=re.escape(f"{setting} needs Ray, which is not installed: pip install")):
        check_engine(config)


def test_what_flower_deprecates_is_noticed(deprecated: list[str]) -> None:
    """Every test fails on it, not this one alone."""
    warn_deprecated_feature("run_simulation")
    assert len(deprecated) == 1
    deprecated.clear()
