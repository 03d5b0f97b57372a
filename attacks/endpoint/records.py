"""probe.json: what attacks on the finished model and on its answers found."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fedpriv.core.figure import CurvePoint, Figure
from fedpriv.core.records.reading import FileRecord, Record
from fedpriv.core.runs import RunFolder


@dataclass(frozen=True)
class Inverted(Record):
    """What an attack says one class looks like."""

    label: int  # the class; nobody is named
    picture: str  # its file in probe/
    confidence: float  # of the attacked model in the label
    rank: int  # the label's place among all classes, by likeness to pictures that nobody trained with; 1: told
    psnr: float  # to the mean of the class's training pictures, in dB


@dataclass(frozen=True)
class Shown(Record):
    """A picture that an attack is about: its file in probe/, what kind it is, and of what."""

    picture: str
    kind: str
    words: str


@dataclass(frozen=True)
class ProbeResult(Record):
    """One attack in one variant."""

    attack: str  # its name in the table
    variant: str  # what tells it from its others; may be empty
    surface: str  # what it needs of the threat model, in words
    queries: int  # images that the endpoint answered
    figures: tuple[Figure, ...]  # between guess and ceiling, the one that headlines are about first
    curve: tuple[CurvePoint, ...] = ()  # of the first figure against questions; may be empty
    inverted: tuple[Inverted, ...] = ()  # the classes, for attacks that make pictures
    guess_picture: str = ""  # the file of what a guess offers for every class; empty where there are no pictures
    sentences: tuple[str, ...] = ()  # what it means
    shown: tuple[Shown, ...] = ()  # further pictures; may be empty


class Probe(FileRecord):
    """probe.json."""

    path: ClassVar[str] = "probe.json"

    adversary: str  # who attacks, a row of the threat models
    answers: str  # the policy of the endpoint, in its short form
    heuristic: bool  # whether nothing is proven about the answers as such
    results: tuple[ProbeResult, ...]  # in the order in which they were made
    refusals: tuple[str, ...] = ()  # attacks that the threat model or the policy withholds, and why
    seconds: float  # wall time

    @property
    def bounded(self) -> bool:
        """Whether anything is proven about any of the figures."""
        return any(figure.ceiling is not None for result in self.results for figure in result.figures)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All figures, each with its attack."""
        return tuple(
            replace(figure, what=f"{result.attack}: {figure.what}")
            for result in self.results
            for figure in result.figures
        )


def write_probe(folder: RunFolder, probe: Probe, pictures: Mapping[str, bytes]) -> None:
    """Write probe.json and probe/*.png, in place of what an earlier probe found."""
    (folder.path / "probe").mkdir(exist_ok=True)
    for old in sorted((folder.path / "probe").glob("*.png")):
        if old.name not in pictures:
            old.unlink()
    for name, content in pictures.items():
        folder.write_bytes(f"probe/{name}", content)
    folder.write(probe)
