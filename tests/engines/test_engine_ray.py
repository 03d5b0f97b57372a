"""The Ray engine on a cluster that runs already: who answers, fails, dies or is late, and what workers are told.

One run, since a cluster and its actors take seconds to start.
"""

import os
import pickle
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import ray
from flwr.app import ConfigRecord, Context, Message, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from fedpriv.clients.app import client_app as app_of_clients
from fedpriv.core.config import EngineConfig
from fedpriv.core.errors import InputError
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.engines import ray as engine
from fedpriv.engines import run_engine
from fedpriv.engines.inline import InlineGrid, answered, received_message, run_server
from fedpriv.engines.ray import Actors, RayGrid
from fedpriv.engines.tasks import RayResources
from fedpriv.server.app import server_app as app_of_server
from tests.integration.small import experiment

CLIENTS = 3
# Who does as it is told is asked last: the others are answered even where one actor is left.
ORDER = (0, 2, 1)
WORKERS = ("FEDPRIV_DATA", "PYTHONPATH")
# What partition 1 is told to do, one question after the other, and for how many seconds its answer is waited for.
ROUNDS: list[tuple[dict[str, float], float | None]] = [
    ({}, None),
    ({"raises": 1}, None),
    ({}, None),
    ({"deaths": 1}, None),
    ({"deaths": 3}, None),
    ({}, None),
    ({"seconds": 7.0}, 4.0),
]


@dataclass
class Round:
    """What each partition replied: its double, how often it had answered, its environment; and what failed."""

    doubles: dict[int, int] = field(default_factory=dict)
    answered: dict[int, int] = field(default_factory=dict)
    told: list[tuple[str, ...]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a cluster of two CPUs, as ``ray start --head`` makes one, where no other program finds it unasked."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short, as the paths of sockets have to be
        monkeypatch.setenv("RAY_TMPDIR", folder)
        bare = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **bare})
        yield cluster.address
        cluster.shutdown()


def client_app(deaths: Path) -> ClientApp:
    """Doubles a number and counts its answers; partition 1 does as it is told. Each death is a byte in a file."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        asked = {key: float(value) for key, value in message.content.metric_records["question"].items()}
        if partition == 1 and "raises" in asked:
            raise ValueError("no memory left in the sensor")
        if partition == 1 and deaths.stat().st_size < asked.get("deaths", 0):
            with deaths.open("ab") as file:
                file.write(b"x")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(asked.get("seconds", 0.0) if partition == 1 else 0.0)
        times = int(context.state.metric_records.get("answered", {"times": 0})["times"]) + 1
        context.state["answered"] = MetricRecord({"times": times})
        reply = MetricRecord({"partition": partition, "double": int(2 * asked["number"]), "times": times})
        told = ConfigRecord({name: os.environ[name] for name in WORKERS})
        return Message(RecordDict({"reply": reply, "told": told}), reply_to=message)

    return app


def server_app(rounds: list[Round]) -> ServerApp:
    """Asks the questions, notes what comes back, and raises in the end."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        for order, timeout in ROUNDS:
            heard = Round()
            nodes = list(grid.get_node_ids())
            records = {i: RecordDict({"question": MetricRecord({"number": 10 + i, **order})}) for i in ORDER}
            questions = [Message(records[i], nodes[i], "query") for i in ORDER]
            for reply in grid.send_and_receive(questions, timeout=timeout):
                note(heard, reply)
            rounds.append(heard)
        raise LookupError("disk full")

    return app


def note(heard: Round, reply: Message) -> None:
    if reply.has_error():
        heard.errors.append(reply.error.reason)
        return
    answer = reply.content.metric_records["reply"]
    partition = int(answer["partition"])
    heard.doubles[partition], heard.answered[partition] = int(answer["double"]), int(answer["times"])
    heard.told.append(tuple(str(reply.content.config_records["told"][name]) for name in WORKERS))


class Place:
    """Ray's object store and one actor of it, in this process: what is stored, and what an actor is asked.

    The first call for several clients fails as it is told.
    """

    def __init__(self, app: ClientApp, fault: RayError | None) -> None:
        self.app, self.fault = app, fault
        self.stored: list[RecordDict] = []
        self.calls: list[tuple[int, list[int]]] = []  # what was sent, to which clients
        self.answer = self
        self.ready = SimpleNamespace(remote=lambda: "ready")
        self._answers: dict[str, list[tuple[Message, Context]]] = {"ready": []}

    def put(self, content: RecordDict) -> int:
        self.stored.append(content)
        return len(self.stored) - 1

    def remote(self, sent: int, clients: list[tuple[Metadata, Context]]) -> str:
        self.calls.append((sent, [metadata.dst_node_id for metadata, _ in clients]))
        content = pickle.loads(pickle.dumps(self.stored[sent]))
        self._answers[str(len(self.calls))] = [
            (answered(self.app, received_message(metadata, content), context), context) for metadata, context in clients
        ]
        return str(len(self.calls))

    def wait(self, asked: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return asked[:num_returns], asked[num_returns:]

    def get(self, reference: str) -> tuple[list[tuple[Message, Context]], float]:
        answers = self._answers[reference]
        if self.fault is not None and len(answers) > 1:
            fault, self.fault = self.fault, None
            raise fault
        return answers, 1.0


@pytest.mark.parametrize("fault", [None, ActorDiedError(), RayTaskError("answer", "", MemoryError())])
def test_parameters_are_stored_once_a_round_and_clients_handed_over_together(
    fault: RayError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a call for several fails, each is asked again, alone."""
    clients, rounds = 12, 3
    world = build_world(experiment(federation={"clients": clients, "rounds": rounds}))
    folders = [RunFolder.create(tmp_path / name, world.experiment) for name in ("ray", "inline")]
    place = Place(app_of_clients(world.secret), fault)
    for name in ("put", "wait", "get"):
        monkeypatch.setattr(ray, name, getattr(place, name))
    actors = Actors(lambda count: [copy(place) for _ in range(count)], 2, lambda: 2)
    grid = RayGrid(place.app, clients, actors, Event(), None, call_seconds=1e9)
    for folder, one in zip(folders, (grid, InlineGrid(place.app, clients)), strict=True):
        run_server(app_of_server(world, folder, Silent()), one)
    for number in range(rounds):
        calls = [asked for sent, asked in place.calls if sent == number]
        times = Counter(node for asked in calls for node in asked)
        twice = {node for node in times if times[node] == 2}
        assert set(times) == set(range(1, clients + 1))
        assert bool(twice) == (fault is not None and number == 0)
        assert sum(times.values()) == clients + len(twice)
        assert all([node] in calls for node in twice)
    assert max(len(asked) for _, asked in place.calls) == clients // 2
    parameters, others = (folder.path / "checkpoint" / "server.safetensors" for folder in folders)
    assert parameters.read_bytes() == others.read_bytes()


@pytest.mark.parametrize("deaths", [0, 2, 3])
def test_a_server_of_rays_client_that_dies_is_started_again(deaths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [ConnectionAbortedError("Starting Ray client server failed. See x.err")] * deaths + [ValueError("stop")]

    def init(**_: object) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(engine, "_knock", lambda *_: None)
    with pytest.raises(InputError, match="stop" if deaths < 3 else "died 3 times; see .*err in the logs") as caught:
        engine.connect(RayResources(1.0, 0.0, "ray://here:1"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("timeout", "together"), [(None, True), (60.0, False)])
def test_with_a_timeout_of_rounds_each_client_is_handed_over_alone(
    timeout: float | None, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs would take the others of its call with it."""
    made: list[float] = []
    for name, value in (("connect", None), ("Actors", None), ("run_server", None), ("_room", 2)):
        monkeypatch.setattr(engine, name, lambda *_, value=value: value)
    monkeypatch.setattr(engine, "RayGrid", lambda *arguments: made.append(arguments[-1]))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    run_engine(server_app([]), ClientApp(), CLIENTS, EngineConfig(name="ray"), timeout)
    assert [seconds > 0 for seconds in made] == [together]


@pytest.mark.slow
@pytest.mark.essential
def test_a_run_on_a_running_cluster(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deaths").touch()
    # Set after the cluster was started, so that its workers have them from this run alone.
    monkeypatch.setenv("FEDPRIV_DATA", "elsewhere")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    rounds: list[Round] = []
    config = EngineConfig(name="ray", address=address)
    with pytest.raises(LookupError, match="disk full"):
        run_engine(server_app(rounds), client_app(tmp_path / "deaths"), CLIENTS, config)

    everybody = {0: 20, 1: 22, 2: 24}
    others = {0: 20, 2: 24}
    assert [heard.doubles for heard in rounds] == [everybody, others, everybody, everybody, others, everybody, others]
    # Its state is that of its last answer, whichever actor gives it, and also where the first one died over it.
    assert [heard.answered.get(1) for heard in rounds] == [1, None, 2, 3, None, 4, None]
    assert [heard.answered[2] for heard in rounds] == [1, 2, 3, 4, 5, 6, 7]
    assert [len(heard.errors) for heard in rounds] == [0, 1, 0, 0, 1, 0, 0]
    assert "no memory left in the sensor" in rounds[1].errors[0]
    assert re.match("Actor(Died|Unavailable)Error: [^\n]+$", rounds[4].errors[0])
    assert (tmp_path / "deaths").stat().st_size == 3
    path = os.pathsep.join([str(Path.cwd()), os.environ["PYTHONPATH"]])
    assert {told for heard in rounds for told in heard.told} == {("elsewhere", path)}
    # The cluster is still there, and has no room for this one.
    with pytest.raises(InputError, match=re.escape("engine.cpus_per_client = 999: Ray offers 2 CPUs in all")):
        run_engine(server_app([]), client_app(tmp_path), CLIENTS, config.model_copy(update={"cpus_per_client": 999.0}))
