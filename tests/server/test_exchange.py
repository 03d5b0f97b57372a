"""Clients are waited for, and each is known by the partition that it names."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedpriv.core.errors import RunFailedError
from fedpriv.engines.inline import assume_server_identity
from fedpriv.server.exchange import Connected, Reached, find_clients

Says = dict[int, int | str | None]
Losses = Mapping[int, Sequence[Error | None]]
CRASHED = Error(ErrorCode.CLIENT_APP_CRASHED, "ClientApp stopped responding.")
GONE = Error(ErrorCode.NODE_UNAVAILABLE, "The node failed to report a heartbeat.")
UNSENT = Error(ErrorCode.MESSAGE_UNAVAILABLE, "Reply message objects are unavailable.")


class SlowGrid:
    """Nodes connect one with each look, and answer at a later look, if at all.

    Args:
        says: node id -> the partition it names; why its app failed; ``None`` if it never answers.
        looks: for replies, before the first one is there.
        losses: node id -> what its answers come as before the first right one; ``None`` never comes.
        remembers: whether nodes say that they keep their answers on disk.
    """

    def __init__(self, says: Says, looks: int = 0, losses: Losses | None = None, remembers: bool = False) -> None:
        self.pushed: list[tuple[int, str]] = []  # node id and kind of each message
        self._told = {"remembers": 1} if remembers else {}
        self._says = says
        self._left = looks
        self._looks = 0
        self._replies: dict[str, Message] = {}
        self._losses = {node: [*errors] for node, errors in (losses or {}).items()}

    def get_node_ids(self) -> list[int]:
        self._looks += 1
        return list(self._says)[: self._looks]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._pushed(message) for message in messages]

    def _pushed(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        self.pushed.append((node, message.metadata.message_type))
        self._looks += 1
        key, said = f"message {self._looks}", self._says[node]
        message.metadata.__dict__["_message_id"] = key
        if self._losses.get(node):
            if (error := self._losses[node].pop()) is None:
                return key
            reply = Message(error, reply_to=message)
        elif isinstance(said, str):
            reply = Message(Error(ErrorCode.LOAD_CLIENT_APP_EXCEPTION, said), reply_to=message)
        elif said is not None:
            reply = Message(RecordDict({"client": MetricRecord({"partition": said, **self._told})}), reply_to=message)
        else:
            return key
        reply.metadata.__dict__["_reply_to_message_id"] = key
        self._replies[key] = reply
        return key

    def pull_messages(self, keys: Iterable[str]) -> list[Message]:
        self._left -= 1
        return [] if self._left >= 0 else [self._replies.pop(key) for key in list(keys) if key in self._replies]


@pytest.fixture(autouse=True)
def as_server() -> None:
    assume_server_identity(1)


def found(says: Says, count: int, patience: tuple[float | None, float | None] = (None, None), **slow: Any) -> Connected:
    told: list[str] = []
    connected = find_clients(cast(Grid, SlowGrid(says, **slow)), count, told.append, *patience)
    assert set(connected.nodes) | set(connected.absent) == set(range(count))
    return connected


def test_without_a_limit_every_client_is_waited_for() -> None:
    assert found({70: 2, 30: 0, 90: 1}, 3, looks=12).nodes == {0: 30, 1: 90, 2: 70}


def test_who_is_connected_is_waited_for_as_long_as_a_round_waits() -> None:
    """The time to connect is over long before the first answer is there."""
    assert found({70: 1, 30: 0}, 2, (0.01, 60), looks=8).nodes == {0: 30, 1: 70}


def test_with_a_limit_those_who_are_late_are_left_out_with_the_reason() -> None:
    late = found({70: 1, 30: None, 90: 0}, 3, (0.2, 0.1))
    assert late.nodes == {0: 90, 1: 70}
    assert late.absent == {2: "connected, but SuperNode 30 did not answer within 0.1 s which client it is"}
    assert found({70: 0}, 2, (0.05, 0.1)).absent == {1: "never connected"}
    broken = found({70: 0, 30: "no module 'x'"}, 3, (0.05, 0.1))
    assert broken.absent == dict.fromkeys((1, 2), "never connected, or SuperNode 30 answered: no module 'x'")
    with pytest.raises(RunFailedError, match=r"no client connected within 0\.05 s"):
        found({}, 3, (0.05, 0.05))


def test_the_server_says_which_clients_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpriv.server.exchange._TELL_SECONDS", 0.02)
    told: list[str] = []
    find_clients(cast(Grid, SlowGrid({70: 1, 30: None, 90: 0, 20: None})), 4, told.append, 1, 0.2)
    (said,) = told
    assert said.startswith("clients 2-3 have not answered within 0.02 s, though all SuperNodes are connected")
    restarted = SlowGrid({70: 1, 30: 0}, losses={30: [None]})  # it has lost what it was asked
    assert find_clients(cast(Grid, restarted), 2, told.append, 1, 5).nodes == {0: 30, 1: 70}


@pytest.mark.parametrize("losses", [[CRASHED], [UNSENT], [UNSENT, CRASHED]])
def test_a_client_that_was_killed_or_whose_answer_was_lost_is_asked_once_more(losses: list[Error]) -> None:
    is_once = len(losses) == 1
    connected = found({70: 1, 30: 0}, 2, (1, 1), losses={30: losses})
    assert connected.nodes == ({0: 30, 1: 70} if is_once else {1: 70})
    reason = f"connected, but SuperNode 30 answered: {UNSENT.reason}"
    assert connected.absent == ({} if is_once else {0: reason})
    reached = Reached(cast(Grid, SlowGrid({70: 1, 30: 0}, losses={30: losses})), {0: 30, 1: 70}, [1, 1], 1.0)
    answers = reached.send("train", 1, {0: RecordDict(), 1: RecordDict()})
    assert [answers[client].has_error() for client in (0, 1)] == [not is_once, False]


def test_a_second_node_with_the_same_partition_and_one_out_of_range_are_left_out() -> None:
    connected = found({70: 0, 30: 0, 90: 5, 20: -1, 10: 1}, 5)
    assert connected.nodes == {0: 70, 1: 10}
    assert set(connected.absent.values()) == {"never connected"}


@pytest.mark.parametrize("remembers", [True, False])
def test_a_client_that_lost_its_question_in_a_restart_is_asked_again_only_if_it_remembers(remembers: bool) -> None:
    """It may have answered already, with other noise: the ledger counts one answer a round."""
    grid = SlowGrid({70: 1, 30: 0}, losses={30: [None]}, remembers=remembers)
    answers = Reached(cast(Grid, grid), {0: 30, 1: 70}, [1, 1], 5.0, 0.01).send(
        "train", 1, dict.fromkeys((0, 1), RecordDict())
    )
    assert not answers[1].has_error()
    assert grid.pushed[:3] == [(30, "train"), (70, "train"), (30, "query")]
    assert grid.pushed.count((30, "train")) == (2 if remembers else 1)
    assert answers[0].has_error() is not remembers
    assert remembers or "FEDPRIV_MEMORY names no folder" in str(answers[0].error.reason)


def test_a_client_that_loses_its_question_in_two_restarts_is_left_out() -> None:
    class Restarted(SlowGrid):
        def _pushed(self, message: Message) -> str:
            key = super()._pushed(message)
            if message.metadata.message_type == "train":
                del self._replies[key]
            return key

    grid = Restarted({30: 0}, remembers=True)
    answers = Reached(cast(Grid, grid), {0: 30}, [1], 5.0, 0.01).send("train", 1, {0: RecordDict()})
    assert grid.pushed.count((30, "train")) == 2
    assert "lost the question" in str(answers[0].error.reason)


def test_a_slow_client_is_not_asked_again() -> None:
    grid = SlowGrid({70: 0}, looks=8, remembers=True)
    answers = Reached(cast(Grid, grid), {0: 70}, [1], 5.0, 0.001).send("train", 1, {0: RecordDict()})
    assert not answers[0].has_error()
    assert grid.pushed[:2] == [(70, "train"), (70, "query")]
    assert grid.pushed.count((70, "train")) == 1


def test_a_client_that_ended_before_it_said_who_it_is_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpriv.server.exchange._LONG_PAUSE", 0.001)
    returned = found({70: 1, 30: 0}, 2, (1, 1), losses={30: [GONE, GONE]})
    assert returned == Connected({0: 30, 1: 70}, {})
    monkeypatch.setattr("fedpriv.server.exchange._RETURN_SECONDS", 0.02)
    reason = "connected, but SuperNode 30 answered: The node failed to report a heartbeat."
    assert found({70: 1, 30: 0}, 2, (1, 1), losses={30: [GONE] * 1000}).absent == {0: reason}
