"""What the report shows, read from the folder of a run: the only place in this room that touches files of the folder.

Every file but config.toml may be missing, since a run can end at any moment; what is missing is ``None`` or empty here.
A file that is there and damaged is refused: a report never guesses.
"""

import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from PIL import Image, UnidentifiedImageError
from pydantic import ConfigDict, TypeAdapter

from fedpriv.budget import Stop
from fedpriv.config import Experiment, load_run
from fedpriv.errors import InputError
from fedpriv.runs import FINITE, RoundRecord, RunFolder, parse_json

__all__ = [
    "AttackResult",
    "Candidate",
    "Curve",
    "EpsilonBound",
    "Ledger",
    "LedgerLine",
    "Membership",
    "MembershipAttack",
    "Partition",
    "Picture",
    "Score",
    "Summary",
    "ThreatModel",
    "Victim",
    "View",
    "load_view",
]

T = TypeVar("T")


@dataclass(frozen=True)
class LedgerLine:
    """What is proven about one client; ``None`` for a figure means that no finite one is proven.

    ``theorem`` maps the name of a figure (nominal_epsilon, pure_epsilon, epsilon) to the theorem it rests on.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE

    adjacency: str
    sampling: str
    participations: int
    delta: float
    nominal_epsilon: float | None = None
    pure_epsilon: float | None = None
    epsilon: float | None = None
    theorem: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    client: int | None = None
    examples: int | None = None
    noise: float | None = None


@dataclass(frozen=True)
class Ledger:
    """ledger.json: one line a client, the worst first."""

    unit: str
    mechanism: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    clients: tuple[LedgerLine, ...] = ()
    worst: LedgerLine | None = None


@dataclass(frozen=True)
class Partition:
    """partition.json: ``clients[c][k]`` is the number of examples of class k that client c holds."""

    clients: tuple[tuple[int, ...], ...]
    class_names: tuple[str, ...]
    partition: str = ""


@dataclass(frozen=True)
class Score:
    """One line of scores.jsonl: a reconstruction against the original, or a guess that never saw the upload.

    Attributes:
        image: number of the image within the batch that was attacked.
        chosen: whether the attack, by its own loss, kept this restart.
        mse: mean squared error on the [0, 1] scale; ``mse_normalised`` the same on the network's input scale.
        psnr: in decibels; ``None`` where it is not finite.
        note: what the attack said about its result; may be empty.
        clients: how many clients' uploads were added up in the attacked one.
        rank: the original's place among ``candidates`` images by distance to this picture; 1: picked out.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE

    round: int
    client: int
    attack: str
    upload: str
    image: int = 0
    restart: int | None = None
    chosen: bool = True
    label: int | None = None
    true_label: int | None = None
    label_correct: bool | None = None
    mse: float | None = None
    mse_normalised: float | None = None
    psnr: float | None = None
    ssim: float | None = None
    lpips: float | None = None
    recovered: bool = False
    note: str = ""
    clients: int = 1
    rank: int | None = None
    candidates: int | None = None


@dataclass(frozen=True)
class Picture:
    """A PNG file as it lies in the folder, and its size in pixels."""

    png: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Candidate:
    """One attempt at a victim's image: by which attack, from which upload (protected, unprotected, none), how good."""

    attack: str
    upload: str
    score: Score | None
    picture: Picture | None


@dataclass(frozen=True)
class Victim:
    """One attacked image: the original, what each attack made of the upload, and last the best guess without it."""

    round: int
    client: int
    image: int
    original: Picture | None
    true_label: int | None
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class AttackResult:
    """One attack (or guess) on one kind of upload over all its victims: counts, medians, and their intervals.

    ``intervals`` has the low and high end by the figure's name; ``missing`` are images that only others were tried on;
    ``active`` ones are of a server that sent parameters of its own making.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE

    attack: str
    upload: str
    victims: int
    recovered: int
    success_ssim: float | None = None
    mse: float | None = None
    mse_normalised: float | None = None
    psnr: float | None = None
    ssim: float | None = None
    lpips: float | None = None
    lpips_reason: str | None = None
    label_accuracy: float | None = None
    missing: int = 0
    identified: int | None = None
    candidates: int | None = None
    active: bool = False
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    confidence: float = 0.95


@dataclass(frozen=True)
class Curve:
    """Points of a receiver operating characteristic, for logarithmic axes, both rates ascending."""

    false_positive_rate: tuple[float, ...] = ()
    true_positive_rate: tuple[float, ...] = ()


@dataclass(frozen=True)
class MembershipAttack:
    """How well one attack tells members of the training data from others; see membership.json."""

    __pydantic_config__: ClassVar[ConfigDict] = FINITE

    attack: str
    members: int
    non_members: int
    auc: float
    tpr_at_1_percent: float
    tpr_at_01_percent: float
    advantage: float
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    curve: Curve = field(default_factory=Curve)


@dataclass(frozen=True)
class EpsilonBound:
    """What an attack shows: epsilon is at least this, at ``delta`` and with this confidence."""

    __pydantic_config__: ClassVar[ConfigDict] = FINITE

    epsilon: float
    delta: float
    confidence: float
    trials: int
    method: str = ""


@dataclass(frozen=True)
class Membership:
    """membership.json: what an audit of the run found.

    Attributes:
        attacks: in the audit's order.
        epsilon_bound: the empirical lower bound on epsilon.
        references: models that were trained for it.
        proven_epsilon: what the ledger claims under the bound's adjacency; ``None`` where it claims nothing comparable.
        proven_adjacency: the ledger's.
        game: how members and non-members were drawn.
        rounds: after which the adversary knew the model.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FINITE

    attacks: tuple[MembershipAttack, ...]
    epsilon_bound: EpsilonBound
    references: int
    proven_epsilon: float | None = None
    proven_adjacency: str | None = None
    game: str = ""
    rounds: tuple[int, ...] = ()

    @property
    def refutes(self) -> bool:
        """Whether more is shown than the ledger allows."""
        return self.proven_epsilon is not None and self.epsilon_bound.epsilon > self.proven_epsilon

    @property
    def strongest(self) -> MembershipAttack | None:
        """The attack with the largest area under the curve."""
        return max(self.attacks, key=lambda one: one.auc, default=None)


@dataclass(frozen=True)
class ThreatModel:
    """Who listens, what reaches them, what they know besides, what they never get, and whether they interfere."""

    name: str
    listener: str = ""
    sees: tuple[str, ...] = ()
    knows: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    conduct: str = ""


@dataclass(frozen=True)
class Summary:
    """summary.json."""

    __pydantic_config__: ClassVar[ConfigDict] = FINITE

    status: str
    name: str = ""
    reason: str | None = None
    rounds: int = 0
    test_accuracy: float | None = None
    test_loss: float | None = None
    ledger: LedgerLine | None = None
    stops: tuple[Stop, ...] = ()
    attacks: tuple[AttackResult, ...] = ()
    seconds: float | None = None
    verdict: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    threat_model: ThreatModel | None = None
    device: str = ""
    engine: str = ""
    command: str = ""


@dataclass(frozen=True)
class View:
    """The whole run as the report shows it.

    Attributes:
        experiment: the resolved settings.
        summary: ``None`` while the run goes on, or if it was killed.
        rounds: the finished rounds, in order.
        ledger: ``None`` until the run has one.
        partition: ``None`` if the run ended before the data were shared.
        scores: every scored restart and guess.
        victims: the first ``report.pictures`` attacked images.
        attacked: how many attacked images there are in all.
        command: what repeats the run; empty if unknown.
        membership: what an audit found; ``None`` if there was none.
    """

    experiment: Experiment
    summary: Summary | None
    rounds: tuple[RoundRecord, ...]
    ledger: Ledger | None
    partition: Partition | None
    scores: tuple[Score, ...]
    victims: tuple[Victim, ...]
    attacked: int
    command: str
    membership: Membership | None = None


_LEDGER, _PARTITION, _SUMMARY = TypeAdapter(Ledger), TypeAdapter(Partition), TypeAdapter(Summary)
_SCORE, _MEMBERSHIP = TypeAdapter(Score), TypeAdapter(Membership)


def load_view(folder: Path) -> View:
    """Read the folder of a run.

    Raises:
        InputError: it is not the folder of a run, or one of its files is damaged.
    """
    config = folder / "config.toml"
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not config.is_file():
        raise InputError(f"{folder} is not the folder of a run: it has no config.toml")
    experiment = load_run(folder)
    summary = _read(folder / "summary.json", _SUMMARY)
    scores = _read_lines(folder / "reconstructions" / "scores.jsonl", _SCORE)
    pictures = _list_pictures(folder / "reconstructions")
    keys = _victim_keys(scores, pictures)
    shown = keys[: experiment.report.pictures]
    return View(
        experiment=experiment,
        summary=summary,
        rounds=tuple(RunFolder(folder).rounds()),
        ledger=_read(folder / "ledger.json", _LEDGER),
        partition=_checked(folder / "partition.json"),
        scores=scores,
        victims=tuple(_victim(key, scores, pictures, experiment.adversary.attacks) for key in shown),
        attacked=len(keys),
        command=(summary.command if summary else "") or _read_text(folder / "command.txt").strip(),
        membership=_read(folder / "membership.json", _MEMBERSHIP),
    )


def _read_text(path: Path) -> str:
    """The text of a file, empty if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def _read(path: Path, kind: TypeAdapter[T]) -> T | None:
    if not path.exists():
        return None
    return parse_json(_read_text(path), kind, str(path))


def _read_lines(path: Path, kind: TypeAdapter[T]) -> tuple[T, ...]:
    """Read one object a line."""
    lines = enumerate(_read_text(path).splitlines(), 1)
    return tuple(parse_json(line, kind, f"{path}, line {number}") for number, line in lines)


def _checked(path: Path) -> Partition | None:
    partition = _read(path, _PARTITION)
    if partition is None:
        return None
    classes = len(partition.class_names)
    if not partition.clients or any(len(counts) != classes for counts in partition.clients):
        raise InputError(f"{path} is damaged: every client needs one count for each of the {classes} classes")
    return partition


# Pictures: <round>-<client>-<what>.png or <round>-<client>-<what>-<image>.png, and guess-mean.png for all.

_NAME = re.compile(r"(?P<round>\d+)-(?P<client>\d+)-(?P<what>.+?)(?:-(?P<image>\d+))?\.png")
_COMMON_GUESSES = ("guess-mean", "guess-grey")

_Key = tuple[int, int, int]  # round, client, image
_Files = dict[tuple[int, int, str, int | None], Path]


@dataclass(frozen=True)
class _Pictures:
    files: _Files
    common: Mapping[str, Path]

    def find(self, key: _Key, what: str) -> Path | None:
        """The picture of one image, or the only one of its upload, or the one for all uploads."""
        number, client, image = key
        own = self.files.get((number, client, what, image)) or self.files.get((number, client, what, None))
        return own or self.common.get(what)


def _list_pictures(folder: Path) -> _Pictures:
    files: _Files = {}
    for path in sorted(folder.glob("*.png")):
        parts = _NAME.fullmatch(path.name)
        if parts:
            image = None if parts["image"] is None else int(parts["image"])
            files[int(parts["round"]), int(parts["client"]), parts["what"], image] = path
    common = {what: folder / f"{what}.png" for what in _COMMON_GUESSES if (folder / f"{what}.png").is_file()}
    return _Pictures(files, common)


def _victim_keys(scores: Iterable[Score], pictures: _Pictures) -> list[_Key]:
    scored = {(score.round, score.client, score.image) for score in scores}
    known = {key[:2] for key in scored}
    # An upload whose attack was never scored still has its originals.
    originals = [(n, c, image or 0) for n, c, what, image in pictures.files if what == "original"]
    pictured = {key for key in originals if key[:2] not in known}
    return sorted(scored | pictured)


def _victim(key: _Key, scores: Iterable[Score], pictures: _Pictures, attacks: tuple[str, ...]) -> Victim:
    mine = [score for score in scores if (score.round, score.client, score.image) == key and score.chosen]
    labels = [score.true_label for score in mine if score.true_label is not None]
    scored = {(score.attack, score.upload): score for score in mine}
    possible = [(attack, upload) for attack in attacks for upload in ("unprotected", "protected")]
    possible += [(guess, "none") for guess in _COMMON_GUESSES]
    pictured = [pair for pair in possible if pictures.find(key, _stem(*pair))]
    tried = sorted(dict.fromkeys([*scored, *pictured]), key=lambda pair: _rank(pair, attacks))
    candidates = [_candidate(pair, key, scored.get(pair), pictures) for pair in tried]
    guesses = [candidate for candidate in candidates if candidate.upload == "none" and candidate.picture]
    return Victim(
        round=key[0],
        client=key[1],
        image=key[2],
        original=_load_picture(pictures.find(key, "original")),
        true_label=labels[0] if labels else None,
        candidates=(*(one for one in candidates if one.upload != "none"), *sorted(guesses, key=_error)[:1]),
    )


def _rank(pair: tuple[str, str], attacks: tuple[str, ...]) -> tuple[int, int, str]:
    """Unprotected before protected before guesses; within these the order of the settings."""
    attack, upload = pair
    stage = {"unprotected": 0, "protected": 1}.get(upload, 2)
    order = (*attacks, *_COMMON_GUESSES)
    return stage, order.index(attack) if attack in order else len(order), attack


def _error(candidate: Candidate) -> float:
    if candidate.score is None or candidate.score.mse is None:
        return math.inf
    return candidate.score.mse


def _candidate(pair: tuple[str, str], key: _Key, score: Score | None, pictures: _Pictures) -> Candidate:
    attack, upload = pair
    return Candidate(attack, upload, score, _load_picture(pictures.find(key, _stem(attack, upload))))


def _stem(attack: str, upload: str) -> str:
    """What the name of the picture says."""
    return attack if upload == "none" else f"{attack}-{upload}"


def _load_picture(path: Path | None) -> Picture | None:
    if path is None:
        return None
    png = path.read_bytes()
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            image.load()
            return Picture(png, image.width, image.height)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise InputError(f"{path} is damaged: not a PNG picture: {error}") from None
