"""Hears connections, one piece after another: from bytes to conversations, messages and notes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from fedpriv.deploy.conversation import ConnectionKind, Conversation, Spoken
from fedpriv.deploy.messages import Messages
from fedpriv.deploy.notes import Listened, Notes, write_listened


class Follower:
    """Follows all connections of one listener, which adds to what passed before. Not for several threads at once."""

    def __init__(self, folder: Path, listened: Listened) -> None:
        self._folder = folder
        self._notes = Notes(folder, listened)
        self._messages = Messages()
        self._conversations: dict[int, Conversation] = {}
        self._closed = Counter(listened.connections)
        self._bytes_up, self._bytes_down = listened.bytes_up, listened.bytes_down
        self._unanswered = listened.unanswered
        self._written: Listened | None = None

    @property
    def listened(self) -> Listened:
        """What passed so far."""
        kinds = self._closed + Counter(str(talk.kind) for talk in self._conversations.values())
        return replace(
            self._notes.listened,
            connections=dict(sorted(kinds.items())),
            bytes_up=self._bytes_up,
            bytes_down=self._bytes_down,
            unanswered=self._unanswered,
        )

    def asked(self, number: int, data: bytes) -> None:
        """Follow what a SuperNode said on connection ``number``."""
        self._bytes_up += len(data)
        self._conversations.setdefault(number, Conversation()).asked(data)

    def answered(self, number: int, data: bytes) -> None:
        """Follow what the SuperLink said on connection ``number``."""
        self._bytes_down += len(data)
        for spoken in self._conversations.setdefault(number, Conversation()).answered(data):
            self._hear(spoken)

    def closed(self, number: int) -> None:
        """Forget a connection."""
        conversation = self._conversations.pop(number, None)
        self._closed[str(conversation.kind if conversation else ConnectionKind.SILENT)] += 1

    def unanswered(self) -> None:
        """Count a connection that found no SuperLink."""
        self._unanswered += 1

    def write(self) -> None:
        """Write down what passed so far, where that is news."""
        listened = self.listened
        if listened != self._written:
            write_listened(self._folder, listened)
            self._written = listened

    def _hear(self, spoken: Spoken) -> None:
        try:
            for exchange in self._messages.hear(spoken):
                self._notes.note(exchange)
        except Exception as error:  # noqa: BLE001 - whatever passes (anybody may send it), the listener goes on
            self._notes.give_up(f"{spoken.path}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
