"""The Ray engine: a Flower Grid whose clients are Ray actors, with shares of CPUs and GPUs, here or on a cluster."""

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import ray
from flwr.app import Context, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedpriv.core.config import EngineConfig
from fedpriv.core.errors import InputError, RunFailedError, one_line
from fedpriv.engines.inline import (
    RUN_ID,
    InlineGrid,
    answered,
    assume_server_identity,
    failed,
    received_message,
    run_server,
)
from fedpriv.engines.tasks import RayResources

_KNOCK_SECONDS = 10.0
_LOOK_SECONDS = 0.1
# How often it is looked whether any node has room, where none answers.
_ROOM_SECONDS = 5.0
# How often the cluster's head is looked for, and how long it may be away.
_HEAD_SECONDS, _LOST_SECONDS = 2.0, 10.0
# How long a call of an actor takes, where clients are faster: each call has costs of its own.
CALL_SECONDS = 0.25
# How often a connection by ray:// is tried; each that fails takes half a minute.
_CLIENT_TRIES = 3
# How long a node's first worker may take to start.
_NODE_SECONDS = 120.0


def run_ray(
    server_app: ServerApp, client_app: ClientApp, clients: int, config: EngineConfig, timeout: float | None
) -> None:
    """Run the apps on Ray actors; a local Ray is started, and stopped in the end, unless an address names one."""
    resources = RayResources.of(config)
    connect(resources)
    address = config.address or os.environ.get("RAY_ADDRESS", "")
    head = _Head() if address and not address.startswith("ray://") else None
    try:
        with _silenced(), _stoppable() as stopped:
            room = partial(_room, resources)
            actors = Actors(partial(start_actors, client_app, config=config), min(clients, room()), room)
            # A client that hangs would take along those that its actor was handed with it.
            call_seconds = CALL_SECONDS if timeout is None else 0.0
            run_server(server_app, RayGrid(client_app, clients, actors, stopped, head, call_seconds))
    except ConnectionError as error:  # of Ray's client, whose server is gone
        raise RunFailedError(f"the Ray cluster, {address}, is gone: {one_line(error)}") from None
    finally:
        if head is None or not head.lost:  # without its head Ray would hang here
            ray.shutdown()
        if head is not None:
            head.end()


@contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """Have Ctrl-C or SIGTERM set an event, which the grid looks at between steps; a second one ends the run at once."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped  # signals are not for other threads
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(*_: object) -> None:
        stopped.set()
        as_usual()

    def as_usual() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    for number in usual:
        signal.signal(number, stop)
    try:
        yield stopped
        if stopped.is_set():
            raise KeyboardInterrupt
    finally:
        as_usual()


def _room(resources: RayResources) -> int:
    """How many actors fit: an actor does not reach from one node to another."""
    room = sum(resources.room(node["Resources"]) for node in ray.nodes() if node["Alive"])
    if room:
        return room
    wanted = " and ".join(f"{key} = {amount:g}" for key, _, amount in resources.shares if amount > 0)
    raise InputError(f"{wanted}: no node of the Ray cluster has as much")


def start_actors(client_app: ClientApp, count: int, config: EngineConfig) -> list[Any]:
    """Start actors that answer for clients."""
    actor = ray.remote(_Actor).options(num_cpus=config.cpus_per_client, num_gpus=config.gpus_per_client)
    return [actor.remote(client_app) for _ in range(count)]


class _Actor:
    """Answers for one client after another, in a process of its own."""

    def __init__(self, client_app: ClientApp) -> None:
        assume_server_identity(RUN_ID)
        self._client_app = client_app

    def ready(self) -> None:
        """Show that this process runs."""

    def answer(self, content: RecordDict, clients: list[tuple[Metadata, Context]]) -> "_Answers":
        """Return the answers of clients that are sent the same, what each keeps to itself, and how long that took."""
        began = time.monotonic()
        answers = [
            (answered(self._client_app, received_message(metadata, content), context), context)
            for metadata, context in clients
        ]
        return answers, time.monotonic() - began


_Answers = tuple[list[tuple[Message, Context]], float]


class _PendingMessage(NamedTuple):
    """A message on its way to a client."""

    key: str
    message: Message
    is_second: bool = False  # an actor has failed over it, or over one that it was handed with it


class _Call(NamedTuple):
    """What an actor is asked."""

    questions: list[_PendingMessage]
    actor: Any


class Actors:
    """Actors that are free, and those that start in place of others that have died, on whichever node has room."""

    def __init__(self, start: Callable[[int], list[Any]], count: int, room: Callable[[], int]) -> None:
        self._start, self._room = start, room
        self._free = start(count)
        self._starting: dict[Any, Any] = {}
        self._looked = time.monotonic()

    def take(self) -> Any | None:
        """Return a free one; ``None`` where there is none yet."""
        return self._free.pop() if self._free else None

    def free(self, actor: Any) -> None:
        """Take back one that has answered."""
        self._free.append(actor)

    def replace(self) -> None:
        """Start one in place of one that has died: out of memory, by a crash in native code, or with its node."""
        (actor,) = self._start(1)
        self._starting[actor.ready.remote()] = actor

    def look(self, seconds: float, are_busy: bool) -> None:
        """Take in those that have started; where none is left and no node has room, the run cannot go on."""
        if not self._starting:
            return
        done, _ = ray.wait(list(self._starting), num_returns=1, timeout=0 if are_busy else seconds)
        for reference in done:
            actor = self._starting.pop(reference)
            try:
                ray.get(reference)
                self._free.append(actor)
            except RayError:
                self.replace()
        if self._free or are_busy or time.monotonic() - self._looked < _ROOM_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            self._room()
        except InputError as error:
            raise RunFailedError(f"the nodes that answered for clients are gone: {error}") from None


class _Head:
    """Watches the head of a cluster, without which Ray hangs; the run then ends, and can be resumed."""

    def __init__(self) -> None:
        self._address = ray.get_runtime_context().gcs_address
        self.lost = ""
        self._done = threading.Event()
        Thread(target=self._watch, daemon=True).start()

    def check(self) -> None:
        """Raise where the head is gone."""
        if self.lost:
            raise RunFailedError(self.lost)

    def end(self) -> None:
        """Watch no longer."""
        self._done.set()

    def _watch(self) -> None:
        host, _, port = self._address.rpartition(":")
        seen = time.monotonic()
        while not self._done.wait(_HEAD_SECONDS):
            away = time.monotonic() - seen
            try:
                socket.create_connection((host, int(port)), timeout=_HEAD_SECONDS).close()
                seen = time.monotonic()
            except OSError as error:
                if away > _LOST_SECONDS:
                    self.lost = (
                        f"the head of the Ray cluster, {self._address}, does not answer: {error}; fedpriv run --resume "
                        "DIR finishes the run once it is back; where RAY_ADDRESS named it, also on another one"
                    )
                if away > 2 * _LOST_SECONDS:
                    sys.stderr.write(f"fedpriv: {self.lost}\n")
                    sys.stderr.flush()
                    os._exit(1)


class RayGrid(InlineGrid):
    """Has a client's messages answered by actors, as many at a time as there are.

    Clients that are sent the same and answer fast are handed over together, as many as take ``call_seconds``, and an
    actor has its next call before it has ended one. Slower ones do not wait in a queue while another actor is free.
    """

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        actors: Actors,
        stopped: threading.Event,
        head: _Head | None,
        call_seconds: float,
    ) -> None:
        super().__init__(client_app, clients)
        self._stopped = stopped
        self._actors = actors
        self._head = head
        self._stored: dict[int, tuple[RecordDict, Any]] = {}
        self._waiting = deque[_PendingMessage]()
        self._asked: dict[Any, _Call] = {}
        self._call_seconds, self._client_seconds = call_seconds, math.inf

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Hand the messages to actors as these become free, and return the ids to pull the replies with."""
        pushed = [_PendingMessage(self._numbered(message), message) for message in messages]
        self._store([question.message.content for question in pushed])
        self._waiting.extend(pushed)
        self._hand_out()
        return [question.key for question in pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return those replies that are there, after a moment's wait for the next one."""
        if self._stopped.is_set():
            raise KeyboardInterrupt
        if self._head is not None:
            self._head.check()
        wanted = set(message_ids)
        self._collect(0.0)
        if wanted.isdisjoint(self._replies):
            self._collect(_LOOK_SECONDS)
        return super().pull_messages(key for key in self._replies if key in wanted)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Push the messages and pull the replies, as far as they come in time."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        left, replies = self.push_messages(messages), list[Message]()
        while left and time.monotonic() < deadline:
            fresh = self.pull_messages(left)
            replies += fresh
            there = {reply.metadata.reply_to_message_id for reply in fresh}
            left = [key for key in left if key not in there]
        return replies

    def _store(self, contents: Sequence[RecordDict]) -> None:
        """Put what several clients are sent, such as the parameters, into the object store: once a round and node."""
        if not self._asked and not self._waiting:
            self._stored.clear()
        distinct = {id(content): content for content in contents}
        for key, times in Counter(map(id, contents)).items():
            if times > 1:
                self._stored[key] = (distinct[key], ray.put(distinct[key]))

    def _hand_out(self) -> None:
        while self._waiting and (actor := self._actors.take() or self._soon_free()) is not None:
            questions = self._together()
            content = questions[0].message.content
            _, sent = self._stored.get(id(content), (content, content))
            about = [question.message.metadata for question in questions]
            asked = actor.answer.remote(sent, [(each, self._client(each.dst_node_id)) for each in about])
            self._asked[asked] = _Call(questions, actor)

    def _soon_free(self) -> Any | None:
        """Return an actor that has one call left, where that is a short one of clients that none has failed over."""
        if 2 * self._client_seconds > self._call_seconds or self._waiting[0].is_second:
            return None
        calls = Counter(call.actor for call in self._asked.values())
        once = (call for call in self._asked.values() if calls[call.actor] == 1)
        return next((call.actor for call in once if not call.questions[0].is_second), None)

    def _together(self) -> list[_PendingMessage]:
        """Take the next questions for an actor: half of its share at most, so that all actors end about together."""
        share = len(self._waiting) // (2 * (len(self._asked) + 1))
        most = max(1, min(share, int(self._call_seconds / self._client_seconds)))
        first = self._waiting.popleft()
        taken = [first]
        while len(taken) < most and not first.is_second and self._is_like(first):
            taken.append(self._waiting.popleft())
        return taken

    def _is_like(self, first: _PendingMessage) -> bool:
        """Whether the next question has the same content, and is asked for the first time, too."""
        following = self._waiting[0]
        return following.message.content is first.message.content and not following.is_second

    def _collect(self, seconds: float) -> None:
        """Take in the answers that are there, or the first that comes within some seconds."""
        self._actors.look(seconds, bool(self._asked))
        if self._asked:
            done, _ = ray.wait(list(self._asked), num_returns=1 if seconds else len(self._asked), timeout=seconds)
            for reference in done:
                if reference in self._asked:  # not lost with its actor meanwhile
                    self._take_in(self._asked.pop(reference), reference)
        self._hand_out()

    def _take_in(self, call: _Call, reference: Any) -> None:
        """Keep clients' answers; where their actor has died, each is asked again alone, once: it computes the same."""
        others = [key for key, other in self._asked.items() if other.actor is call.actor]
        try:
            answers, seconds = ray.get(reference)
        except RayError as error:
            is_alive = isinstance(error, RayTaskError)
            lost = call.questions
            if not is_alive:
                self._actors.replace()
                lost = [question for key in others for question in self._asked.pop(key).questions] + lost
            elif not others:
                self._actors.free(call.actor)
            for question in reversed(lost):
                if question.is_second or (is_alive and len(lost) == 1):
                    self._keep(question.key, failed(question.message, error, one_line(error)))
                else:
                    self._waiting.appendleft(question._replace(is_second=True))
            return
        if not others:
            self._actors.free(call.actor)
        self._client_seconds = max(seconds, 1e-6) / len(answers)
        for question, (reply, context) in zip(call.questions, answers, strict=True):
            self._remember(context)
            self._keep(question.key, reply)


def _set_environment() -> None:
    # Neither Flower nor Ray reports usage from a privacy laboratory, unless the user asked for it.
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Clients that are given no share of a GPU may still use it, as engine.device says.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def connect(resources: RayResources) -> None:
    """Start or join Ray, so that a wrong address or share is one clear line."""
    _set_environment()
    address, key = resources.address, resources.keys[2]
    if not address and os.environ.get("RAY_ADDRESS"):
        address, key = os.environ["RAY_ADDRESS"], "RAY_ADDRESS"
    _knock(address, key)
    # A Ray started here has this environment, and the workers that it starts beforehand, one a core, are of use. With a
    # runtime environment it would start new ones, and those would idle.
    elsewhere = {"address": address, "runtime_env": {"env_vars": _workers_environment()}}
    place = elsewhere if address else {"address": "local", "include_dashboard": False}
    try:
        _init(place)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(key=key, given=address, allowed=f"no Ray cluster answers: {error}") from None
    if address:
        _check_nodes()
    offered = ray.cluster_resources()
    for share_key, kind, amount in resources.shares:
        there = offered.get(kind, 0.0)
        if amount > there:
            ray.shutdown()
            raise InputError(key=share_key, given=amount, allowed=f"Ray offers {there:g} {kind}s in all")


def _init(place: Mapping[str, Any]) -> None:
    """Have Ray started or joined, and leave SIGTERM to the command, where Ray would exit without a word.

    By ray:// it is tried again: Ray's proxy forks a server for each connection while other threads of it use gRPC, and
    now and then the fork dies (ray-project/ray#63202).
    """
    for _ in range(_CLIENT_TRIES):
        try:
            with _kept_handler(signal.SIGTERM):
                ray.init(**place, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
        except ConnectionAbortedError as error:
            if "Starting Ray client server failed" not in str(error):
                raise
        else:
            return
    raise ConnectionError(
        f"Ray's server for this connection died {_CLIENT_TRIES} times; see ray_client_server*.err in the logs of the "
        "cluster's head (/tmp/ray/session_latest/logs)"
    )


@contextmanager
def _kept_handler(number: signal.Signals) -> Iterator[None]:
    usual = signal.getsignal(number)
    try:
        yield
    finally:
        if usual is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, usual)


def _check_nodes() -> None:
    """Refuse nodes that lack fedpriv, or have other versions: they would fail, or answer with other numbers."""
    names = ("fedpriv", "flwr", "torch", "numpy")

    def versions() -> dict[str, str | None]:  # nested, so that Ray sends it as it is to nodes without fedpriv
        from importlib.metadata import PackageNotFoundError, version
        from importlib.util import find_spec

        found: dict[str, str | None] = {}
        for name in names:
            try:
                found[name] = version(name) if find_spec(name) else None
            except PackageNotFoundError:
                found[name] = None
        return found

    here = versions()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    kind = ray.remote(num_cpus=0, max_retries=0)(versions)
    asked = {
        key: kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(key, soft=False)).remote() for key in nodes
    }
    try:
        for key, reference in asked.items():
            there = ray.get(reference, timeout=_NODE_SECONDS)
            for name, wanted in here.items():
                if there[name] != wanted:
                    has = f"has {name} {there[name]}" if there[name] else f"has no {name}"
                    raise InputError(f"the node {nodes[key]} of the Ray cluster {has}; here it is {name} {wanted}")
    except RayError as error:
        ray.shutdown()
        raise InputError(f"the node {nodes[key]} of the Ray cluster does not answer: {one_line(error)}") from None
    except InputError:
        ray.shutdown()
        raise


def _knock(address: str, key: str) -> None:
    """See whether anybody listens at host:port or ray://host:port: Ray itself would try for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()
    except (OSError, ValueError) as error:
        raise InputError(key=key, given=address, allowed=f"no Ray cluster answers: {error}") from None


def _workers_environment() -> dict[str, str]:
    """What workers take over from this process: where the experiment's own modules and data are looked for."""
    data, modules = os.environ.get("FEDPRIV_DATA"), os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [str(Path.cwd()), modules]))
    return {"PYTHONPATH": path, **({"FEDPRIV_DATA": data} if data else {})}


@contextmanager
def _silenced() -> Iterator[None]:
    """Mute Ray for a while: what clients raise is told by the server, with name and round."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
