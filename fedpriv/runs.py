"""The run folder: what is written where, and read back.

Files appear whole (:mod:`fedpriv.files`), and the line-by-line metrics are cut back to the last checkpoint on resume. A
kill at any moment leaves a folder that can be finished. The checkpoint and all else that a resumed run relies on
(settings, observations, the lines about the rounds until then) are on the disk before the run goes on, and so outlive a
power failure, too.

A resumed run leaves the same bytes as an uninterrupted one, but for what tells of its course:

- metrics.jsonl: the ``seconds`` of each round;
- asked.jsonl: a round that was cut off may stand there twice;
- summary.json: ``seconds`` and ``attack_seconds``, which are of the last start;
- report.html: these times.

Where an attack takes minutes, its code is compiled if that pays, by the clock: scores and pictures may then differ by
rounding, in two uninterrupted runs as well (:mod:`fedpriv.attacks.reconstruction.evaluation`).
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedpriv.config import Experiment, load_run
from fedpriv.errors import InputError
from fedpriv.files import append_line, is_empty, remove_parts, sync, write_whole, writing_to
from fedpriv.randomness import Secret

__all__ = [
    "DEPLOYMENT",
    "FINITE",
    "Asked",
    "Checkpoint",
    "Failure",
    "Origin",
    "Released",
    "RoundRecord",
    "RunFolder",
    "parse_json",
]

T = TypeVar("T")

DEPLOYMENT = "deployment.json"
"""In the folder of a deployment's run: which of Flower's runs it was."""

FINITE = ConfigDict(allow_inf_nan=False)
"""Of records read from JSON: numbers that are not finite are no JSON, and whoever wrote one by mistake is told."""


@dataclass(frozen=True)
class Failure:
    """One client left out of one round, and why."""

    client: int
    reason: str


@dataclass(frozen=True)
class RoundRecord:
    """One line of metrics.jsonl; round 0 is the model before training.

    Attributes:
        round: the round's number, from 1.
        loss: mean cross entropy on the test data.
        accuracy: share of the test data classified correctly, from 0 to 1.
        clients: the clients asked.
        used: the clients whose uploads were aggregated.
        failures: the clients left out.
        seconds: wall time of the round, evaluation included.
        bytes_up: bytes of the uploads.
        bytes_down: bytes of the parameters sent out.
        epsilon: proven for the worst client after this round, by the cheap accounting of a run that goes on; ``None``
            where nothing is proven, and in folders of versions that did not write it.
        crafted: the clients that were sent parameters of an active server's own making and replied; their uploads are
            attacked and not aggregated.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE

    round: int
    loss: float
    accuracy: float
    clients: tuple[int, ...]
    used: tuple[int, ...]
    failures: tuple[Failure, ...]
    seconds: float
    bytes_up: int
    bytes_down: int
    epsilon: float | None = None
    crafted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Released:
    """What makes one release what it is, from :meth:`fedpriv.plan.Plan.released`: settings of two sections."""

    mechanism: dict[str, Any]
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Origin:
    """Digests, hexadecimal, of what all releases of a run rest on; empty in folders of versions that wrote none.

    Attributes:
        settings: of the settings that decide what a release is about.
        secret: of the run's secret. This and what follows is empty without a mechanism.
        data: of all images and labels, keyed by the secret: whoever has a guess of the data cannot check it.
        model: of the network's code, and of the numbers that it was built with.
    """

    settings: str = ""
    secret: str = ""
    data: str = ""
    model: str = ""


@dataclass(frozen=True)
class Asked:
    """One line of asked.jsonl: clients who were asked the same in a round, and what they release in their answer.

    Attributes:
        round: the round's number, from 1.
        clients: who was asked, ascending.
        sent: the digest of what they were sent, hexadecimal; whoever is asked the same again answers the same. Empty
            without a mechanism, and in folders of versions that did not write it.
        origin: what the releases rest on.
        releases: mechanism, noise and sampling of a release, each kind once.
        kinds: for each of the clients its place in ``releases``.

    Raises:
        ValueError: numbers of clients do not ascend, or there are not as many kinds as clients.
    """

    round: Annotated[int, Field(ge=1)]
    clients: tuple[Annotated[int, Field(ge=0)], ...]
    sent: str = ""
    origin: Origin = Origin()
    releases: tuple[Released, ...] = ()
    kinds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if list(self.clients) != sorted(set(self.clients)):
            raise ValueError("clients has numbers that do not ascend")
        named = len(self.kinds) == len(self.clients) and set(self.kinds) <= set(range(len(self.releases)))
        if self.origin.settings and not named:
            raise ValueError("kinds does not name one of releases for each client")


_ROUND, _ASKED = TypeAdapter(RoundRecord), TypeAdapter(Asked)
_SECRET = "secret.key"


def parse_json(text: str | bytes, kind: TypeAdapter[T], where: str) -> T:
    """Read one JSON value as a record.

    Args:
        text: the JSON.
        kind: of what type it has to be; keys that the type does not know are left out.
        where: file and line, for people.

    Raises:
        InputError: it is not such a record.
    """
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{where} is damaged: {key + ': ' if key else ''}{first['msg']}") from None


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round: named tensors of every kind."""

    round: int
    tensors: Mapping[str, Tensor]


class RunFolder:
    """The folder of one run.

    Use :meth:`create` for a new one and :meth:`open` for one that exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def create(path: Path, experiment: Experiment) -> "RunFolder":
        """Make the folder and write the resolved configuration into it.

        Raises:
            InputError: the folder exists and is not empty, or cannot be made.
            RunFailedError: the disk is full; the folder is empty.
        """
        with writing_to(path):
            if path.exists() and not is_empty(path):
                raise InputError(f"{path} exists already; choose another --out, or finish it with --resume {path}")
            path.mkdir(parents=True, exist_ok=True)
            # First of all: what holds this file can be resumed, and what does not can be begun anew.
            write_whole(path / "config.toml", experiment.to_toml().encode(), durable=True)
            return RunFolder.open(path)

    @staticmethod
    def open(path: Path) -> "RunFolder":
        """Return the folder of an earlier run.

        Raises:
            InputError: there is no such folder, or it is not a run's.
        """
        if not (path / "config.toml").is_file():
            raise InputError(f"{path} is not the folder of a run: it has no config.toml")
        folder = RunFolder(path)
        for part in folder._parts:
            part.mkdir(exist_ok=True)
        return folder

    @property
    def observations(self) -> Path:
        """Where the tap writes."""
        return self.path / "observations"

    @property
    def reconstructions(self) -> Path:
        """Where the referee writes."""
        return self.path / "reconstructions"

    @property
    def _parts(self) -> tuple[Path, ...]:
        return self.observations, self.reconstructions, self._checkpoint.parent

    @property
    def to_resume(self) -> str:
        """The command that finishes this run."""
        return shlex.join(["fedpriv", "run", "--resume", str(self.path)])

    @property
    def to_report(self) -> str:
        """The command that writes the report again."""
        return shlex.join(["fedpriv", "report", str(self.path)])

    def experiment(self) -> Experiment:
        """The experiment of this run."""
        return load_run(self.path)

    def command(self) -> str:
        """The command that repeats this run; the folder's own configuration where it was started otherwise."""
        path = self.path / "command.txt"
        text = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
        return text or f"fedpriv run {self.path / 'config.toml'}"

    def remove_parts(self) -> None:
        """Remove what a killed process left of files that it was writing; nobody else may be writing here."""
        remove_parts(self.path, *self._parts, self.path / "membership")

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file whole."""
        write_whole(self.path / name, content)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file whole."""
        self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: object) -> None:
        """Write a value as indented JSON; NaN and infinity are refused."""
        self.write_text(name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def write_jsonl(self, name: str, values: Sequence[Mapping[str, Any]]) -> None:
        """Write one JSON object a line, the file whole."""
        self.write_text(name, "".join(json.dumps(value, allow_nan=False) + "\n" for value in values))

    def keep_secret(self, secret: Secret) -> None:
        """Write the run's secret for its owner's eyes only; a resumed run draws the same noise with it."""
        write_whole(self.path / _SECRET, f"{secret.key.hex()}\n".encode(), mode=0o600)

    def secret(self, experiment: Experiment) -> Secret:
        """Return the run's secret: the one that is kept here or, where noise is reproducible, the seed's.

        Raises:
            InputError: it is not here any more.
        """
        if not experiment.keeps_secret:
            return Secret.of_seed(experiment.seed)
        path = self.path / _SECRET
        try:
            return Secret(bytes.fromhex(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            raise InputError(
                f"{path} is not there, or damaged: noise and batches of this run cannot be drawn again without it"
            ) from None

    def append_asked(self, line: Asked) -> None:
        """Note, before messages go out, who is asked: from then on they may have released something."""
        append_line(self.path / "asked.jsonl", json.dumps(asdict(line)))

    def asked(self) -> tuple[Asked, ...]:
        """Who was asked so far, a cut-off round included.

        Raises:
            InputError: the file is damaged.
        """
        return tuple(self._lines("asked.jsonl", _ASKED))

    def append_round(self, record: RoundRecord) -> None:
        """Add a line to metrics.jsonl."""
        append_line(self.path / "metrics.jsonl", json.dumps(asdict(record), allow_nan=False))

    def rounds(self) -> list[RoundRecord]:
        """The complete lines of metrics.jsonl.

        Raises:
            InputError: the file is damaged.
        """
        return self._lines("metrics.jsonl", _ROUND)

    def _lines(self, name: str, kind: TypeAdapter[T]) -> list[T]:
        """Read the whole lines of a file of JSON objects; a torn last one is left out."""
        path = self.path / name
        if not path.exists():
            return []
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        whole = content[: content.rfind(b"\n") + 1].splitlines()
        return [parse_json(line, kind, f"{path}, line {number}") for number, line in enumerate(whole, 1)]

    def keep_rounds(self, last: int) -> None:
        """Cut metrics.jsonl back to the rounds up to ``last``."""
        self.write_jsonl("metrics.jsonl", [asdict(record) for record in self.rounds() if record.round <= last])

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write the server's state whole, replacing the one before; the lines of its rounds reach the disk first."""
        for path in (self.path / "asked.jsonl", self.path / "metrics.jsonl"):
            if path.exists():
                sync(path)
        tensors = {name: value.contiguous() for name, value in checkpoint.tensors.items()}
        write_whole(self._checkpoint, save(tensors, metadata={"round": str(checkpoint.round)}), durable=True)

    def load_checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint, or ``None`` where no round was finished.

        Raises:
            InputError: the file is damaged.
        """
        if not self._checkpoint.exists():
            return None
        try:
            with safe_open(self._checkpoint, framework="pt") as file:
                metadata = file.metadata() or {}
                return Checkpoint(int(metadata["round"]), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise InputError(f"{self._checkpoint} is damaged: {error}") from None

    @property
    def _checkpoint(self) -> Path:
        return self.path / "checkpoint" / "server.safetensors"
