"""The inline engine: a Flower Grid whose clients are called in this process, one after another, or as a stack."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from sys import intern
from typing import Any

from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.app.message.message import make_message
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from typing_extensions import override

from fedpriv.clients.cohort import CohortApp

RUN_ID = 1

# Name, kind, keys and values of a record.
_Record = tuple[str, Any, tuple[str, ...], tuple[Any, ...]]


# The private pieces of Flower that our engines need; tests/engines fails when a version changes them.


def assume_server_identity(run_id: int) -> None:
    """Make messages created in this process those of the server of ``run_id``."""
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    TaskIdentity.task_id = run_id


def received_message(metadata: Metadata, content: RecordDict) -> Message:
    """Put a message together again whose content came by another way than its address."""
    return make_message(metadata, content)


def is_identified() -> bool:
    """Whether this process has an identity, as those have that Flower's runtimes start: it must keep that."""
    try:
        return TaskIdentity.run_id is not None
    except RuntimeError:
        return False


def simulated(client_app: ClientApp, clients: int) -> "InlineGrid":
    """Return a grid for whoever asks clients without a ServerApp."""
    if not is_identified():
        assume_server_identity(RUN_ID)
    return InlineGrid(client_app, clients)


def run_server(server_app: ServerApp, grid: Grid) -> None:
    """Run the server's main function in this thread, on a grid of ours."""
    if not is_identified():
        assume_server_identity(RUN_ID)
    server_app(grid, _context(SUPERLINK_NODE_ID, {}))


def answered(client_app: ClientApp, message: Message, context: Context) -> Message:
    """Have a client answer; what it raises is the server's news, as on every Flower grid: an error reply."""
    try:
        return client_app(message, context)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - see above
        return failed(message, error, str(error))


def failed(message: Message, error: BaseException, text: str) -> Message:
    """Return the reply of a client that has failed."""
    reason = f"{type(error).__name__}: {text}"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _context(node_id: int, node_config: dict[str, int]) -> Context:
    return Context(run_id=RUN_ID, node_id=node_id, node_config=dict(node_config), state=RecordDict(), run_config={})


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
    """Calls the ClientApp when a message is pushed and hands out its reply when pulled; without any timeout."""

    client_app: ClientApp
    clients: int
    _states: dict[int, tuple[_Record, ...]] = field(default_factory=dict)
    _replies: dict[str, Message] = field(default_factory=dict)
    _numbers: Iterable[int] = field(default_factory=count)

    def set_run(self, run: Run) -> None:
        """Take part in a run; an inline grid has only one."""

    @property
    def run(self) -> Run:
        """The one run."""
        return Run.create_empty(RUN_ID)

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
        key = self._numbered(message)
        context = self._client(message.metadata.dst_node_id)
        self._keep(key, answered(self.client_app, message, context))
        self._remember(context)
        return key

    def _numbered(self, message: Message) -> str:
        """Give a message the id that its reply is pulled with."""
        key = str(next(iter(self._numbers)))
        message.metadata.__dict__["_message_id"] = key
        return key

    def _keep(self, key: str, reply: Message) -> None:
        """Keep a reply until it is pulled."""
        reply.metadata.__dict__["_reply_to_message_id"] = key
        self._replies[key] = reply

    def _client(self, node: int) -> Context:
        """What Flower hands to a client with a message: its number, and what it kept from earlier ones."""
        context = _context(node, {"partition-id": node - 1, "num-partitions": self.clients})
        if node in self._states:
            context.state = _unpacked(self._states[node])
        return context

    def _remember(self, context: Context) -> None:
        """Keep what a client keeps after a message."""
        self._states[context.node_id] = _packed(context.state)


def _packed(state: RecordDict) -> tuple[_Record, ...]:
    """What a client keeps, in a third of the memory: it is what grows in a long run, with each new client."""
    return tuple(
        (name, type(record), tuple(map(intern, record)), tuple(record.values())) for name, record in state.items()
    )


def _unpacked(kept: tuple[_Record, ...]) -> RecordDict:
    state = RecordDict()
    for name, kind, keys, values in kept:
        state[name] = kind()
        # Flower checks each entry that is set; these were when they were new, and each round adds one.
        vars(state[name])["_data"].update(zip(keys, values, strict=True))
    return state


_TRAINS = ("train", "train.masked")


@dataclass
class StackedGrid(InlineGrid):
    """Answers as the inline grid does; an app that trains no clients together works as it does there."""

    @override
    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        asked = list(messages)
        if isinstance(self.client_app, CohortApp):
            training = [message for message in asked if message.metadata.message_type in _TRAINS]
            self.client_app.cohort.expect({message.metadata.dst_node_id - 1: message for message in training})
        return super().push_messages(asked)
