"""Reassemble Flower's messages from intercepted requests: a question to a SuperNode, and its answer.

Messages travel in pieces: first their metadata with a tree of names, then one object after another, each under the
SHA-256 of its bytes. Both ends leave out objects that the other has already. Nothing here runs code that came over the
wire: objects are Flower's own protobuf and JSON, arrays are read by :mod:`fedpriv.core.wire`.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import h11
from flwr.app import RecordDict
from flwr.app.message import Message as FlowerMessage
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import Metadata, ObjectTree, PullObjectRequest, PullObjectResponse, PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, validate_object_content

from fedpriv.deploy.report import ConnectionKind

# The first byte of every TLS connection announces a handshake; no HTTP request begins with it.
_TLS = b"\x16"


@dataclass(frozen=True)
class Spoken:
    """One request and its reply."""

    path: str  # what was asked for
    request: bytes  # the body sent by the SuperNode
    status: int  # the reply's HTTP status
    reply: bytes  # the body sent by the SuperLink


@dataclass
class _Half:
    """A message that is still coming in."""

    path: str = ""
    status: int = 0
    body: bytearray = field(default_factory=bytearray)


class Conversation:
    """Follows a connection with two HTTP parsers, one for each end, told what the other has read."""

    def __init__(self) -> None:
        self.kind = ConnectionKind.SILENT
        self._follows = False
        self._requests = h11.Connection(h11.SERVER)
        self._replies = h11.Connection(h11.CLIENT)
        self._request, self._reply = _Half(), _Half()

    def asked(self, data: bytes) -> None:
        """Take bytes that the SuperNode sent."""
        if self.kind is ConnectionKind.SILENT:
            self.kind = ConnectionKind.TLS if data.startswith(_TLS) else ConnectionKind.OTHER  # until a request is read
            self._follows = self.kind is not ConnectionKind.TLS
        self._follow(self._requests, data)

    def answered(self, data: bytes) -> tuple[Spoken, ...]:
        """Take bytes that the SuperLink sent; returns what is complete now."""
        if self.kind is ConnectionKind.SILENT:
            self.kind = ConnectionKind.OTHER  # in HTTP and TLS the client speaks first
        return self._follow(self._replies, data)

    def _follow(self, parser: h11.Connection, data: bytes) -> tuple[Spoken, ...]:
        if not self._follows:
            return ()
        try:
            parser.receive_data(data)
            return self._read()
        except (h11.ProtocolError, RuntimeError):
            # Not HTTP, or no longer: what passes from now on is passed on and not read.
            self._follows = False
            return ()

    def _read(self) -> tuple[Spoken, ...]:
        """Read on, on either side, until both need more bytes."""
        complete: list[Spoken] = []
        while self._read_request() or self._read_reply(complete):
            pass
        return tuple(complete)

    def _read_request(self) -> bool:
        event = self._requests.next_event()
        match event:
            case h11.Request():
                self.kind = ConnectionKind.HTTP
                self._request = _Half(path=event.target.decode("latin-1"))
            case h11.Data():
                self._request.body += event.data
            case h11.EndOfMessage():
                pass
            case _:
                return False
        self._replies.send(event)
        return True

    def _read_reply(self, complete: list[Spoken]) -> bool:
        if self._replies.our_state is h11.IDLE:
            return False  # nothing was asked yet
        event = self._replies.next_event()
        match event:
            case h11.Response():
                self._reply = _Half(status=event.status_code)
            case h11.Data():
                self._reply.body += event.data
            case h11.InformationalResponse() | h11.EndOfMessage():
                pass
            case _:
                return False
        self._requests.send(event)
        if isinstance(event, h11.EndOfMessage):
            sent, got = self._request, self._reply
            complete.append(Spoken(sent.path, bytes(sent.body), got.status, bytes(got.body)))
            self._request, self._reply = _Half(), _Half()
            if self._requests.our_state is h11.DONE and self._requests.their_state is h11.DONE:  # it is kept open
                self._requests.start_next_cycle()
                self._replies.start_next_cycle()
        return True


_FLEET = "/v1/fleet/"
# Empty records and single numbers: Flower sends them once and refers to them from then on.
_SMALL = 4096
_OK = 200


@dataclass(frozen=True)
class Exchange:
    """One question to a SuperNode and its answer."""

    run_id: int  # Flower's number of the run
    kind: str  # such as `train`
    question: RecordDict  # what the server sent
    answer: RecordDict  # what the SuperNode sent back


@dataclass(frozen=True)
class _Announced:
    """A message whose objects may still be on their way."""

    metadata: Metadata
    tree: ObjectTree

    @property
    def objects(self) -> set[str]:
        return set(_names(self.tree))


@dataclass
class _Node:
    """What one SuperNode was asked and has answered, as far as it passed."""

    objects: dict[str, bytes] = field(default_factory=dict)
    questions: dict[str, _Announced] = field(default_factory=dict)
    answers: list[_Announced] = field(default_factory=list)


class Messages:
    """Puts messages together from requests and replies."""

    def __init__(self) -> None:
        self._nodes = defaultdict[int, _Node](_Node)
        self._small: dict[str, bytes] = {}

    def hear(self, spoken: Spoken) -> tuple[Exchange, ...]:
        """Take one request and its reply; returns the exchanges that are complete now."""
        if spoken.status != _OK or not spoken.path.startswith(_FLEET):
            return ()
        match spoken.path.removeprefix(_FLEET):
            case "pull-messages":
                asked = PullMessagesResponse.FromString(spoken.reply)
                for message, tree in zip(asked.messages_list, asked.message_object_trees, strict=True):
                    node = self._nodes[message.metadata.dst_node_id]
                    node.questions[message.metadata.message_id] = _Announced(message.metadata, tree)
            case "pull-object":
                pull, pulled = PullObjectRequest.FromString(spoken.request), PullObjectResponse.FromString(spoken.reply)
                if pulled.object_available:
                    self._keep(self._nodes[pull.node.node_id], pull.object_id, pulled.object_content)
            case "push-messages":
                answered = PushMessagesRequest.FromString(spoken.request)
                node = self._nodes[answered.node.node_id]
                pairs = zip(answered.messages_list, answered.message_object_trees, strict=True)
                node.answers += [_Announced(message.metadata, tree) for message, tree in pairs]
                return self._complete(node)
            case "push-object":
                pushed = PushObjectRequest.FromString(spoken.request)
                node = self._nodes[pushed.node.node_id]
                self._keep(node, pushed.object_id, pushed.object_content)
                return self._complete(node)
        return ()

    def _keep(self, node: _Node, name: str, content: bytes) -> None:
        if get_object_id(content) != name:
            raise ValueError(f"an object does not have the name {name[:16]}... that it passes under")
        store = self._small if len(content) <= _SMALL else node.objects
        store[name] = content

    def _complete(self, node: _Node) -> tuple[Exchange, ...]:
        """Take out the answers that are whole now, with their questions."""
        known = node.objects.keys() | self._small.keys()
        whole = [answer for answer in node.answers if answer.objects <= known]
        exchanges: list[Exchange] = []
        for answer in whole:
            node.answers.remove(answer)
            question = node.questions.pop(answer.metadata.reply_to_message_id, None)
            if question is not None and question.objects <= known:
                exchanges.append(self._exchange(node, question, answer))
        if whole:
            wanted = {name for open_one in (*node.questions.values(), *node.answers) for name in open_one.objects}
            node.objects = {name: content for name, content in node.objects.items() if name in wanted}
        return tuple(exchanges)

    def _exchange(self, node: _Node, question: _Announced, answer: _Announced) -> Exchange:
        metadata = question.metadata
        sent, got = (self._content(node, part) for part in (question, answer))
        return Exchange(metadata.run_id, metadata.message_type, sent, got)

    def _content(self, node: _Node, announced: _Announced) -> RecordDict:
        contents = {name: node.objects.get(name, self._small.get(name, b"")) for name in announced.objects}
        for content in contents.values():
            validate_object_content(content)
        message = inflate_object_from_contents(announced.tree.object_id, contents)
        if not isinstance(message, FlowerMessage):
            raise ValueError(f"a message was announced, and what passed is a {type(message).__name__}")
        return message.content if message.has_content() else RecordDict()


def _names(tree: ObjectTree) -> Iterator[str]:
    yield tree.object_id
    for child in tree.children:
        yield from _names(child)
