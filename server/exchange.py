"""Exchange messages with clients and collect usable uploads in their order; others are named with the reason."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, Self, runtime_checkable

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedpriv.core.config import Experiment, FederationConfig
from fedpriv.core.errors import RunFailedError
from fedpriv.core.progress import Progress, Silent
from fedpriv.core.records import Failure, members_text
from fedpriv.core.wire import pack
from fedpriv.core.world import State, World
from fedpriv.server.uploads import Allowed, Upload, allowed_upload, number_in, read_upload, told_classes

# Between looks for answers, in seconds. In a deployment each look is a request, which costs the SuperLink 30 ms of CPU
# time: who waits for long looks less often, and finds an answer late by a quarter of a second or an eighth of the wait.
_FIRST_PAUSE, _LONG_PAUSE, _LONGEST_PAUSE = 0.001, 0.25, 2.0
_LATE = 1 / 8
# When the server says that clients are late with their first answer.
_TELL_SECONDS = 30.0
# A SuperNode does one thing after another: if a second, small question is answered before the first one, the SuperNode
# was restarted in between, and has lost the first. When the small one is sent to who has not answered yet.
PROBE_SECONDS = 30.0
# Flower misses a killed SuperNode after a minute, and takes nobody else with its key before.
_RETURN_SECONDS = 120.0

# A client's process was killed, or its answer was lost on the way: a SuperLink under load refuses parts of answers (its
# database is locked for more than five seconds), and a SuperNode does not send them again.
_LOST = (ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE)

NEVER_CONNECTED = "never connected"


@dataclass(frozen=True)
class Replies:
    """The outcome of a round's exchange, uploads and failures in the order of the clients."""

    uploads: tuple[Upload, ...]  # what can be aggregated, one a client; masked where `mean` is there
    failures: tuple[Failure, ...]  # who was left out, and why
    bytes_up: int  # of the uploads
    bytes_down: int  # of the parameters sent
    # the mean of the uploads, where secure aggregation keeps all else from the server, or with the noise that a trusted
    # server has added
    mean: State | None = None

    @classmethod
    def of(cls, outcomes: Sequence[Upload | Failure], bytes_down: int) -> Self:
        """Tell uploads from failures."""
        uploads = tuple(each for each in outcomes if isinstance(each, Upload))
        failures = tuple(each for each in outcomes if isinstance(each, Failure))
        return cls(uploads, failures, sum(upload.state.nbytes for upload in uploads), bytes_down)

    @property
    def clients(self) -> tuple[int, ...]:
        """Whose uploads they are."""
        return tuple(upload.client for upload in self.uploads)


@runtime_checkable
class KnowsPartitions(Protocol):
    """A grid that knows which node holds which partition."""

    def nodes_by_partition(self) -> Mapping[int, int]:
        """Return node ids by partition."""


@dataclass(frozen=True)
class Connected:
    """The clients that take part, and why the others do not."""

    nodes: Mapping[int, int]  # node ids by partition
    absent: Mapping[int, str]  # by partition


def find_clients(
    grid: Grid, count: int, tell: Callable[[str], None], connect: float | None = None, answer: float | None = None
) -> Connected:
    """Wait for the clients to connect and to say which partition each holds; ``tell`` of the late.

    ``connect`` seconds until all are connected, and ``answer`` until they have said who they are; ``None``: no limit.
    """
    if isinstance(grid, KnowsPartitions):
        return Connected(grid.nodes_by_partition(), {})
    deadline = _deadline(connect)
    while len(nodes := list(grid.get_node_ids())) < count and time.monotonic() < deadline:
        time.sleep(_FIRST_PAUSE * 10)
    if not nodes:
        raise RunFailedError(f"no client connected within {connect:g} s")
    named, failed = _ask_who_they_are(grid, nodes, count, answer, tell)
    _ask_who_returns(grid, count, named, failed, tell)
    nodes = list(dict.fromkeys([*nodes, *named, *failed]))
    # A second node that says the same does not push the first one out.
    found = {named[node]: node for node in reversed(nodes) if named.get(node, -1) in range(count)}
    silent = f"did not answer within {answer:g} s which client it is" if answer is not None else ""
    late = [f"SuperNode {node} {_why(failed, node) or silent}" for node in nodes if node not in named]
    missing = [client for client in range(count) if client not in found]
    connected = "connected, but" if len(late) >= len(missing) else f"{NEVER_CONNECTED}, or"
    reason = f"{connected} {'; '.join(late)}" if late else NEVER_CONNECTED
    return Connected(dict(sorted(found.items())), dict.fromkeys(missing, reason))


def _ask_who_they_are(
    grid: Grid, nodes: Sequence[int], count: int, timeout: float | None, tell: Callable[[str], None]
) -> tuple[dict[int, int], dict[int, Error]]:
    """The partition that each node names, until all clients are there; and why others named none."""
    named: dict[int, int] = {}
    failed: dict[int, Error] = {}
    asked, begun, told = Questions(grid), time.monotonic(), False
    late = min(_TELL_SECONDS, math.inf if timeout is None else timeout / 2)
    asked.send({node: _who_are_you(node) for node in nodes})
    for answer in asked.replies(_deadline(timeout)):
        for node, reply in answer:
            if reply.has_content():
                named[node] = _partition(reply)
            else:
                failed[node] = reply.error
        missing = [client for client in range(count) if client not in named.values()]
        if not missing:
            break
        if not told and time.monotonic() - begun > late and len(nodes) >= count:
            tell(_late_words(missing, late, timeout))
            told = True
            # A SuperNode that was killed and started again has lost what it was asked, and nobody says so.
            asked.send({node: _who_are_you(node) for node in nodes if node not in named})
    return named, failed


def _ask_who_returns(
    grid: Grid, count: int, named: dict[int, int], failed: dict[int, Error], tell: Callable[[str], None]
) -> None:
    """Wait for SuperNodes that ended before they said who they are, and add what they say, or why they do not.

    A restarted SuperNode keeps its number if it has a key; else it gets a new one.
    """
    deadline, told = _deadline(_RETURN_SECONDS), False
    while time.monotonic() < deadline:
        gone = [node for node, error in failed.items() if error.code == ErrorCode.NODE_UNAVAILABLE]
        missing = [client for client in range(count) if client not in named.values()]
        if not (gone and missing):
            return
        if not told:
            tell(f"a SuperNode has ended, and nobody is client {members_text(missing)}: waiting {_RETURN_SECONDS:g} s")
            told = True
        time.sleep(_LONG_PAUSE)
        back = [node for node in grid.get_node_ids() if node in gone or node not in named | failed]
        for node in back:
            failed.pop(node, None)
        answered, errors = _ask_who_they_are(grid, back, count, deadline - time.monotonic(), tell)
        named |= answered
        failed |= errors


def _who_are_you(node: int) -> Message:
    return Message(RecordDict(), node, "query")


def _why(failed: Mapping[int, Error], node: int) -> str:
    return f"answered: {' '.join(str(failed[node].reason).split())}" if node in failed else ""


def _partition(reply: Message) -> int:
    """The partition that a node says it holds; -1 for the answer of something else than our app."""
    try:
        return number_in(reply, "partition")
    except (KeyError, TypeError):
        return -1


def _late_words(missing: Sequence[int], late: float, timeout: float | None) -> str:
    clients = f"client {missing[0]} has" if len(missing) == 1 else f"clients {members_text(missing)} have"
    limit = "" if timeout is None else f"; they are waited for until {timeout:g} s are over"
    return (
        f"{clients} not answered within {late:g} s, though all SuperNodes are connected: apps are still "
        f"starting (PyTorch takes long where many start at once), or their executors hang or have ended{limit}"
    )


@dataclass(frozen=True)
class Reached:
    """Clients, as a server reaches them, and what they hold."""

    grid: Grid  # Flower's way to the clients
    nodes: Mapping[int, int]  # node ids by client; those that take no part are missing
    examples: Sequence[int] | NDArray[np.int64]  # how many each client holds
    timeout: float | None = None  # seconds to wait for a round's answers; `None`: no limit
    probe: float = math.inf  # after how many seconds it is found out whether silent SuperNodes were restarted
    classes: int | None = None  # of how many classes they say how often they hold each; `None`: they say nothing
    absent: Mapping[int, str] = field(default_factory=dict)  # why clients are missing

    def send(self, kind: str, number: int, contents: Mapping[int, RecordDict]) -> dict[int, Message]:
        """Send clients that connected a message of a round, each its own content, and return the answers by client."""
        replies = dict(self.answers(kind, number, contents))
        return {client: replies[client] for client in contents if client in replies}

    def answers(self, kind: str, number: int, contents: Mapping[int, RecordDict]) -> Iterator[tuple[int, Message]]:
        """Send, and yield the answers as they come, each with its client; a lost one is asked for once more."""
        asked = Questions(self.grid, self.probe)
        clients = [client for client in contents if client in self.nodes]
        asked.send(
            {client: Message(contents[client], self.nodes[client], kind, group_id=str(number)) for client in clients}
        )
        for looked in asked.replies(_deadline(self.timeout)):
            yield from looked

    def reason(self, client: int) -> str:
        """Say why a client is missing."""
        return self.absent.get(client, NEVER_CONNECTED)

    def allowed_masked(self, client: int) -> Allowed:
        """Return what a client may send under a mask: numbers whose norm says nothing."""
        return Allowed(int(self.examples[client]), math.inf, False, self.classes)


@dataclass(frozen=True)
class Federation:
    """The clients of a run, as the server reaches them."""

    grid: Grid  # Flower's way to the clients
    nodes: Mapping[int, int]  # node ids by partition; clients that take no part are missing
    world: World  # the experiment, built
    task: str  # the experiment as JSON; clients build their world from it
    absent: Mapping[int, str] = field(default_factory=dict)  # why clients are missing
    probe: float = math.inf  # as in `Reached`

    def allowed(self, client: int) -> Allowed:
        """Return what a client may send."""
        kind = int(self.world.alike[client])
        if kind not in self._allowed:
            self._allowed[kind] = allowed_upload(self.world, client)
        return self._allowed[kind]

    @cached_property
    def _allowed(self) -> dict[int, Allowed]:
        """Clients with the same plan may send the same."""
        return {}

    @cached_property
    def reached(self) -> Reached:
        """The clients by themselves, for messages that are no training."""
        timeout = self.world.experiment.federation.round_timeout
        classes = told_classes(self.world)
        return Reached(self.grid, self.nodes, self.world.sizes, timeout, self.probe, classes, self.absent)

    def questions(self, number: int, states: Mapping[int, State]) -> dict[int, RecordDict]:
        """What clients are sent that are to train in a round, each from its own state; equal states are packed once."""
        distinct = {id(state): state for state in states.values()}
        packed = {key: question(state, self.task, number) for key, state in distinct.items()}
        return {client: packed[id(state)] for client, state in states.items()}


@dataclass(frozen=True)
class Clients:
    """The way to the clients of a run, which are looked for when they are first needed."""

    grid: Grid  # Flower's way to the clients
    announced: Experiment | None = None  # the experiment as clients know it, where it differs
    connect_seconds: float | None = None  # how long to wait for them to connect; `None`: no limit
    progress: Progress = field(default_factory=Silent)
    probe: float = math.inf  # as in `Reached`

    def federation(self, world: World) -> Federation:
        """Wait for the clients to connect."""
        settings, tell = world.experiment.federation, self.progress.warn
        found = find_clients(self.grid, settings.clients, tell, self.connect_seconds, settings.round_timeout)
        task = (self.announced or world.experiment).to_json()
        return Federation(self.grid, found.nodes, world, task, found.absent, self.probe)


def ask_for_uploads(federation: Federation, number: int, states: Mapping[int, State]) -> Replies:
    """Have clients train and collect their uploads."""
    timeout = federation.reached.timeout
    answers = federation.reached.answers("train", number, federation.questions(number, states))
    # Read as they come, while other clients still train.
    read = {
        client: read_upload(answer, client, states[client], federation.allowed(client)) for client, answer in answers
    }
    silent = "did not reply" if timeout is None else f"did not reply within {timeout:g} s"

    def outcome(client: int) -> Upload | Failure:
        if client not in federation.nodes:
            return Failure(client, federation.reached.reason(client))
        return read.get(client) or Failure(client, silent)

    bytes_down = sum(state.nbytes for client, state in states.items() if client in federation.nodes)
    return Replies.of([outcome(client) for client in states], bytes_down)


def question(state: State, experiment: str, round_number: int) -> RecordDict:
    """What a client is told that is to train in a round."""
    return RecordDict(
        {
            "parameters": pack(state.parameters),
            "buffers": pack(state.buffers),
            "task": ConfigRecord({"experiment": experiment, "round": round_number}),
        }
    )


class Questions:
    """Messages to clients that are not answered yet, each under a number of the sender's own.

    Like ``Grid.send_and_receive``, which sleeps a fixed tenth of a second between looks: this looks sooner. By the
    question, not by the sender: for a node that has vanished the SuperLink answers in its own name. What a client's
    process did not survive, or whose answer was lost, is asked once more: the client computes the same answer. So is
    what a restarted SuperNode has lost, if its client's memory is on disk; else it might give another one.
    """

    def __init__(self, grid: Grid, probe: float = math.inf) -> None:
        self._grid = grid
        self._probe = probe  # after how many seconds the silent are probed, and after twice as many again
        self._waiting: dict[str, tuple[int, Message]] = {}
        self._probes: dict[str, int] = {}
        self._again: set[int] = set()

    def send(self, messages: Mapping[int, Message]) -> None:
        """Send messages."""
        self._waiting |= {message.metadata.message_id: (number, message) for number, message in self._pushed(messages)}

    def _pushed(self, messages: Mapping[int, Message]) -> list[tuple[int, Message]]:
        # A grid leaves out or names None what it could not send; what it sends, it gives the id that replies name.
        sent = {key for key in self._grid.push_messages(list(messages.values())) if key}
        return [(number, message) for number, message in messages.items() if message.metadata.message_id in sent]

    def replies(self, deadline: float) -> Iterator[list[tuple[int, Message]]]:
        """Yield, at each look, the replies that are there, each with its number; until the deadline."""
        began, pause, probed = time.monotonic(), _FIRST_PAUSE, self._probe
        while self._waiting:
            fresh = self._look()
            lost = {number: question for number, question, reply in fresh if self._is_lost(number, reply)}
            self._again |= lost.keys()
            # What is asked again comes after the probe.
            self._probes = {key: number for key, number in self._probes.items() if number not in lost}
            self.send({number: _copied(question) for number, question in lost.items()})
            yield [(number, reply) for number, _, reply in fresh if number not in lost]
            if time.monotonic() > deadline:
                return
            if time.monotonic() - began > probed:
                silent = {number: _who_are_you(asked.metadata.dst_node_id) for number, asked in self._waiting.values()}
                self._probes |= {probe.metadata.message_id: number for number, probe in self._pushed(silent)}
                probed *= 2  # each is a process that a slow client starts in vain
            longest = min(max(_LONG_PAUSE, _LATE * (time.monotonic() - began)), _LONGEST_PAUSE)
            pause = _FIRST_PAUSE if fresh else min(2 * pause, longest)
            if self._waiting:
                time.sleep(pause)

    def _look(self) -> list[tuple[int, Message, Message]]:
        """The questions that are answered by now, or were lost by a restart, with the replies."""
        replies = {
            reply.metadata.reply_to_message_id: reply
            for reply in self._grid.pull_messages(self._waiting.keys() | self._probes.keys())
        }
        fresh = [(*self._waiting.pop(key), replies[key]) for key in list(self._waiting) if key in replies]
        probed = {self._probes.pop(key): replies[key] for key in list(self._probes) if key in replies}
        idle = {number: reply for number, reply in probed.items() if reply.has_content()}
        for key, (number, question) in list(self._waiting.items()):
            if number in idle:
                del self._waiting[key]
                fresh.append((number, question, Message(_lost(idle[number]), reply_to=question)))
        return fresh

    def _is_lost(self, number: int, reply: Message) -> bool:
        return reply.has_error() and reply.error.code in _LOST and number not in self._again


def _lost(probed: Message) -> Error:
    """What became of a question whose SuperNode has answered a later one; it is asked again if the client remembers."""
    lost = "its SuperNode lost the question, as after a restart"
    try:
        number_in(probed, "remembers")
    except (KeyError, TypeError):
        return Error(ErrorCode.UNKNOWN, f"{lost}, and it has no memory: FEDPRIV_MEMORY names no folder, or a new one")
    return Error(ErrorCode.MESSAGE_UNAVAILABLE, lost)


def _copied(question: Message) -> Message:
    about = question.metadata
    return Message(question.content, about.dst_node_id, about.message_type, group_id=about.group_id)


def _deadline(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds


def require_usable(replies: Replies, settings: FederationConfig, number: int) -> None:
    """Refuse to go on with too few usable uploads."""
    usable, needed = len(replies.uploads), settings.needed
    if usable >= needed:
        return
    key = "federation.min_clients" if needed == settings.min_clients else f"uploads that {settings.aggregation} needs"
    reasons = "; ".join(f"client {failure.client} {failure.reason}" for failure in replies.failures)
    raise RunFailedError(f"round {number}: {usable} usable uploads, {key} = {needed}: {reasons}")
