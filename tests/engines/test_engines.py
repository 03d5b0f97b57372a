"""The engines carry the same messages; whatever goes wrong in a client or the server is told."""

import re
import time
from dataclasses import dataclass, field

import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.logger import warn_deprecated_feature

from fedpriv.config import EngineConfig
from fedpriv.engines import check_engine, choose_engine, run_engine
from fedpriv.engines.identity import assume_server_identity
from fedpriv.errors import InputError

CLIENTS = 3
engines = pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=pytest.mark.slow)])


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


@pytest.mark.essential
@engines
def test_every_client_gets_its_message_and_its_partition(engine: str) -> None:
    heard = Heard()
    run_engine(asking_app("query", heard), echo_app(), CLIENTS, EngineConfig(name=engine))
    assert sorted(heard.answers) == [0, 1, 2]
    assert sorted(heard.answers.values()) == [20, 22, 24]


@engines
def test_a_client_that_raises_is_an_error_reply_with_the_reason(engine: str) -> None:
    heard = Heard()
    run_engine(asking_app("train", heard), echo_app(), CLIENTS, EngineConfig(name=engine))
    assert sorted(heard.answers) == [0, 2]
    assert len(heard.errors) == 1
    assert "no memory left in the sensor" in heard.errors[0]


@engines
def test_what_the_server_raises_reaches_the_caller(engine: str) -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        raise LookupError("disk full")

    with pytest.raises(LookupError, match="disk full"):
        run_engine(app, echo_app(), CLIENTS, EngineConfig(name=engine))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EngineConfig(name="ray", cpus_per_client=999), "engine.cpus_per_client = 999: Ray offers"),
        (EngineConfig(name="ray", address="127.0.0.1:1"), "engine.address = '127.0.0.1:1': no Ray cluster answers"),
        (EngineConfig(name="ray", address="ray://localhost:x"), "engine.address = 'ray://localhost:x': no Ray cluster"),
    ],
)
def test_a_cluster_that_cannot_serve_is_bad_input(config: EngineConfig, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        run_engine(asking_app("query", Heard()), echo_app(), CLIENTS, config)


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


@pytest.mark.slow
def test_a_client_keeps_its_state_and_answers_in_time_on_ray(deprecated: list[str]) -> None:
    """Whichever actor answers; and who does not answer in time is not waited for."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        counted = int(context.state.metric_records.get("asked", {"times": 0})["times"]) + 1
        context.state["asked"] = MetricRecord({"times": counted})
        time.sleep(5.0 if partition == 1 and counted == 3 else 0.0)
        return Message(RecordDict({"asked": MetricRecord({"times": counted})}), reply_to=message)

    server, answers = ServerApp(), []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        for timeout in (None, None, 2.0):
            questions = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
            replies = grid.send_and_receive(questions, timeout=timeout)
            answers.append([int(reply.content.metric_records["asked"]["times"]) for reply in replies])

    run_engine(server, app, CLIENTS, EngineConfig(name="ray", cpus_per_client=0.5))
    assert answers[1] == [2, 2, 2]
    assert answers[2] == [3, 3]
