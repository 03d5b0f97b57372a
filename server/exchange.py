"""Exchange messages with clients and collect the usable uploads, in the order of the clients.

A client that raises, stays silent, or sends something that does not fit is left out and named with the reason.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self, runtime_checkable

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedpriv.core.config import Experiment, FederationConfig
from fedpriv.core.errors import RunFailedError
from fedpriv.core.records import Failure
from fedpriv.core.wire import pack
from fedpriv.core.world import State, World
from fedpriv.server.uploads import Allowed, Upload, allowed_upload, number_in, read_upload, told_classes

# Between looks for answers, in seconds. In a deployment each look is a request, which costs the SuperLink 30 ms of CPU
# time: who waits for long looks less often, and finds an answer late by a quarter of a second or an eighth of the wait.
_FIRST_PAUSE, _LONG_PAUSE, _LONGEST_PAUSE = 0.001, 0.25, 2.0
_LATE = 1 / 8


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


@runtime_checkable
class KnowsPartitions(Protocol):
    """A grid that knows which node holds which partition."""

    def nodes_by_partition(self) -> Mapping[int, int]:
        """Return node ids by partition."""


def find_clients(grid: Grid, count: int, timeout: float | None) -> Mapping[int, int]:
    """Wait for the clients to connect and return their node ids by partition.

    Node ids are random and come in no order, so every node is asked which partition it holds, unless the grid knows.
    """
    if isinstance(grid, KnowsPartitions):
        return grid.nodes_by_partition()
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < count and time.monotonic() < deadline:
        time.sleep(_FIRST_PAUSE * 10)
    if not nodes:
        raise RunFailedError(f"no client connected within {timeout:g} s")
    questions = [Message(RecordDict(), node, "query") for node in nodes]
    connected: dict[int, int] = {}
    for number, reply in sorted(send_and_receive(grid, questions, timeout).items()):
        partition = _partition(reply)
        if partition is not None and 0 <= partition < count:
            # A second node that says the same does not push the first one out.
            connected.setdefault(partition, nodes[number])
    return connected


def _partition(reply: Message) -> int | None:
    """The partition that a node says it holds, if it says that; a node that answers otherwise takes no part."""
    if not reply.has_content():
        return None
    try:
        return number_in(reply, "partition")
    except (KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Reached:
    """Clients, as a server reaches them, and what they hold."""

    grid: Grid  # Flower's way to the clients
    nodes: Mapping[int, int]  # node ids by client; those that never connected are missing
    examples: Sequence[int] | NDArray[np.int64]  # how many each client holds
    timeout: float | None = None  # seconds to wait for a round's answers; `None`: no limit
    classes: int | None = None  # of how many classes they say how often they hold each; `None`: they say nothing

    def send(self, kind: str, number: int, contents: Mapping[int, RecordDict]) -> dict[int, Message]:
        """Send clients that connected a message of a round, each its own content, and return the answers by client."""
        clients = [client for client in contents if client in self.nodes]
        messages = [Message(contents[client], self.nodes[client], kind, group_id=str(number)) for client in clients]
        # By the question, not by the sender: for a node that has vanished the SuperLink answers in its own name.
        received = send_and_receive(self.grid, messages, self.timeout)
        return {client: received[place] for place, client in enumerate(clients) if place in received}

    def allowed_masked(self, client: int) -> Allowed:
        """Return what a client may send under a mask: numbers whose norm says nothing."""
        return Allowed(int(self.examples[client]), math.inf, False, self.classes)


@dataclass(frozen=True)
class Federation:
    """The clients of a run, as the server reaches them."""

    grid: Grid  # Flower's way to the clients
    nodes: Mapping[int, int]  # node ids by partition; clients that never connected are missing
    world: World  # the experiment, built
    task: str  # the experiment as JSON; clients build their world from it

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
        return Reached(self.grid, self.nodes, self.world.sizes, timeout, told_classes(self.world))

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
    patience: float | None = None  # seconds to wait for them to connect; `None`: no limit

    def federation(self, world: World) -> Federation:
        """Wait for the clients to connect."""
        nodes = find_clients(self.grid, world.experiment.federation.clients, self.patience)
        return Federation(self.grid, nodes, world, (self.announced or world.experiment).to_json())


def ask_for_uploads(federation: Federation, number: int, states: Mapping[int, State]) -> Replies:
    """Have clients train and collect their uploads."""
    timeout = federation.reached.timeout
    answers = federation.reached.send("train", number, federation.questions(number, states))
    silent = "did not reply" if timeout is None else f"did not reply within {timeout:g} s"

    def outcome(client: int) -> Upload | Failure:
        if client not in federation.nodes:
            return Failure(client, "never connected")
        if client not in answers:
            return Failure(client, silent)
        return read_upload(answers[client], client, states[client], federation.allowed(client))

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


def send_and_receive(grid: Grid, messages: Sequence[Message], timeout: float | None) -> dict[int, Message]:
    """Send messages and return the replies by the number of the message, from 0.

    Like ``Grid.send_and_receive``, which sleeps a fixed tenth of a second between looks: this looks sooner.
    """
    # A grid leaves out or names None what it could not send; what it sends, it gives the id that replies name.
    waiting = {key for key in grid.push_messages(messages) if key}
    numbers = {message.metadata.message_id: number for number, message in enumerate(messages)}
    began = time.monotonic()
    deadline = None if timeout is None else began + timeout
    replies: dict[int, Message] = {}
    pause = _FIRST_PAUSE
    while waiting:
        fresh = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(waiting)}
        waiting -= fresh.keys()
        replies |= {numbers[key]: reply for key, reply in fresh.items()}
        if not waiting or (deadline is not None and time.monotonic() > deadline):
            break
        longest = min(max(_LONG_PAUSE, _LATE * (time.monotonic() - began)), _LONGEST_PAUSE)
        pause = _FIRST_PAUSE if fresh else min(2 * pause, longest)
        time.sleep(pause)
    return replies


def require_usable(replies: Replies, settings: FederationConfig, number: int) -> None:
    """Refuse to go on with too few usable uploads."""
    usable, needed = len(replies.uploads), settings.needed
    if usable >= needed:
        return
    key = "federation.min_clients" if needed == settings.min_clients else f"uploads that {settings.aggregation} needs"
    reasons = "; ".join(f"client {failure.client} {failure.reason}" for failure in replies.failures)
    raise RunFailedError(f"round {number}: {usable} usable uploads, {key} = {needed}: {reasons}")
