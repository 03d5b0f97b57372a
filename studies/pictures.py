"""The pictures of docs: ``python -m studies.pictures docs/images --run runs/screenshot``.

Curves come from the ledger and from figures in docs/results, reconstructions from the folder of a run of
configs/quickstart.toml.
"""

import csv
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from fedpriv.accounting import ceilings, guarantee, release_with
from fedpriv.accounting.release import Release
from fedpriv.core.names import SamplingName
from fedpriv.core.report.drawing import LIGHT, Theme, dress, to_svg
from studies.arguments import StudyParser

RESULTS = Path(__file__).parents[1] / "docs" / "results"
COLOURS, MARKERS = ("#0072B2", "#D55E00", "#009E73"), ("o", "s", "^")
STEPS = np.unique(np.geomspace(1, 10_000, 13).astype(int)).tolist()


def main() -> None:
    """Draw all pictures, the reconstructions only with a run."""
    parser = StudyParser("studies.pictures", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--run", type=Path, metavar="DIR")
    with parser.parsed() as asked:
        for name, build in {"steps": steps, "certified": certified}.items():
            drawn = build()
            (asked.folder / f"{name}.svg").write_bytes(to_svg(partial(_given, drawn), LIGHT, transparent=False)[0])
        if asked.run:
            reconstructions(asked.run / "reconstructions").save(asked.folder / "reconstructions.png", optimize=True)


def _given(drawing: Figure, _: Theme) -> Figure:
    return drawing


def steps() -> Figure:
    """Epsilon, and the ceiling of picking one of 100, over steps: Gaussian noise, sigma 1, batches of 1 %."""
    drawing, (left, right) = _axes("ε at δ = 1e-5", "ceiling of picking 1 of 100, %")
    kinds: Mapping[str, SamplingName] = {"Poisson batches": "poisson", "fixed-size batches": "fixed"}
    for number, (name, sampling) in enumerate(kinds.items()):
        releases = [_release(sampling, count) for count in STEPS]
        _line(left, number, name, STEPS, [guarantee(each).epsilon for each in releases])
        _line(right, number, name, STEPS, [100 * (ceilings(each, [0.01])[0].gamma or 1) for each in releases])
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks([1, 10, 100, 1_000, 10_000], ["1", "10", "100", "1,000", "10,000"])
        axes.set_xlabel("steps", color=LIGHT.muted)
        axes.legend(frameon=False, labelcolor=LIGHT.text)
    left.set_yscale("log")
    left.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    left.minorticks_off()
    return drawing


def _release(sampling: SamplingName, count: int) -> Release:
    return release_with(1.0, 1e-5, mechanism="gaussian", sampling=sampling, rate=0.01, participations=count)


def certified() -> Figure:
    """What attacks leave right and what is proven, over the size of the change."""
    rows = _rows("robustness-attacks")
    drawing, (left, right) = _axes("images right, %", "images right, %")
    _, *sizes = rows[0]
    for number, row in enumerate(rows[1:]):
        for axes, part in ((left, slice(0, 4)), (right, slice(4, 8))):
            places = [float(size.split()[-1]) for size in sizes[part]]
            _line(axes, number, row[0], places, [float(cell.rstrip(" %")) for cell in row[1:][part]])
    left.set_xlabel("Euclidean size of the change", color=LIGHT.muted)
    right.set_xlabel("largest change of a pixel", color=LIGHT.muted)
    right.legend(frameon=False, labelcolor=LIGHT.text)
    return drawing


def reconstructions(folder: Path) -> Image.Image:
    """A row of originals, of what ``map`` makes of the unprotected uploads, and of what it makes of the protected."""
    kinds = ("original", "map-unprotected", "map-protected")
    rows = [[Image.open(path) for path in sorted(folder.glob(f"*-{kind}.png"))] for kind in kinds]
    side, gap = 96, 8
    sheet = Image.new("L", (len(rows[0]) * (side + gap) - gap, len(rows) * (side + gap) - gap), 255)
    for down, row in enumerate(rows):
        for across, picture in enumerate(row):
            large = picture.convert("L").resize((side, side), Image.Resampling.NEAREST)
            sheet.paste(large, (across * (side + gap), down * (side + gap)))
    return sheet


def _axes(*titles: str) -> tuple[Figure, Sequence[Axes]]:
    drawing = Figure(figsize=(8.5, 3.4), layout="constrained", facecolor="white")
    found = drawing.subplots(1, len(titles))
    for axes, title in zip(found, titles, strict=True):
        dress(axes, LIGHT)
        axes.grid(color=LIGHT.grid, linewidth=0.8)
        axes.set_title(title, fontsize=10)
    return drawing, found


def _line(axes: Axes, number: int, name: str, places: Sequence[float], values: Sequence[float | None]) -> None:
    axes.plot(places, values, color=COLOURS[number], marker=MARKERS[number], markersize=4, linewidth=1.2, label=name)  # type: ignore[arg-type]  # matplotlib draws None as a gap


def _rows(name: str) -> list[list[str]]:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


if __name__ == "__main__":
    main()
