"""One exchange of messages with clients: out, and the usable uploads back, in the order of the clients.

A client that raises, stays silent, or sends something that does not fit is left out and named with the reason.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedpriv.errors import RunFailedError
from fedpriv.records import Failure
from fedpriv.server.uploads import Allowed, Upload, number_in, read_upload
from fedpriv.wire import pack
from fedpriv.world import State

__all__ = ["Replies", "Upload", "ask_clients", "find_clients", "question", "send_and_receive"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25


@dataclass(frozen=True)
class Replies:
    """The outcome of a round's exchange, uploads and failures in the order of the clients.

    Attributes:
        uploads: what can be aggregated, one a client; masked where ``mean`` is there.
        failures: who was left out, and why.
        bytes_up: of the uploads.
        bytes_down: of the parameters sent.
        mean: the mean of the uploads, where secure aggregation keeps all else from the server.
    """

    uploads: tuple[Upload, ...]
    failures: tuple[Failure, ...]
    bytes_up: int
    bytes_down: int
    mean: State | None = None


def find_clients(grid: Grid, count: int, timeout: float | None) -> dict[int, int]:
    """Wait for the clients to connect and return their node ids by partition.

    Node ids are random and come in no order, so every node is asked which partition it holds.

    Args:
        grid: Flower's way to the clients.
        count: how many there are to be.
        timeout: seconds to wait for them, and for their answers; ``None``: no limit.

    Raises:
        RunFailedError: nobody connected in time.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < count and time.monotonic() < deadline:
        time.sleep(_FIRST_PAUSE * 10)
    if not nodes:
        raise RunFailedError(f"no client connected within {timeout:g} s")
    questions = [Message(RecordDict(), node, "query") for node in nodes]
    found: dict[int, int] = {}
    for number, reply in sorted(send_and_receive(grid, questions, timeout).items()):
        partition = _partition(reply)
        if partition is not None and 0 <= partition < count:
            # A second node that says the same does not push the first one out.
            found.setdefault(partition, nodes[number])
    return found


def _partition(reply: Message) -> int | None:
    """The partition that a node says it holds, if it says that; a node that answers otherwise takes no part."""
    if not reply.has_content():
        return None
    try:
        return number_in(reply, "partition")
    except (KeyError, TypeError):
        return None


def ask_clients(
    grid: Grid,
    nodes: Mapping[int, int],
    clients: Sequence[int],
    state: State,
    allowed: Sequence[Allowed],
    experiment: str,
    round_number: int,
    timeout: float | None,
    instead: Mapping[int, State] | None = None,
) -> Replies:
    """Send the global state to ``clients`` and collect their uploads.

    Args:
        grid: Flower's way to the clients.
        nodes: node ids by partition.
        clients: the partitions asked.
        state: the global state.
        allowed: what each client may send, by partition.
        experiment: the experiment as JSON; clients build their world from it.
        round_number: the round, from 1.
        timeout: seconds to wait; ``None``: no limit.
        instead: what some of the clients are sent in place of the global state: tensors of the same names and shapes.
    """
    asked = {nodes[client]: client for client in clients if client in nodes}
    sent = {client: (instead or {}).get(client, state) for client in asked.values()}
    distinct = {id(each): each for each in sent.values()}
    contents = {key: question(each, experiment, round_number) for key, each in distinct.items()}
    messages = [
        Message(contents[id(sent[client])], node, "train", group_id=str(round_number)) for node, client in asked.items()
    ]
    # By the question, not by the sender: for a node that has vanished the SuperLink answers in its own name.
    received = send_and_receive(grid, messages, timeout)
    replies = {client: received[number] for number, client in enumerate(asked.values()) if number in received}
    silent = "did not reply" if timeout is None else f"did not reply within {timeout:g} s"
    outcomes = [_outcome(client, nodes, replies, state, allowed[client], silent) for client in clients]
    uploads = tuple(outcome for outcome in outcomes if isinstance(outcome, Upload))
    failures = tuple(outcome for outcome in outcomes if isinstance(outcome, Failure))
    bytes_up = sum(_size(upload.state) for upload in uploads)
    return Replies(uploads, failures, bytes_up, _size(state) * len(messages))


def _outcome(
    client: int,
    nodes: Mapping[int, int],
    replies: Mapping[int, Message],
    like: State,
    allowed: Allowed,
    silent: str,
) -> Upload | Failure:
    if client not in nodes:
        return Failure(client, "never connected")
    if client not in replies:
        return Failure(client, silent)
    return read_upload(replies[client], client, like, allowed)


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
    deadline = None if timeout is None else time.monotonic() + timeout
    replies: dict[int, Message] = {}
    pause = _FIRST_PAUSE
    while waiting:
        fresh = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(waiting)}
        waiting -= fresh.keys()
        replies |= {numbers[key]: reply for key, reply in fresh.items()}
        if not waiting or (deadline is not None and time.monotonic() > deadline):
            break
        pause = _FIRST_PAUSE if fresh else min(2 * pause, _LONGEST_PAUSE)
        time.sleep(pause)
    return replies


def _size(state: State) -> int:
    return sum(value.nbytes for vector in (state.parameters, state.buffers) for value in vector.values())
