"""Findings: kinds of results about a run; report.py in a capability's folder registers its own."""

import io
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.figure import Figure, Interval, in_words
from fedpriv.core.reading import FileRecord, GrowingRecord
from fedpriv.core.records import Guarantee, Ledger, Partition, RoundRecord, Summary
from fedpriv.core.registry import FINDINGS

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.core.runs import RunFolder
    from fedpriv.core.world import World

R = TypeVar("R")
S = TypeVar("S", bound=FileRecord)


@dataclass(frozen=True)
class Picture:
    """A PNG file as it lies in the folder, and its size in pixels."""

    png: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Tile:
    """One key figure at the head of a report."""

    title: str  # what it is
    value: str  # the figure as printed, or what takes its place in words
    words: bool = False  # whether `value` is words rather than a figure
    of: str = ""  # what the figure is out of or measured in; may be empty
    conditions: tuple[tuple[str, str], ...] = ()  # pairs (name, text) without which the figure means nothing
    remark: str = ""  # a sentence below; may be empty
    share: float | None = None  # a part of a whole to draw as a bar, or `None`
    alarm: bool = False  # whether the figure is a leak that was seen
    place: int = 10  # tiles are shown in this order: uploads 10, model 30, proven privacy 50


@dataclass(frozen=True)
class Section:
    """A section of a report, which report.html in the finding's folder lays out."""

    anchor: str  # by which the page links to it
    title: str  # in the list of sections
    values: Mapping[str, object]  # name -> value, for report.html


@dataclass(frozen=True)
class RunView:
    """What every report of a run rests on; what the run has not yet is ``None`` or empty."""

    folder: "RunFolder"  # of the run
    experiment: Experiment  # the resolved settings
    summary: Summary | None  # `None` while the run goes on, or if it was killed
    rounds: tuple[RoundRecord, ...]  # the finished rounds, in order
    ledger: Ledger | None  # `None` until the run has one
    partition: Partition | None  # `None` if the run ended before the data were shared

    @property
    def worst(self) -> Guarantee | None:
        """What is proven about the worst client, from the ledger or else from the summary."""
        if self.ledger is not None:
            return self.ledger.worst
        return self.summary.ledger if self.summary else None


class Part(GrowingRecord):
    """One of several lines that a trial of a sweep has about the same thing; a table's columns are HEAD.KEY.FIGURE."""

    head: ClassVar[str]  # of the columns' names
    keys: ClassVar[tuple[str, ...]]  # fields that tell the lines apart
    # figure -> heading and decimals, in the comparison's table of all attacks; empty: it is not there
    titles: ClassVar[Mapping[str, tuple[str, int]]] = {}

    @property
    def place(self) -> str:
        """The head of the line's columns."""
        own = (getattr(self, key) for key in self.keys)
        return ".".join([self.head, *(f"{each:g}" if isinstance(each, float) else each for each in own)])


class Columns(GrowingRecord):
    """What a finding adds to the record of a trial; a field without a value is ``None`` or empty."""

    @property
    def alarm(self) -> str:
        """What exceeds what is claimed to be proven, in one clause; empty: nothing."""
        return ""


@dataclass(frozen=True)
class Column:
    """A column of tables over trials."""

    heading: str  # in the terminal
    title: str  # in the report of a comparison
    kind: str  # percent, decimal or figure
    values: tuple[Interval | None, ...]  # one for each trial; `None`: it has none
    texts: tuple[str, ...]  # what the terminal shows of each trial
    alarms: tuple[bool, ...] = ()  # for each trial whether the figure refutes a claim; empty: none can
    largest: bool = False  # whether the largest value stands for trials that differ in their seed only; else their mean
    most: float = math.inf  # the largest value that there can be
    meaning: tuple[str, str] = ("", "")  # term and text, for readers; empty: it needs none
    axis: str = ""  # the title of its axis in a plot against accuracy; empty: it is not plotted
    guess: float | None = None  # what a guess achieves; `None`: not known
    name: str = ""  # of that plot

    @staticmethod
    def of_shares(
        heading: str,
        title: str,
        values: Sequence[Interval | None],
        meaning: tuple[str, str] = ("", ""),
        alarms: tuple[bool, ...] = (),
    ) -> "Column":
        """Return a column of percentages."""
        texts = tuple("" if share is None else f"{share.value:.1%}" for share in values)
        return Column(heading, title, "percent", tuple(values), texts, alarms, most=1.0, meaning=meaning)

    def alarm(self, trial: int) -> bool:
        """Whether the figure of one trial refutes a claim."""
        return bool(self.alarms) and self.alarms[trial]


class Finding(ABC, Generic[R]):
    """One kind of result about a run."""

    name: ClassVar[str]  # of the kind
    rank: ClassVar[int]  # reports, tables and sentences are in the order of these numbers
    # whether its sentences come before those about uploads; else they come after what is proven
    leads: ClassVar[bool] = False
    # the heading over a measurement that exceeds what is claimed to be proven
    refuted: ClassVar[str] = "The ledger is refuted"
    columns: ClassVar[type[Columns] | None] = None  # what it adds to the record of a trial in a sweep; `None`: nothing
    files: ClassVar[tuple[str, ...]] = ()  # of a run's folder that it is read from and the summary does not repeat
    # of a run's folder into which only commands write that have it for themselves
    folders: ClassVar[tuple[str, ...]] = ()
    # what the section `[audit]` of a sweep says for `audit_trial`; `None`: it audits no trials
    audit: ClassVar[type[BaseModel] | None] = None

    @abstractmethod
    def read(self, folder: "RunFolder") -> R | None:
        """Return what a run folder holds of it; ``None``: nothing."""

    def section(self, found: R, view: RunView) -> Section | None:
        """Return its section of the report; ``None``: its sentences say all."""
        return None

    def conclude(self, world: "World", folder: "RunFolder") -> None:
        """Measure and write, when a run ends, what needs the data of all clients.

        What it raises ends the run before its summary: mend it, and ``fedpriv run --resume DIR`` trains no round again.
        """

    def asked_of_trials(self, experiment: Experiment) -> Mapping[str, str]:
        """Return what settings ask for of a trial's finished model, for people -> the key in sweep.json."""
        return {}

    def check_trial(self, experiment: Experiment, world: "World") -> None:
        """Refuse, before a sweep starts, a trial whose finished model could not be measured on this data."""

    def measure_trial(self, folder: "RunFolder") -> None:
        """Measure the finished model of a sweep's trial, as its settings ask; refuted claims are a result."""

    def audit_trial(self, folder: "RunFolder", settings: Any) -> None:
        """Audit the finished model of a sweep's trial; errors are those of :meth:`measure_trial`."""

    def records(self, found: R) -> dict[str, GrowingRecord]:
        """Return what summary.json repeats, by key."""
        return {}

    def figures(self, found: R) -> tuple[Figure, ...]:
        """Return what was measured, each between a guess and what is proven."""
        return ()

    def alarms(self, found: R) -> tuple[str, ...]:
        """Return one clause for each measurement that exceeds what is claimed to be proven."""
        return tuple(figure.refutation for figure in self.figures(found) if figure.exceeded)

    def tested(self, found: R) -> int | None:
        """Return how many test examples the accuracy is of, where these are not all; ``None``: they are."""
        return None

    def sentences(self, found: R) -> tuple[str, ...]:
        """Return what the verdict says of it."""
        return ()

    def facts(self, found: R) -> Sequence[tuple[str, str]]:
        """Return what its section and the command that finds it list, as terms with their text."""
        return in_words(self.figures(found))

    def tiles(self, found: R | None, view: RunView) -> tuple[Tile, ...]:
        """Return its key figures; ``None``: the run has nothing of it yet."""
        return ()

    def trial(self, found: R) -> Mapping[str, Any]:
        """Return what it adds to the record of a trial: a value for each field of ``columns`` that is known."""
        return {}

    def choose(self, trials: Sequence[Any], asked: str = "") -> str:
        """Return the attack that tables show, the same for all trials; empty: there is none."""
        return ""

    def table(self, trials: Sequence[Any], chosen: str) -> tuple[Column, ...]:
        """Return the columns of tables over trials; ``chosen`` is of :meth:`choose`."""
        return ()


class RecordFinding(Finding[S]):
    """A finding that is one record in one file, and that summary.json repeats under its name."""

    record: ClassVar[type[Any]]  # its type

    def read(self, folder: "RunFolder") -> S | None:
        """Return the record; ``None``: there is none."""
        return folder.read(self.record)

    def records(self, found: S) -> dict[str, GrowingRecord]:
        """Return the record under the finding's name."""
        return {self.name: found}


@dataclass(frozen=True)
class Found:
    """A finding, and what a run has of it."""

    finding: Finding[Any]
    result: Any


def findings() -> list[Finding[Any]]:
    """Return all kinds of findings, by rank."""
    every: list[Finding[Any]] = [kind() for kind in FINDINGS.values()]
    return sorted(every, key=lambda finding: finding.rank)


def all_found(folder: "RunFolder") -> list[Found]:
    """Return everything that was found of a run."""
    return [Found(finding, result) for finding in findings() if (result := finding.read(folder)) is not None]


def records_found(folder: "RunFolder") -> dict[str, GrowingRecord]:
    """Return what summary.json repeats of everything that was found, by key."""
    return {key: record for each in all_found(folder) for key, record in each.finding.records(each.result).items()}


def chosen_attack(strengths: Sequence[Mapping[str, float]], what: str, asked: str = "") -> str:
    """Return the attack that tables show for all trials: the given one, else the strongest on average."""
    known: dict[str, list[float]] = {}
    for own in strengths:
        for name, strength in own.items():
            known.setdefault(name, []).append(strength)
    if asked and asked not in known:
        raise InputError(f"no trial has a {what} {asked!r}; there are: {', '.join(known) or 'none'}")
    return asked or max(known, key=lambda name: (len(known[name]), statistics.fmean(known[name])), default="")


def read_picture(path: Path) -> Picture:
    """Return a PNG file."""
    png = path.read_bytes()
    from PIL import Image, UnidentifiedImageError  # here, because every command reads this file

    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            image.load()
            return Picture(png, image.width, image.height)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise InputError(f"{path} is damaged: not a PNG picture: {error}") from None


def png(image: "Tensor") -> bytes:
    """Return an image (C, H, W) on [0, 1] as PNG; channels that are no colours are tiles, in grey."""
    from PIL import Image

    shown = image if len(image) in (1, 3) else _side_by_side(image)
    pixels = (shown.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _side_by_side(image: "Tensor") -> "Tensor":
    """Channels (C, H, W) as tiles (1, rows * H, columns * W), black where none is left; those of signals in rows."""
    channels, height, width = image.shape
    columns = 1 if height == 1 else math.ceil(math.sqrt(channels))
    rows = -(-channels // columns)
    grid = image.new_zeros(rows * columns, height, width)
    grid[:channels] = image
    return grid.view(rows, columns, height, width).transpose(1, 2).reshape(1, rows * height, columns * width)
