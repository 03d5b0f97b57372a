"""Clients are waited for, and each is known by the partition that it names."""

from collections.abc import Iterable
from typing import cast

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedpriv.core.errors import RunFailedError
from fedpriv.engines.identity import assume_server_identity
from fedpriv.server.exchange import find_clients


class SlowGrid:
    """Nodes connect one with each look, and answer at a later look, if at all.

    Args:
        says: node id -> the partition it names, or ``None`` if it never answers.
        patience: looks for replies before the first one is there.
    """

    def __init__(self, says: dict[int, int | None], patience: int = 0) -> None:
        self._says = says
        self._patience = patience
        self._looks = 0
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        self._looks += 1
        return list(self._says)[: self._looks]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for message in messages:
            key, said = f"message {message.metadata.dst_node_id}", self._says[message.metadata.dst_node_id]
            message.metadata.__dict__["_message_id"] = key
            if said is not None:
                content = RecordDict({"client": MetricRecord({"partition": said})})
                reply = self._replies[key] = Message(content, reply_to=message)
                reply.metadata.__dict__["_reply_to_message_id"] = key
        return [f"message {node}" for node in self._says]

    def pull_messages(self, keys: Iterable[str]) -> list[Message]:
        self._patience -= 1
        return [] if self._patience >= 0 else [self._replies.pop(key) for key in list(keys) if key in self._replies]


@pytest.fixture(autouse=True)
def as_server() -> None:
    assume_server_identity(1)


def grid(says: dict[int, int | None], patience: int = 0) -> Grid:
    return cast(Grid, SlowGrid(says, patience))


def test_without_a_limit_every_client_is_waited_for() -> None:
    assert find_clients(grid({70: 2, 30: 0, 90: 1}, patience=12), 3, None) == {0: 30, 1: 90, 2: 70}


def test_with_a_limit_those_who_are_late_are_left_out() -> None:
    assert find_clients(grid({70: 1, 30: None, 90: 0}), 3, 0.2) == {0: 90, 1: 70}
    with pytest.raises(RunFailedError, match=r"no client connected within 0\.05 s"):
        find_clients(grid({}), 3, 0.05)


def test_a_second_node_with_the_same_partition_and_one_out_of_range_are_left_out() -> None:
    assert find_clients(grid({70: 0, 30: 0, 90: 5, 20: -1, 10: 1}), 5, None) == {0: 70, 1: 10}
