"""The inline engine: a Flower Grid whose clients are called in this process, one after another."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from typing_extensions import override

from fedpriv.engines.identity import assume_server_identity

__all__ = ["InlineGrid", "run_inline"]

_RUN_ID = 1


def run_inline(server_app: ServerApp, client_app: ClientApp, clients: int) -> None:
    """Run the server's main function here; every message to a client is a function call."""
    assume_server_identity(_RUN_ID)
    server_app(InlineGrid(client_app, clients), _context(SUPERLINK_NODE_ID, {}))


def _context(node_id: int, node_config: dict[str, int]) -> Context:
    return Context(run_id=_RUN_ID, node_id=node_id, node_config=dict(node_config), state=RecordDict(), run_config={})


@dataclass(frozen=True)
class _Nodes(Mapping[int, int]):
    """Partition -> partition + 1, without a list of them: there may be millions."""

    clients: int

    @override
    def __getitem__(self, partition: int) -> int:
        if partition not in range(self.clients):
            raise KeyError(partition)
        return partition + 1

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.clients))

    @override
    def __len__(self) -> int:
        return self.clients


@dataclass
class InlineGrid(Grid):
    """Calls the ClientApp when a message is pushed and hands out its reply when it is pulled.

    Arrays are serialised in Flower's records, so that client and server share no memory. There is no timeout: a client
    that hangs hangs the run, which only an engine with processes of its own can end.
    """

    client_app: ClientApp
    clients: int
    _contexts: dict[int, Context] = field(default_factory=dict)
    _replies: dict[str, Message] = field(default_factory=dict)
    _numbers: Iterable[int] = field(default_factory=count)

    def set_run(self, run: Run) -> None:
        """Take part in a run; an inline grid has only one."""

    @property
    def run(self) -> Run:
        """The one run."""
        return Run.create_empty(_RUN_ID)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message (Flower's older way to make one)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """The clients' node ids: partition + 1."""
        return list(range(1, self.clients + 1))

    def nodes_by_partition(self) -> Mapping[int, int]:
        """Return the node ids by partition."""
        return _Nodes(self.clients)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Have each message answered and return the ids to pull the replies with."""
        return [self._answer(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to these messages, each once."""
        return [self._replies.pop(key) for key in list(message_ids) if key in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Push the messages and pull the replies."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> str:
        key = str(next(iter(self._numbers)))
        message.metadata.__dict__["_message_id"] = key
        node = message.metadata.dst_node_id
        try:
            reply = self.client_app(message, self._client(node))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what a client raises is the server's news, as on every Flower grid
            reason = f"{type(error).__name__}: {error}"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        reply.metadata.__dict__["_reply_to_message_id"] = key
        self._replies[key] = reply
        return key

    def _client(self, node: int) -> Context:
        """What Flower keeps for a client, from its first message on."""
        if node not in self._contexts:
            self._contexts[node] = _context(node, {"partition-id": node - 1, "num-partitions": self.clients})
        return self._contexts[node]
