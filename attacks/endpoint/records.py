"""probe.json: what attacks on the finished model and on its answers found."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from fedpriv.attacks.probing import ProbeResult
from fedpriv.core.figure import Figure
from fedpriv.core.records.reading import FileRecord
from fedpriv.core.runs import RunFolder


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
