"""One exchange of messages with clients: out, and the usable uploads back, in the order of the clients.

A client that raises, stays silent, or sends something that does not fit is left out and named with the reason.
"""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedpriv.errors import RunFailedError
from fedpriv.gradients import Vector
from fedpriv.runs import Failure
from fedpriv.wire import pack, unpack
from fedpriv.world import State

__all__ = ["Replies", "Upload", "ask_clients", "find_clients"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25


@dataclass(frozen=True)
class Upload:
    """What one client sent in one round.

    Attributes:
        client: its partition.
        examples: how many examples it says it holds.
        state: the upload proper under ``parameters``, the change of the running statistics under ``buffers``.
    """

    client: int
    examples: int
    state: State


@dataclass(frozen=True)
class Replies:
    """The outcome of a round's exchange, both parts in the order of the clients."""

    uploads: tuple[Upload, ...]
    failures: tuple[Failure, ...]
    bytes_up: int
    bytes_down: int


def find_clients(grid: Grid, count: int, timeout: float) -> dict[int, int]:
    """Wait for the clients to connect and return their node ids by partition.

    Node ids are random and come in no order, so every node is asked which partition it holds.

    Raises:
        RunFailedError: nobody connected in time.
    """
    deadline = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < count and time.monotonic() < deadline:
        time.sleep(_FIRST_PAUSE * 10)
    if not nodes:
        raise RunFailedError(f"no client connected within {timeout:g} s")
    questions = [Message(RecordDict(), node, "query") for node in nodes]
    found = {}
    for reply in _send_and_receive(grid, questions, timeout).values():
        if reply.has_content():
            found[_number(reply, "partition")] = reply.metadata.src_node_id
    return found


def ask_clients(
    grid: Grid,
    nodes: Mapping[int, int],
    clients: Sequence[int],
    state: State,
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
        experiment: the experiment as JSON; clients build their world from it.
        round_number: the round, from 1.
        timeout: seconds to wait; ``None``: no limit.
        instead: what some of the clients are sent in place of the global state: tensors of the same names and shapes.
    """
    asked = {nodes[client]: client for client in clients if client in nodes}
    sent = {client: (instead or {}).get(client, state) for client in asked.values()}
    distinct = {id(each): each for each in sent.values()}
    contents = {key: _question(each, experiment, round_number) for key, each in distinct.items()}
    messages = [
        Message(contents[id(sent[client])], node, "train", group_id=str(round_number)) for node, client in asked.items()
    ]
    # By the question, not by the sender: for a node that has vanished the SuperLink answers in its own name.
    received = _send_and_receive(grid, messages, timeout)
    replies = {client: received[number] for number, client in enumerate(asked.values()) if number in received}
    silent = "did not reply" if timeout is None else f"did not reply within {timeout:g} s"
    outcomes = [_outcome(client, nodes, replies, state, silent) for client in clients]
    uploads = tuple(outcome for outcome in outcomes if isinstance(outcome, Upload))
    failures = tuple(outcome for outcome in outcomes if isinstance(outcome, Failure))
    bytes_up = sum(_size(upload.state) for upload in uploads)
    return Replies(uploads, failures, bytes_up, _size(state) * len(messages))


def _outcome(
    client: int, nodes: Mapping[int, int], replies: Mapping[int, Message], expected: State, silent: str
) -> Upload | Failure:
    if client not in nodes:
        return Failure(client, "never connected")
    if client not in replies:
        return Failure(client, silent)
    return _read(replies[client], client, expected)


def _question(state: State, experiment: str, round_number: int) -> RecordDict:
    return RecordDict(
        {
            "parameters": pack(state.parameters),
            "buffers": pack(state.buffers),
            "task": ConfigRecord({"experiment": experiment, "round": round_number}),
        }
    )


def _send_and_receive(grid: Grid, messages: Sequence[Message], timeout: float | None) -> dict[int, Message]:
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


def _read(reply: Message, client: int, expected: State) -> Upload | Failure:
    """Check a reply and return its upload, or the reason why it cannot be used."""
    if reply.has_error():
        return Failure(client, f"raised an error: {_tidy(reply.error.reason or '')}")
    arrays = reply.content.array_records
    if "upload" not in arrays:
        return Failure(client, "sent no upload")
    try:
        parameters = unpack(arrays["upload"])
        buffers = unpack(arrays["buffers"]) if "buffers" in arrays else {}
        examples = _number(reply, "examples")
    except (KeyError, ValueError, TypeError) as error:
        return Failure(client, f"sent an upload that cannot be read: {error}")
    problem = _misfit(parameters, expected.parameters) or _misfit(buffers, expected.buffers)
    if problem:
        return Failure(client, problem)
    if examples < 1:
        return Failure(client, f"says that it holds {examples} examples")
    return Upload(
        client, examples, State(_ordered(parameters, expected.parameters), _ordered(buffers, expected.buffers))
    )


def _tidy(reason: str) -> str:
    """One line out of what an engine says of an exception: Ray wraps it in two coloured tracebacks."""
    plain = _COLOUR.sub("", reason)
    cause, wrapped, _ = plain.partition("\n\nThe above exception was the direct cause")
    lines = (cause if wrapped else plain).strip().splitlines() or ["no reason given"]
    return lines[-1].strip()


def _misfit(given: Vector, expected: Vector) -> str | None:
    """Say what is wrong with the tensors of an upload, if anything."""
    if missing := expected.keys() - given.keys():
        return f"left out {sorted(missing)[0]}"
    if unknown := given.keys() - expected.keys():
        return f"sent {sorted(unknown)[0]}, which the model does not have"
    for name, want in expected.items():
        value = given[name]
        if value.shape != want.shape:
            return f"sent {name} of shape {tuple(value.shape)}, expected {tuple(want.shape)}"
        if value.dtype != want.dtype:
            return f"sent {name} as {value.dtype}, expected {want.dtype}"
        if value.numel() and not torch.linalg.vector_norm(value, math.inf).isfinite():
            return f"sent NaN or infinity in {name}"
    return None


def _ordered(given: Vector, like: Vector) -> Vector:
    return {name: given[name] for name in like}


def _number(reply: Message, key: str) -> int:
    value = reply.content.metric_records["client"][key]
    if not isinstance(value, int):
        raise TypeError(f"{key} is {value!r}, expected a whole number")
    return value


def _size(state: State) -> int:
    return sum(value.nbytes for vector in (state.parameters, state.buffers) for value in vector.values())
