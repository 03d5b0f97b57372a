"""listener.json: what passed while a network listener was there; and its sentence in a run's verdict."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole
from fedpriv.core.finding import Finding
from fedpriv.core.reading import read_file
from fedpriv.core.registry import FINDINGS
from fedpriv.core.runs import RunFolder

LISTENED = "listener.json"


class ConnectionKind(StrEnum):
    """What a connection is, by its bytes."""

    SILENT = "silent"
    HTTP = "http"
    TLS = "tls"
    OTHER = "other"


@dataclass(frozen=True)
class Listened:
    """What passed while the listener was there."""

    address: str  # where it listened
    server: str  # the SuperLink
    connections: dict[str, int]  # how many it passed on, by kind: http, tls, silent, other
    bytes_up: int = 0  # from SuperNodes to the SuperLink
    bytes_down: int = 0  # from the SuperLink to SuperNodes
    exchanges: int = 0  # questions to SuperNodes whose answers it has read, too
    uploads: int = 0  # how many of them it has stored
    unread: tuple[str, ...] = ()  # why others were not, each reason once
    unanswered: int = 0  # connections that it could not pass on, since no SuperLink answered

    @property
    def is_encrypted(self) -> bool:
        """Whether everything that passed was TLS."""
        return self.connections.get(ConnectionKind.TLS, 0) > 0 and self.connections.get(ConnectionKind.HTTP, 0) == 0

    @property
    def verdict(self) -> str:
        """What the listener has, in one sentence."""
        if self.unanswered and not self.connections:
            return f"The network listener has passed on nothing: no SuperLink answered on {self.server}."
        passed = (
            f"The network listener between SuperNodes and SuperLink passed on {sum(self.connections.values())} "
            f"connections ({(self.bytes_up + self.bytes_down) / 1e6:.1f} MB)"
        )
        if self.is_encrypted:
            return f"{passed}, all of them TLS: it could read nothing, and has stored no upload."
        if not self.uploads:
            why = f" ({self.unread[0]})" if self.unread else ""
            return f"{passed} and has stored no upload{why}."
        return f"{passed} without TLS: it has read {self.exchanges} exchanges and stored {self.uploads} uploads."


_LISTENED = TypeAdapter(Listened)


def write_listened(folder: Path, listened: Listened) -> None:
    """Write ``listener.json`` whole."""
    write_whole(folder / LISTENED, _LISTENED.dump_json(listened, indent=2) + b"\n")


def read_listened(folder: Path) -> Listened:
    """Read ``listener.json``."""
    listened = read_file(folder / LISTENED, Listened)
    if listened is None:
        raise InputError(f"{folder} is not the folder of a listener: it has no {LISTENED}")
    return listened


@FINDINGS.register
class ListenerFinding(Finding[Listened]):
    """What a listener on the network passed on and stored, where a folder's observations are its."""

    name: ClassVar[str] = "listener"
    rank: ClassVar[int] = 0
    leads: ClassVar[bool] = True

    @override
    def read(self, folder: RunFolder) -> Listened | None:
        return read_listened(folder.path) if (folder.path / LISTENED).is_file() else None

    @override
    def sentences(self, found: Listened) -> tuple[str, ...]:
        return (found.verdict,)
