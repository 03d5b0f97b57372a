"""The Ray engine: a Flower Grid whose clients are Ray actors, with shares of CPUs and GPUs, here or on a cluster."""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import ray
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import ServerApp
from ray.exceptions import RayError

from fedpriv.core.config import EngineConfig
from fedpriv.core.errors import InputError, one_line
from fedpriv.engines.identity import assume_server_identity
from fedpriv.engines.inline import RUN_ID, InlineGrid, answered, run_server

_KNOCK_SECONDS = 10.0
_LOOK_SECONDS = 0.1


def run_ray(server_app: ServerApp, client_app: ClientApp, clients: int, config: EngineConfig) -> None:
    """Run the apps on Ray actors; a local Ray is started, and stopped in the end, unless an address names one."""
    cpus = ResourceShare("engine.cpus_per_client", "CPU", config.cpus_per_client)
    gpus = ResourceShare("engine.gpus_per_client", "GPU", config.gpus_per_client)
    connect(config.address, "engine.address", (cpus, gpus))
    try:
        with _silenced("ray"), _stoppable() as stopped:
            actors = min(clients, _room(cpus, gpus))
            run_server(server_app, RayGrid(client_app, clients, _start_actors(client_app, actors, config), stopped))
    finally:
        ray.shutdown()


@contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """Have Ctrl-C set an event, which the grid looks at: the server's own code is not cut off in the middle.

    A second one ends it wherever it is.
    """
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped  # signals are not for other threads
        return
    usual = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
        if stopped.is_set():
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, usual)


def _room(*shares: "ResourceShare") -> int:
    """How many actors fit: an actor does not reach from one node to another."""
    taken = [share for share in shares if share.amount > 0]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(node.get(share.kind, 0.0) / share.amount + 1e-9) for share in taken) for node in nodes)
    if room:
        return room
    wanted = " and ".join(f"{share.key} = {share.amount:g}" for share in taken)
    raise InputError(f"{wanted}: no node of the Ray cluster has as much")


def _start_actors(client_app: ClientApp, count: int, config: EngineConfig) -> list[Any]:
    """Start actors that answer for clients.

    One that dies (out of memory, a crash in native code) is started anew by Ray and asked once more. A client computes
    the same again, so nothing else changes.
    """
    shares = {"num_cpus": config.cpus_per_client, "num_gpus": config.gpus_per_client}
    kind = ray.remote(_Actor).options(**shares, max_restarts=-1, max_task_retries=1)
    # Not from the object store: what is there may be gone when Ray starts an actor anew.
    return [kind.remote(client_app) for _ in range(count)]


class _Actor:
    """Answers for one client after another, in a process of its own."""

    def __init__(self, client_app: ClientApp) -> None:
        assume_server_identity(RUN_ID)
        self._client_app = client_app

    def answer(self, message: Message, context: Context) -> tuple[Message, Context]:
        """Return a client's answer, and what it keeps to itself."""
        return answered(self._client_app, message, context), context


class _PendingMessage(NamedTuple):
    """A message on its way to a client."""

    key: str
    message: Message
    actor: Any = None


class RayGrid(InlineGrid):
    """Has a client's messages answered by actors, as many at a time as there are."""

    def __init__(self, client_app: ClientApp, clients: int, actors: Sequence[Any], stopped: threading.Event) -> None:
        super().__init__(client_app, clients)
        self._stopped = stopped
        self._idle = list(actors)
        self._waiting = deque[_PendingMessage]()
        self._asked: dict[Any, _PendingMessage] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Hand the messages to actors as these become free, and return the ids to pull the replies with."""
        pushed = [_PendingMessage(self._numbered(message), message) for message in messages]
        self._waiting.extend(pushed)
        self._hand_out()
        return [question.key for question in pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return those replies that are there, after a moment's wait for the next one."""
        if self._stopped.is_set():
            raise KeyboardInterrupt
        wanted = list(message_ids)
        self._collect(0.0)
        if not any(key in self._replies for key in wanted):
            self._collect(_LOOK_SECONDS)
        return super().pull_messages(wanted)

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

    def _hand_out(self) -> None:
        while self._idle and self._waiting:
            question, actor = self._waiting.popleft(), self._idle.pop()
            context = self._client(question.message.metadata.dst_node_id)
            self._asked[actor.answer.remote(question.message, context)] = question._replace(actor=actor)

    def _collect(self, seconds: float) -> None:
        """Take in the answers that are there, or the first that comes within some seconds."""
        if not self._asked:
            return
        done, _ = ray.wait(list(self._asked), num_returns=1 if seconds else len(self._asked), timeout=seconds)
        for reference in done:
            question = self._asked.pop(reference)
            self._idle.append(question.actor)
            self._keep(question.key, self._outcome(question.message, reference))
        self._hand_out()

    def _outcome(self, message: Message, reference: Any) -> Message:
        """A client's answer, or what became of its process: as a rule it ran out of memory."""
        try:
            reply, context = ray.get(reference)
        except RayError as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        self._remember(context)
        return cast(Message, reply)


def _set_environment() -> None:
    # Neither Flower nor Ray reports usage from a privacy laboratory, unless the user asked for it.
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Clients that are given no share of a GPU may still use it, as engine.device says.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


class ResourceShare(NamedTuple):
    """How much of one kind of resource the smallest unit of work takes, and the key of the settings that says so."""

    key: str
    kind: str
    amount: float


def connect(address: str, key: str, shares: Sequence[ResourceShare]) -> None:
    """Start or join Ray, so that a wrong address or share is one clear line."""
    _set_environment()
    if not address and os.environ.get("RAY_ADDRESS"):
        address, key = os.environ["RAY_ADDRESS"], "RAY_ADDRESS"
    _knock(address, key)
    # A Ray started here has this environment, and the workers that it starts beforehand, one a core, are of use. With a
    # runtime environment it would start new ones, and those would idle.
    elsewhere = {"address": address, "runtime_env": {"env_vars": _workers_environment()}}
    place = elsewhere if address else {"address": "local", "include_dashboard": False}
    try:
        ray.init(**place, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(key=key, given=address, allowed=f"no Ray cluster answers: {error}") from None
    offered = ray.cluster_resources()
    for share in shares:
        if share.amount > offered.get(share.kind, 0.0):
            ray.shutdown()
            there = offered.get(share.kind, 0.0)
            raise InputError(key=share.key, given=share.amount, allowed=f"Ray offers {there:g} {share.kind}s in all")


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
def _silenced(*names: str) -> Iterator[None]:
    """Mute loggers for a while: what clients raise is told by the server, with name and round."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
