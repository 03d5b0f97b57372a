"""The run folder: what is written where, and read back.

Files appear whole (:mod:`fedpriv.core.files`), and the line-by-line metrics are cut back to the last checkpoint on
resume. A kill at any moment leaves a folder that can be finished. The checkpoint and all else that a resumed run
relies on (settings, observations, the lines about the rounds until then) are on the disk before the run goes on, and
so outlive a power failure, too.

A resumed run leaves the same bytes as an uninterrupted one, but for what tells of its course:

- metrics.jsonl: the ``seconds`` of each round;
- asked.jsonl: a round that was cut off may be there twice;
- summary.json: ``seconds`` and ``attack_seconds``, which are of the last start;
- report.html: these times.

Where an attack takes minutes, its code is compiled if that pays, by the clock: scores and pictures may then differ by
rounding, in two uninterrupted runs as well (:mod:`fedpriv.attacks.reconstruction.evaluation`).
"""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedpriv.core.config import Experiment, load_run, read_toml
from fedpriv.core.errors import InputError
from fedpriv.core.files import (
    append_line,
    as_json,
    drop_cut_line,
    is_empty,
    remove_parts,
    sync,
    write_whole,
    writing_to,
)
from fedpriv.core.randomness import Secret
from fedpriv.core.reading import FileRecord, parse_json, read_file, read_text
from fedpriv.core.records import Asked, Deployed, LabelCeiling, Ledger, Partition, RoundRecord, Score, Summary
from fedpriv.core.registry import FINDINGS

T = TypeVar("T")
F = TypeVar("F", bound=FileRecord)

DEPLOYMENT = "deployment.json"
"""In the folder of a deployment's run: which of Flower's runs it was."""

NOTICES = "notices.txt"
"""Where the server of a deployment writes them: its warnings, one a line."""

_SECRET = "secret.key"
_SCORES = "reconstructions/scores.jsonl"
# What only the referee may know: exact figures of clients' data.
_CEILINGS, _HOLDINGS = "referee/ceilings.json", "referee/partition.json"


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round: named tensors of every kind."""

    round: int
    tensors: Mapping[str, Tensor]


def picture_name(round_number: int, client: int, what: str, image: int | None = None, ending: str = ".png") -> str:
    """Return the name of a picture in reconstructions/, or of a row there."""
    return f"{round_number:04d}-{client:04d}-{what}" + ("" if image is None else f"-{image}") + ending


class Files:
    """The files of a folder, each with its name in it."""

    verb: ClassVar[str] = "run"  # that fills it

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def to_resume(self) -> str:
        """The command that finishes the run of this folder."""
        return shlex.join(["fedpriv", self.verb, "--resume", str(self.path)])

    def given_command(self) -> str:
        """The commands that led here, one a line; empty if unknown."""
        path = self.path / "command.txt"
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file whole."""
        write_whole(self.path / name, content)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file whole."""
        self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: object) -> None:
        """Write a value as indented JSON; NaN and infinity are refused."""
        self.write_bytes(name, as_json(value))

    def write(self, record: FileRecord) -> None:
        """Write a record into its file."""
        self.write_json(record.path, record.model_dump(mode="json"))

    def read(self, kind: type[F]) -> F | None:
        """Return the record of a kind; ``None`` where there is none."""
        return read_file(self.path / kind.path, kind)

    def write_private(self, name: str, value: object) -> None:
        """Write a value as JSON into a folder below, both for the owner's eyes only."""
        path = self.path / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, as_json(value), mode=0o600)

    def write_jsonl(self, name: str, values: Sequence[Mapping[str, Any]]) -> None:
        """Write one JSON object a line, the file whole."""
        self.write_text(name, "".join(json.dumps(value, allow_nan=False) + "\n" for value in values))

    def remove(self, *names: str) -> None:
        """Remove files that may be there."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def whole_lines(self, name: str, kind: type[T]) -> tuple[T, ...]:
        """Read all lines of a file of JSON objects that appeared whole."""
        path = self.path / name
        lines = enumerate((read_text(path) or "").splitlines(), 1)
        return tuple(parse_json(line, kind, f"{path}, line {number}") for number, line in lines)

    def _needed(self, name: str, record: T | None) -> T:
        """Return a record of a run that has ended."""
        if record is None:
            raise InputError(f"{self.path} has no {name}: finish the run with {self.to_resume}")
        return record

    def appended_lines(self, name: str, kind: type[T]) -> list[T]:
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


class RunFolder(Files):
    """The folder of one run: :meth:`create` or :meth:`open` it; readers return ``None`` where there is no file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.observations = path / "observations"  # where the tap writes
        self.reconstructions = path / "reconstructions"  # where the referee writes
        self._checkpoint = path / "checkpoint" / "server.safetensors"
        self._parts = (self.observations, self.reconstructions, self._checkpoint.parent)

    @staticmethod
    def create(path: Path, experiment: Experiment) -> "RunFolder":
        """Make the folder and write the resolved configuration into it."""
        with writing_to(path):
            if path.exists() and not is_empty(path):
                raise InputError(f"{path} exists already; choose another --out, or finish it with --resume {path}")
            path.mkdir(parents=True, exist_ok=True)
            # First of all: what holds this file can be resumed, and what does not can be begun anew.
            write_whole(path / "config.toml", experiment.to_toml().encode(), durable=True)
            return RunFolder.open(path)

    @staticmethod
    def open(path: Path) -> "RunFolder":
        """Return the folder of an earlier run."""
        if not (path / "config.toml").is_file():
            raise InputError(f"{path} is not the folder of a run: it has no config.toml")
        folder = RunFolder(path)
        for part in folder._parts:
            part.mkdir(exist_ok=True)
        return folder

    @property
    def to_report(self) -> str:
        """The command that writes the report again."""
        return shlex.join(["fedpriv", "report", str(self.path)])

    def experiment(self) -> Experiment:
        """The experiment of this run."""
        return load_run(self.path)

    def command(self) -> str:
        """The command that repeats this run; the folder's own configuration where it was started otherwise."""
        return self.given_command() or f"fedpriv run {self.path / 'config.toml'}"

    def remove_parts(self) -> None:
        """Remove what a killed process left of files and lines; no other process may be writing here."""
        others = ("private", "referee", *(name for kind in FINDINGS.values() for name in kind.folders))
        remove_parts(self.path, *self._parts, *(self.path / name for name in others))
        # Of a question that was not yet written down nothing was sent; the next line must not follow it on the same.
        drop_cut_line(self.path / "asked.jsonl")

    def keep_secret(self, secret: Secret) -> None:
        """Write the run's secret for its owner's eyes only; a resumed run draws the same noise with it."""
        write_whole(self.path / _SECRET, f"{secret.key.hex()}\n".encode(), mode=0o600)

    def has_secret(self, experiment: Experiment) -> bool:
        """Whether the run's secret is here, or follows from the seed."""
        return not experiment.keeps_secret or (self.path / _SECRET).is_file()

    def secret(self, experiment: Experiment) -> Secret:
        """Return the run's secret: the one that is kept here or, where noise is reproducible, the seed's."""
        if not experiment.keeps_secret:
            return Secret.of_seed(experiment.seed)
        return Secret.read(self.path / _SECRET, "noise and batches of this run cannot be drawn again")

    def world_secret(self, experiment: Experiment) -> Secret | None:
        """Return the secret that batches or labels follow from; ``None`` where neither does."""
        if not experiment.rests_on_secret:
            return None
        if experiment.prepares_data and self.is_deployed:
            raise InputError(
                f"{self.path}: the clients of this deployment changed their labels by secrets of their own, so that "
                "nobody else can build what they trained with; run it inline, or with noise = 'reproducible'"
            )
        return self.secret(experiment)

    @property
    def is_deployed(self) -> bool:
        """Whether the rounds ran on a deployment."""
        return (self.path / DEPLOYMENT).exists()

    def append_asked(self, line: Asked) -> None:
        """Note, before messages go out, which clients are queried: from then on they may have released something."""
        append_line(self.path / "asked.jsonl", json.dumps(asdict(line)))

    def asked(self) -> tuple[Asked, ...]:
        """The queries so far, a cut-off round included."""
        return tuple(self.appended_lines("asked.jsonl", Asked))

    def notices(self) -> list[str]:
        """What the server of a deployment has warned of."""
        return (read_text(self.path / NOTICES) or "").splitlines()

    def append_round(self, record: RoundRecord) -> None:
        """Add a line to metrics.jsonl."""
        append_line(self.path / "metrics.jsonl", json.dumps(record.to_json(), allow_nan=False))

    def rounds(self) -> list[RoundRecord]:
        """The complete lines of metrics.jsonl."""
        return self.appended_lines("metrics.jsonl", RoundRecord)

    def summary(self) -> Summary | None:
        """What the run wrote about itself when it ended; ``None`` before, or if it was killed."""
        return read_file(self.path / "summary.json", Summary)

    def settings_digest(self) -> str:
        """SHA-256 of what config.toml says, in hexadecimal digits, without the section [report], which may change."""
        tree = {key: value for key, value in read_toml(self.path / "config.toml").items() if key != "report"}
        return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()

    def checked_summary(self) -> Summary | None:
        """Return :meth:`summary`, whose figures are of the settings that are in the folder now."""
        summary = self.summary()
        if summary is not None and summary.settings not in ("", self.settings_digest()):
            raise InputError(
                f"{self.path / 'config.toml'} was changed after the run had ended, and its figures are of other "
                f"settings: set it as it was, or go on with what it says now: {self.to_resume}"
            )
        return summary

    def deployed(self) -> Deployed | None:
        """Which of Flower's runs it was; ``None``: it was no deployment's."""
        return read_file(self.path / DEPLOYMENT, Deployed)

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json."""
        self.write_json("summary.json", summary.to_json())

    def final_summary(self) -> Summary:
        """The summary of a run that has ended."""
        return self._needed("summary.json", self.checked_summary())

    def final_ledger(self) -> Ledger:
        """The ledger of a run that has ended; errors are those of :meth:`final_summary`."""
        return self._needed("ledger.json", self.ledger())

    def keep_rounds(self, last: int) -> None:
        """Cut metrics.jsonl back to the rounds up to ``last``."""
        self.write_rounds([record for record in self.rounds() if record.round <= last])

    def write_rounds(self, records: Sequence[RoundRecord]) -> None:
        """Write metrics.jsonl anew."""
        self.write_jsonl("metrics.jsonl", [record.to_json() for record in records])

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write the server's state whole, replacing the one before; the lines of its rounds reach the disk first."""
        for path in (self.path / "asked.jsonl", self.path / "metrics.jsonl"):
            if path.exists():
                sync(path)
        tensors = {name: value.contiguous() for name, value in checkpoint.tensors.items()}
        write_whole(self._checkpoint, save(tensors, metadata={"round": str(checkpoint.round)}), durable=True)

    def load_checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint, or ``None`` where no round was finished."""
        if not self._checkpoint.exists():
            return None
        try:
            with safe_open(self._checkpoint, framework="pt") as file:
                metadata = file.metadata() or {}
                return Checkpoint(int(metadata["round"]), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise InputError(f"{self._checkpoint} is damaged: {error}") from None

    def ledger(self) -> Ledger | None:
        """What is proven; ``None`` until a run ends."""
        return read_file(self.path / "ledger.json", Ledger)

    def write_label_ceilings(self, ceilings: Sequence[LabelCeiling]) -> None:
        """Write referee/ceilings.json."""
        self.write_private(_CEILINGS, [asdict(line) for line in ceilings])

    def label_ceilings(self) -> tuple[LabelCeiling, ...]:
        """How often any attack names labels at most; nothing until a run ends, and in runs of earlier versions."""
        return read_file(self.path / _CEILINGS, tuple[LabelCeiling, ...]) or ()

    def write_partition(self, partition: Partition) -> None:
        """Write referee/partition.json; earlier versions left it in the open."""
        self.write_private(_HOLDINGS, asdict(partition))
        (self.path / "partition.json").unlink(missing_ok=True)

    def partition(self) -> Partition | None:
        """How the data are shared; ``None`` if the run ended before they were."""
        known = read_file(self.path / _HOLDINGS, Partition)
        return read_file(self.path / "partition.json", Partition) if known is None else known

    def scores(self) -> tuple[Score, ...]:
        """The lines of scores.jsonl, for every reconstruction and guess so far."""
        return self.whole_lines(_SCORES, Score)

    def write_scores(self, scores: Sequence[Score]) -> None:
        """Write scores.jsonl."""
        self.write_jsonl(_SCORES, [score.to_json() for score in scores])
