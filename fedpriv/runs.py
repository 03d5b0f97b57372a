"""The run folder: what is written where, and read back.

Files appear whole (:mod:`fedpriv.files`), and the line-by-line metrics are cut back to the last checkpoint on resume. A
kill at any moment leaves a folder that can be finished. The checkpoint and all else that a resumed run relies on
(settings, observations, the lines about the rounds until then) are on the disk before the run goes on, and so outlive a
power failure, too.

A resumed run leaves the same bytes as an uninterrupted one, but for what tells of its course:

- metrics.jsonl: the ``seconds`` of each round;
- asked.jsonl: a round that was cut off may be there twice;
- summary.json: ``seconds`` and ``attack_seconds``, which are of the last start;
- report.html: these times.

Where an attack takes minutes, its code is compiled if that pays, by the clock: scores and pictures may then differ by
rounding, in two uninterrupted runs as well (:mod:`fedpriv.attacks.reconstruction.evaluation`).
"""

import hashlib
import io
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedpriv.config import Experiment, load_run, read_toml
from fedpriv.errors import InputError, one_line
from fedpriv.files import append_line, is_empty, remove_parts, sync, write_whole, writing_to
from fedpriv.npz import read_arrays, read_headers
from fedpriv.randomness import Secret
from fedpriv.records import (
    AnswersAudit,
    Asked,
    Attempt,
    Certificate,
    Deployed,
    Evasion,
    Failure,
    Knowledge,
    LabelSurvey,
    Ledger,
    Membership,
    Partition,
    Probe,
    Referee,
    Robustness,
    RoundRecord,
    Score,
    Service,
    Summary,
    VotedAnswer,
    parse_json,
    read_file,
    read_text,
)

__all__ = ["DEPLOYMENT", "Checkpoint", "Poll", "RunFolder", "picture_name"]

T = TypeVar("T")

DEPLOYMENT = "deployment.json"
"""In the folder of a deployment's run: which of Flower's runs it was."""

_SCORES = "reconstructions/scores.jsonl"
_CERTIFICATES, _ATTEMPTS = "robustness/certificates.jsonl", "robustness/attacks.jsonl"

_ROUND, _ASKED, _SCORE = TypeAdapter(RoundRecord), TypeAdapter(Asked), TypeAdapter(Score)
_SUMMARY, _LEDGER, _LABELS = TypeAdapter(Summary), TypeAdapter(Ledger), TypeAdapter(LabelSurvey)
_MEMBERSHIP, _PARTITION = TypeAdapter(Membership), TypeAdapter(Partition)
_DEPLOYED = TypeAdapter(Deployed)
_ROBUSTNESS, _CERTIFICATE = TypeAdapter(Robustness), TypeAdapter(Certificate)
_EVASION, _ATTEMPT = TypeAdapter(Evasion), TypeAdapter(Attempt)
_KNOWLEDGE, _ANSWER = TypeAdapter(Knowledge), TypeAdapter(VotedAnswer)
_SERVICE, _REFEREE, _ANSWERS_AUDIT = TypeAdapter(Service), TypeAdapter(Referee), TypeAdapter(AnswersAudit)
_PROBE = TypeAdapter(Probe)
_SECRET = "secret.key"
_VOTES = "private/votes.npz"


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round: named tensors of every kind."""

    round: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Poll:
    """private/votes.npz: what clients voted, for no eyes but those of the server that they trust with it.

    Attributes:
        votes: (T, Q), int16, the class that each teacher sees; (0, Q) where votes were summed under masks.
        clients: (T,), int64, whose teachers these are; (M,) who is in the sum.
        counts: (Q, K), float64, votes for each class; with noise in them where they were summed under masks.
        failures: who was left out, and why.
        bytes_up: the size of what was sent.
    """

    votes: NDArray[np.int16]
    clients: NDArray[np.int64]
    counts: NDArray[np.float64]
    failures: tuple[Failure, ...]
    bytes_up: int


def picture_name(round_number: int, client: int, what: str, image: int | None = None, ending: str = ".png") -> str:
    """Return the name of a picture in reconstructions/, or of a row there.

    Args:
        round_number: the round.
        client: the client.
        what: original, a guess's name, or an attack's with the kind of upload.
        image: its number, where a client has several.
        ending: .png, or .json of a row.
    """
    return f"{round_number:04d}-{client:04d}-{what}" + ("" if image is None else f"-{image}") + ending


class RunFolder:
    """The folder of one run.

    Use :meth:`create` for a new one and :meth:`open` for one that exists.

    Attributes:
        path: the folder.
        observations: where the tap writes.
        reconstructions: where the referee writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.observations, self.reconstructions = path / "observations", path / "reconstructions"
        self._checkpoint = path / "checkpoint" / "server.safetensors"
        self._parts = (self.observations, self.reconstructions, self._checkpoint.parent)

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
        return self.given_command() or f"fedpriv run {self.path / 'config.toml'}"

    def given_command(self) -> str:
        """The commands that led here, one a line; empty if unknown."""
        path = self.path / "command.txt"
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""

    def remove_parts(self) -> None:
        """Remove what a killed process left of files that it was writing; nobody else may be writing here."""
        others = (self.path / name for name in ("membership", "robustness", "probe", "private"))
        remove_parts(self.path, *self._parts, *others)

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

    def keep_poll(self, poll: Poll) -> None:
        """Write what clients voted, for the owner's eyes only, onto the disk: they are not asked again."""
        content = io.BytesIO()
        np.savez(
            content,
            votes=poll.votes,
            clients=poll.clients,
            counts=poll.counts,
            failed=np.array([failure.client for failure in poll.failures], dtype=np.int64),
            reasons=np.array([failure.reason for failure in poll.failures], dtype="<U300"),
            bytes_up=np.array(poll.bytes_up, dtype=np.int64),
        )
        path = self.path / _VOTES
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, content.getvalue(), mode=0o600, durable=True)

    def poll(self) -> Poll | None:
        """What clients voted; ``None`` until they have, and in runs in which they do not.

        Raises:
            InputError: the file is damaged.
        """
        path = self.path / _VOTES
        if not path.exists():
            return None
        headers = read_headers(path, ("votes", "clients", "counts", "failed", "reasons", "bytes_up"))
        if sum(header.nbytes for header in headers.values()) > path.stat().st_size:
            raise InputError(f"{path} is damaged: it is packed")
        try:
            read = read_arrays(path, headers)
            failures = zip(read["failed"].tolist(), read["reasons"].tolist(), strict=True)
            failed = tuple(Failure(int(client), str(reason)) for client, reason in failures)
            poll = Poll(read["votes"], read["clients"], read["counts"], failed, int(read["bytes_up"]))
            if poll.counts.ndim != 2 or poll.votes.shape[1:] != poll.counts.shape[:1]:
                raise ValueError(f"votes of shape {poll.votes.shape} and counts of shape {poll.counts.shape}")
        except (TypeError, ValueError) as error:
            raise InputError(f"{path} is damaged: {one_line(error)}") from None
        return poll

    def write_knowledge(self, knowledge: Knowledge) -> None:
        """Write knowledge.json."""
        self.write_json("knowledge.json", knowledge.model_dump(mode="json"))

    def knowledge(self) -> Knowledge | None:
        """What the answers are worth; ``None`` until the student was taught, and where clients do not vote."""
        return read_file(self.path / "knowledge.json", _KNOWLEDGE)

    def write_labels(self, survey: LabelSurvey) -> None:
        """Write labels.json."""
        self.write_json("labels.json", survey.model_dump(mode="json"))

    def labels(self) -> LabelSurvey | None:
        """What changed labels tell; ``None`` where clients do not change them, and until one has answered."""
        return read_file(self.path / "labels.json", _LABELS)

    def answers(self) -> tuple[VotedAnswer, ...]:
        """Every question that was put to the aggregator; empty before, and where clients do not vote."""
        return self._whole_lines("answers.jsonl", _ANSWER)

    def keep_secret(self, secret: Secret) -> None:
        """Write the run's secret for its owner's eyes only; a resumed run draws the same noise with it."""
        write_whole(self.path / _SECRET, f"{secret.key.hex()}\n".encode(), mode=0o600)

    def has_secret(self, experiment: Experiment) -> bool:
        """Whether the run's secret is here, or follows from the seed."""
        return not experiment.keeps_secret or (self.path / _SECRET).is_file()

    def secret(self, experiment: Experiment) -> Secret:
        """Return the run's secret: the one that is kept here or, where noise is reproducible, the seed's.

        Raises:
            InputError: it is no longer here.
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

    def world_secret(self, experiment: Experiment) -> Secret | None:
        """Return what the run's data are built with: its secret where batches or labels follow from it, else ``None``.

        Raises:
            InputError: it is no longer here, or never was: in a deployment only clients know what their labels became.
        """
        if not experiment.rests_on_secret:
            return None
        if experiment.changes_labels and self.is_deployed:
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
        append_line(self.path / "metrics.jsonl", json.dumps(record.to_json(), allow_nan=False))

    def rounds(self) -> list[RoundRecord]:
        """The complete lines of metrics.jsonl.

        Raises:
            InputError: the file is damaged.
        """
        return self._lines("metrics.jsonl", _ROUND)

    def summary(self) -> Summary | None:
        """What the run wrote about itself when it ended; ``None`` before, or if it was killed.

        Raises:
            InputError: the file is damaged. So it is of the readers that follow, which return ``None`` likewise.
        """
        return read_file(self.path / "summary.json", _SUMMARY)

    def settings_digest(self) -> str:
        """SHA-256 of what config.toml says, in hexadecimal digits, without the section [report], which may change."""
        tree = {key: value for key, value in read_toml(self.path / "config.toml").items() if key != "report"}
        return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()

    def checked_summary(self) -> Summary | None:
        """Return :meth:`summary`, whose figures are of the settings that are in the folder now.

        Raises:
            InputError: they are of others, because config.toml was edited; or the file is damaged.
        """
        summary = self.summary()
        if summary is not None and summary.settings not in ("", self.settings_digest()):
            raise InputError(
                f"{self.path / 'config.toml'} was changed after the run had ended, and its figures are of other "
                f"settings: set it as it was, or go on with what it says now: {self.to_resume}"
            )
        return summary

    def ledger(self) -> Ledger | None:
        """What is proven; ``None`` until a run ends."""
        return read_file(self.path / "ledger.json", _LEDGER)

    def partition(self) -> Partition | None:
        """Who holds what; ``None`` if the run ended before the data were shared."""
        return read_file(self.path / "partition.json", _PARTITION)

    def membership(self) -> Membership | None:
        """What an audit found; ``None`` if there was none."""
        return read_file(self.path / "membership.json", _MEMBERSHIP)

    def robustness(self) -> Robustness | None:
        """What certificates show, all together; ``None`` if none were made."""
        return read_file(self.path / "robustness.json", _ROBUSTNESS)

    def certificates(self) -> tuple[Certificate, ...]:
        """The certificate of each image; empty if none were made, or not all of their files were written.

        Raises:
            InputError: the file is damaged, or cut.
        """
        robustness = self.robustness()
        if robustness is None:
            return ()
        found = self._whole_lines(_CERTIFICATES, _CERTIFICATE)
        if len(found) != robustness.examples:
            raise InputError(
                f"{self.path / _CERTIFICATES} is damaged: it has {len(found)} lines; robustness.json is of "
                f"{robustness.examples} images"
            )
        return found

    def write_certificates(self, certificates: Sequence[Certificate]) -> None:
        """Write certificates.jsonl."""
        self.write_jsonl(_CERTIFICATES, [asdict(each) for each in certificates])

    def remove_robustness(self) -> None:
        """Remove robustness.json before other files of certificates change: it comes last, and says that all agree."""
        (self.path / "robustness.json").unlink(missing_ok=True)

    def evasion(self) -> Evasion | None:
        """What attacks on the model's inputs show, all together; ``None`` if there were none."""
        return read_file(self.path / "evasion.json", _EVASION)

    def attempts(self) -> tuple[Attempt, ...]:
        """Every attempt to change a vote; empty if there were none, or not all of their files were written.

        Raises:
            InputError: the file is damaged, or cut.
        """
        evasion = self.evasion()
        if evasion is None:
            return ()
        found = self._whole_lines(_ATTEMPTS, _ATTEMPT)
        if len(found) != evasion.attempts:
            raise InputError(
                f"{self.path / _ATTEMPTS} is damaged: it has {len(found)} lines; evasion.json is of {evasion.attempts}"
            )
        return found

    def write_evasion(self, evasion: Evasion, attempts: Sequence[Attempt]) -> None:
        """Write evasion.json and attacks.jsonl, in place of what an earlier probe found."""
        (self.path / _ATTEMPTS).parent.mkdir(exist_ok=True)
        self.remove_evasion()
        self.write_jsonl(_ATTEMPTS, [asdict(each) for each in attempts])
        self.write_json("evasion.json", evasion.model_dump(mode="json"))

    def remove_evasion(self) -> None:
        """Remove what an earlier probe found, as it was about other certificates."""
        for name in ("evasion.json", _ATTEMPTS):
            (self.path / name).unlink(missing_ok=True)

    def service(self) -> Service | None:
        """What the run's endpoint is; ``None``: there is none."""
        return read_file(self.path / "service" / "service.json", _SERVICE)

    def referee(self) -> Referee | None:
        """Accuracies of the endpoint; ``None``: there is none."""
        return read_file(self.path / "service" / "referee.json", _REFEREE)

    def answers_audit(self) -> AnswersAudit | None:
        """What an audit of the endpoint's answers found; ``None``: there was none."""
        return read_file(self.path / "service" / "audit.json", _ANSWERS_AUDIT)

    def answered(self) -> Mapping[str, int]:
        """How many answers were charged to each user; the query ledger itself says whether its chain is whole."""
        lines = (read_text(self.path / "service" / "charges.jsonl") or "").splitlines()[1:]
        return Counter(user for user in map(_charged_user, lines) if user is not None)

    def probe(self) -> Probe | None:
        """What attacks on the finished model and its answers found; ``None`` if there were none."""
        return read_file(self.path / "probe.json", _PROBE)

    def write_probe(self, probe: Probe, pictures: Mapping[str, bytes]) -> None:
        """Write probe.json and probe/*.png, in place of what an earlier probe found."""
        folder = self.path / "probe"
        folder.mkdir(exist_ok=True)
        for old in sorted(folder.glob("*.png")):
            if old.name not in pictures:
                old.unlink()
        for name, content in pictures.items():
            self.write_bytes(f"probe/{name}", content)
        self.write_json("probe.json", probe.model_dump(mode="json"))

    def deployed(self) -> Deployed | None:
        """Which of Flower's runs it was; ``None``: it was no deployment's."""
        return read_file(self.path / DEPLOYMENT, _DEPLOYED)

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json."""
        self.write_json("summary.json", summary.to_json())

    def scores(self) -> tuple[Score, ...]:
        """The lines of scores.jsonl, for every reconstruction and guess so far."""
        return self._whole_lines(_SCORES, _SCORE)

    def write_scores(self, scores: Sequence[Score]) -> None:
        """Write scores.jsonl."""
        self.write_jsonl(_SCORES, [score.to_json() for score in scores])

    def final_summary(self) -> Summary:
        """The summary of a run that has ended.

        Raises:
            InputError: it has not, or its settings were changed since, or the file is damaged.
        """
        return self._needed("summary.json", self.checked_summary())

    def final_ledger(self) -> Ledger:
        """The ledger of a run that has ended; errors are those of :meth:`final_summary`."""
        return self._needed("ledger.json", self.ledger())

    def _needed(self, name: str, record: T | None) -> T:
        if record is None:
            raise InputError(f"{self.path} has no {name}: finish the run with {self.to_resume}")
        return record

    def _whole_lines(self, name: str, kind: TypeAdapter[T]) -> tuple[T, ...]:
        """Read all lines of a file of JSON objects that appeared whole."""
        path = self.path / name
        lines = enumerate((read_text(path) or "").splitlines(), 1)
        return tuple(parse_json(line, kind, f"{path}, line {number}") for number, line in lines)

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


def _charged_user(line: str) -> str | None:
    """Who a line of the query ledger charges; ``None``: it was cut off, and the next one stands for it."""
    try:
        return str(json.loads(line)["user"])
    except (ValueError, TypeError, KeyError):
        return None
