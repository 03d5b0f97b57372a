"""Read the HTTP requests and replies of one connection from its bytes."""

from dataclasses import dataclass, field
from enum import StrEnum

import h11

# The first byte of every TLS connection announces a handshake; no HTTP request begins with it.
_TLS = b"\x16"


class ConnectionKind(StrEnum):
    """What a connection is, by its bytes."""

    SILENT = "silent"
    HTTP = "http"
    TLS = "tls"
    OTHER = "other"


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
