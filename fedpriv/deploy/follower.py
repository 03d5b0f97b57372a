"""Follow connections, one piece after another: from bytes to conversations, messages and observations."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from fedpriv.attacks.observation import write_observation
from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole
from fedpriv.deploy.conversation import ConnectionKind, Conversation, Spoken
from fedpriv.deploy.messages import Exchange, Messages
from fedpriv.deploy.notes import EXPERIMENT, Listened, NotReadableError, observation_in, write_listened

_MOST_REASONS = 20


class Follower:
    """Follows all connections of one listener, which adds to what passed before. Not for several threads at once."""

    def __init__(self, folder: Path, listened: Listened) -> None:
        self._folder = folder
        self._noted = listened  # without connections that are open
        self._written: Listened | None = None
        self._messages = Messages()
        self._conversations: dict[int, Conversation] = {}

    @property
    def listened(self) -> Listened:
        """What passed so far."""
        kinds = Counter(self._noted.connections) + Counter(str(talk.kind) for talk in self._conversations.values())
        return replace(self._noted, connections=dict(sorted(kinds.items())))

    def asked(self, number: int, data: bytes) -> None:
        """Follow what a SuperNode said on connection ``number``."""
        self._count(bytes_up=len(data))
        self._conversations.setdefault(number, Conversation()).asked(data)

    def answered(self, number: int, data: bytes) -> None:
        """Follow what the SuperLink said on connection ``number``."""
        self._count(bytes_down=len(data))
        for spoken in self._conversations.setdefault(number, Conversation()).answered(data):
            self._hear(spoken)

    def closed(self, number: int) -> None:
        """Forget a connection."""
        conversation = self._conversations.pop(number, None)
        kind = conversation.kind if conversation else ConnectionKind.SILENT
        self._noted = replace(self._noted, connections=Counter(self._noted.connections) + Counter([str(kind)]))

    def unanswered(self) -> None:
        """Count a connection that found no SuperLink."""
        self._count(unanswered=1)

    def write(self) -> None:
        """Write down what passed so far, where that is news."""
        listened = self.listened
        if listened != self._written:
            write_listened(self._folder, listened)
            self._written = listened

    def note(self, exchange: Exchange) -> None:
        """Store the upload in an exchange, or the reason why it has none that can be stored."""
        self._count(exchanges=1)
        if exchange.kind.startswith("train."):
            self._give_up(f"a {exchange.kind} message: its upload is not sent as it is")
        if exchange.kind != "train":
            return
        try:
            experiment, observation = observation_in(exchange)
        except (NotReadableError, InputError) as error:
            self._give_up(str(error))
            return
        run = self._folder / f"run-{exchange.run_id}"
        (run / "observations").mkdir(parents=True, exist_ok=True)
        write_whole(run / EXPERIMENT, f"{experiment.to_json()}\n".encode())
        write_observation(run / "observations", observation)
        self._count(uploads=1)

    def _hear(self, spoken: Spoken) -> None:
        try:
            for exchange in self._messages.hear(spoken):
                self.note(exchange)
        except Exception as error:  # noqa: BLE001 - whatever passes (anybody may send it), the listener goes on
            self._give_up(f"{spoken.path}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def _give_up(self, reason: str) -> None:
        """Note why something could not be read."""
        known = self._noted.unread
        if reason not in known and len(known) < _MOST_REASONS:
            self._noted = replace(self._noted, unread=(*known, reason))

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self._noted, name) + number for name, number in more.items()}
        self._noted = replace(self._noted, **counts)
