"""probe.json: what attacks on the finished model and its answers found, and how reports show it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.probing import Inverted, ProbeResult
from fedpriv.attacks.threat import probers
from fedpriv.core.figure import Figure
from fedpriv.core.finding import Finding, Picture, RunView, Section, read_picture
from fedpriv.core.numbers import percent
from fedpriv.core.reading import FileRecord, GrowingRecord
from fedpriv.core.registry import FINDINGS, PROBES
from fedpriv.core.runs import RunFolder

if TYPE_CHECKING:
    from fedpriv.core.report.drawing import Plot


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


@dataclass(frozen=True)
class Gallery:
    """The inverted classes of one attack."""

    title: str  # of the attack
    guess: Picture | None  # what a guess offers for every class; `None`: no picture
    shots: tuple[tuple[Picture | None, Inverted], ...]  # a picture and its class, the first so many
    hidden: int  # how many classes are not shown


def probe_title(name: str) -> str:
    """Return an attack in words; its name where no package here has it."""
    return str(PROBES[name].title) if name in PROBES else name


def _galleries(probe: Probe, pictures: Mapping[str, Picture], most: int) -> list[Gallery]:
    """Return the pictures of each attack that makes some, of at most so many classes."""
    return [
        Gallery(
            f"{probe_title(result.attack)}{f', {result.variant}' if result.variant else ''}",
            pictures.get(result.guess_picture),
            tuple((pictures.get(shown.picture), shown) for shown in result.inverted[:most]),
            max(0, len(result.inverted) - most),
        )
        for result in probe.results
        if result.inverted
    ]


def extraction_plot(probe: Probe) -> "Plot | None":
    """Draw how alike copies are against the questions that they took; ``None`` where no attack made one."""
    from fedpriv.core.report.drawing import questions_plot

    curves = [result for result in probe.results if result.curve]
    if not curves:
        return None
    guess = next((result.figures[0].guess for result in curves), None)
    across = None if guess is None else (guess, f"without a question {percent(guess)}")
    said = "Share of test images for which a copy names the model's class, by questions asked"
    drawn = [(_name(result), result.curve) for result in curves]
    return questions_plot(drawn, across, "agreement on test images", said)


def _name(result: ProbeResult) -> str:
    return f"{result.attack}: {result.variant}" if result.variant else result.attack


@dataclass(frozen=True)
class Probed:
    """What attacks found, and their pictures by the names of the files."""

    probe: Probe
    pictures: Mapping[str, Picture]


@FINDINGS.register
class ProbeFinding(Finding[Probed]):
    """What attacks on the finished model and its answers found."""

    name: ClassVar[str] = "probe"
    rank: ClassVar[int] = 70
    folders: ClassVar[tuple[str, ...]] = ("probe",)
    refuted: ClassVar[str] = "An attack exceeds what is claimed to be proven"

    @override
    def read(self, folder: RunFolder) -> Probed | None:
        probe = folder.read(Probe)
        if probe is None:
            return None
        return Probed(probe, {path.name: read_picture(path) for path in sorted((folder.path / "probe").glob("*.png"))})

    @override
    def records(self, found: Probed) -> dict[str, GrowingRecord]:
        return {self.name: found.probe}

    @override
    def figures(self, found: Probed) -> tuple[Figure, ...]:
        return found.probe.figures

    @override
    def section(self, found: Probed, view: RunView) -> Section:
        values = {
            "probe": found.probe,
            "pictures": found.pictures,
            "adversary": probers(view.experiment).get(found.probe.adversary),
            "extraction_plot": extraction_plot(found.probe),
            "galleries": _galleries(found.probe, found.pictures, view.experiment.report.pictures),
            "probe_title": probe_title,
        }
        return Section("probe", "Endpoint", values)
