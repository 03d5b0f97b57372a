"""The pictures of docs: ``python -m studies pictures docs/images [--runs runs/screenshot]``.

Curves come from the ledger and from figures in docs/results, reconstructions from the folders of three runs (make
screenshot).
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from fedpriv.accounting import ceilings, guarantee, release_with
from fedpriv.accounting.correlated import noise_factors
from fedpriv.accounting.release import Release
from fedpriv.core.names import SamplingName
from fedpriv.core.report.drawing import LIGHT, dress, to_svg
from studies.arguments import StudyParser

RESULTS = Path(__file__).parents[1] / "docs" / "results"
COLOURS, MARKERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"), ("o", "s", "^", "d", "v")
STEPS = np.unique(np.geomspace(1, 10_000, 13).astype(int)).tolist()
ALONE = (5.5, 3.4)
"""Width and height of a drawing with one pair of axes, in inches."""


def main() -> None:
    """Draw all pictures, the reconstructions only with runs."""
    parser = StudyParser("studies.pictures", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    drawings = (steps, certified, risk, balls_in_bins, correlated, erm, labels, votes, canaries, sentences, trust)
    parser.add_argument("--runs", type=Path, metavar="DIR", help="with the folders quickstart, batches and imprint")
    with parser.parsed() as asked:
        for build in drawings:
            name = build.__name__.replace("_", "-")
            (asked.folder / f"{name}.svg").write_bytes(to_svg(build(), transparent=False)[0])
        if asked.runs:
            for name, kinds in RECONSTRUCTED.items():
                pictures(asked.runs / name, kinds).save(asked.folder / f"{name}.png", optimize=True)


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


def _release(sampling: SamplingName, count: int, sigma: float = 1.0, rate: float = 0.01) -> Release:
    return release_with(sigma, 1e-5, mechanism="gaussian", sampling=sampling, rate=rate, participations=count)


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


def risk() -> Figure:
    """The ceiling over the noise, for guesses of 1 and 10 %."""
    drawing, (axes,) = _axes("ceiling of any attack, %", size=ALONE)
    sigmas = np.geomspace(0.4, 4, 10).tolist()
    for number, (name, guess) in enumerate({"one of 100": 0.01, "one of 10": 0.1}.items()):
        proven = [ceilings(_release("poisson", 1_000, sigma), [guess])[0].gamma or 1 for sigma in sigmas]
        _line(axes, number, name, sigmas, [100 * each for each in proven])
        axes.axhline(100 * guess, color=COLOURS[number], linewidth=1, linestyle=":")
    axes.annotate("a guess", (sigmas[-1], 10), (0, -4), textcoords="offset points", ha="right", va="top", fontsize=8.5)
    _logarithmic(axes, [0.5, 1, 2, 4], "sigma: the noise over the clip norm")
    return drawing


def balls_in_bins() -> Figure:
    """Epsilon over the noise for three kinds of batches: 60,000 images, 256 a batch, 5 passes."""
    drawing, (axes,) = _axes("ε at δ = 1e-5", size=ALONE)
    sigmas = np.geomspace(0.4, 4, 9).tolist()
    kinds: Mapping[str, tuple[SamplingName, int]] = {
        "shuffled": ("shuffled", 5), "Poisson": ("poisson", 1_170), "balls in bins": ("balls-in-bins", 5)
    }  # fmt: skip
    for number, (name, (sampling, uses)) in enumerate(kinds.items()):
        proven = [guarantee(_release(sampling, uses, sigma, 1 / 234)).epsilon for sigma in sigmas]
        _line(axes, number, name, sigmas, proven)
    axes.set_yscale("log")
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    _logarithmic(axes, [0.5, 1, 2, 4], "sigma: the noise over the clip norm")
    return drawing


def correlated() -> Figure:
    """The deviation of the noise in the model after each round, for the sigmas of one epsilon."""
    drawing, (axes,) = _axes("deviation of the noise in the model, in clip norms", size=ALONE)
    rounds = np.arange(1, 201)
    for number, (band, _, sigma, *_) in enumerate(_rows("correlated")[1:]):
        factors = np.zeros(len(rounds))
        factors[: int(band)] = noise_factors(int(band))
        # The draw of j rounds ago is in the model with the sum of the first j factors.
        deviations = float(sigma) * np.sqrt(np.cumsum(np.square(np.cumsum(factors))))
        _line(axes, number, f"band {band}", rounds[9::10].tolist(), deviations[9::10].tolist())
    axes.set_xlabel("rounds", color=LIGHT.muted)
    axes.legend(frameon=False, labelcolor=LIGHT.text)
    return drawing


def erm() -> Figure:
    """Accuracy over epsilon."""
    return _columns("erm", "ε", "test accuracy, %", [0.2, 0.5, 1, 2])


def labels() -> Figure:
    """Accuracy over epsilon of the labels."""
    return _columns("labels", "ε of each label", "test accuracy, %", [0.5, 1, 2])


def votes() -> Figure:
    """Answered questions over the number of teachers."""
    drawing = _columns("pate-sigma", "teachers", "answered questions", [20, 50, 100, 250], left_out="sigma")
    (axes,) = drawing.axes
    axes.set_yscale("log")
    axes.set_yticks([1, 10, 100, 1_000], ["1", "10", "100", "1,000"])
    return drawing


def _columns(name: str, across: str, up: str, ticks: Sequence[float], left_out: str = "") -> Figure:
    """Draw the columns of a table over its first one."""
    drawing, (axes,) = _axes(up, size=ALONE)
    (_, *names), *rows = _rows(name)
    for number, column in enumerate(each for each in names if each != left_out):
        cells = [row[1 + names.index(column)] for row in rows]
        heights = [float(cell.rstrip(" %").replace(",", "")) or None for cell in cells]
        _line(axes, number, column.replace("`", ""), [float(row[0]) for row in rows], heights)
    _logarithmic(axes, ticks, across)
    return drawing


def canaries() -> Figure:
    """What is proven, and what an audit shows at least."""
    drawing, (axes,) = _axes("ε: measured at least, and proven at most", size=(6.5, 2.6))
    rows = _rows("canaries")[1:]
    for number, (mechanism, batches, proven, measured, _) in enumerate(rows):
        axes.plot([float(measured), float(proven)], [-number] * 2, color=LIGHT.grid, linewidth=6, zorder=1)
        axes.plot(float(measured), -number, ">", color=COLOURS[1])
        axes.plot(float(proven), -number, "|", color=COLOURS[0], markersize=14, markeredgewidth=3)
        axes.annotate(f"{mechanism}, {batches}", (0, -number), (-6, 0), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", va="center", color=LIGHT.text, fontsize=9)  # fmt: skip
    axes.set_yticks([])
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.set_xscale("log")
    axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    return drawing


def sentences() -> Figure:
    """Words that attacks find in a sentence, over normal noise."""
    drawing, (axes,) = _axes("ROUGE-1 of one sentence", size=(6.5, 3.4))
    found: dict[str, list[tuple[float, float]]] = {}
    for noise, _, attack, rouge, *_ in _rows("text-search")[1:]:
        if noise.startswith("gaussian"):
            found.setdefault(attack, []).append((float(noise.split()[1]), float(rouge)))
        elif attack.startswith("guess: frequent"):
            axes.axhline(float(rouge), color=LIGHT.muted, linewidth=1, linestyle=":")
            axes.annotate("a guess", (1, float(rouge)), (0, 3), xycoords=("axes fraction", "data"),
                          textcoords="offset points", ha="right", color=LIGHT.muted, fontsize=8.5)  # fmt: skip
    for number, (attack, points) in enumerate(found.items()):
        _line(axes, number, attack, *zip(*points, strict=True))
    _logarithmic(axes, [0.001, 0.003, 0.01, 0.03], "sigma: the noise over the clip norm")
    axes.legend(frameon=False, labelcolor=LIGHT.text, loc="center left", bbox_to_anchor=(1, 0.5))
    return drawing


TRUST = {
    "local": ("update + noise", "sees noisy updates", LIGHT.surface),
    "distributed": ("masked update + share of the noise", "sees the noisy sum", LIGHT.surface),
    "central": ("update in the clear", "sees every update,\nadds noise to the sum", "#F6D5C3"),
}
"""What each client sends, what the server sees, and the colour of the server."""


def trust() -> Figure:
    """Clients and a server for three places of the noise."""
    drawing = Figure(figsize=(8.5, 2.9), layout="constrained", facecolor="white")
    box = {"boxstyle": "round,pad=0.4", "edgecolor": LIGHT.muted}
    for axes, (name, (sent, seen, colour)) in zip(drawing.subplots(1, len(TRUST)), TRUST.items(), strict=True):
        axes.set(xlim=(0, 3), ylim=(0, 3))
        axes.axis("off")
        axes.set_title(name, fontsize=11)
        for place in (0.5, 1.5, 2.5):
            axes.annotate("", (1.5, 2.05), (place, 0.75), arrowprops={"arrowstyle": "->", "color": LIGHT.muted})
            axes.text(place, 0.5, "client", ha="center", fontsize=9, bbox={**box, "facecolor": LIGHT.surface})
        axes.text(1.5, 2.35, f"server\n{seen}", ha="center", va="center", fontsize=9, bbox={**box, "facecolor": colour})
        axes.text(1.5, 0.1, sent, ha="center", va="top", fontsize=9, color=LIGHT.text)
    return drawing


RECONSTRUCTED = {
    "quickstart": ("original", "map-unprotected", "map-protected"),
    "batches": ("original", "closed_form-unprotected"),
    "imprint": ("original", "imprint-unprotected"),
}
"""Of each run the rows of its picture."""


def pictures(folder: Path, kinds: Sequence[str]) -> Image.Image:
    """A row for each kind, with at most 16 images."""
    paths = [sorted(folder.glob(f"reconstructions/*-{kind}*.png"))[:16] for kind in kinds]
    rows = [[Image.open(path) for path in row] for row in paths]
    side, gap = 96 if len(rows[0]) < 9 else 60, 8
    sheet = Image.new("L", (len(rows[0]) * (side + gap) - gap, len(rows) * (side + gap) - gap), 255)
    for down, row in enumerate(rows):
        for across, picture in enumerate(row):
            large = picture.convert("L").resize((side, side), Image.Resampling.NEAREST)
            sheet.paste(large, (across * (side + gap), down * (side + gap)))
    return sheet


def _axes(*titles: str, size: tuple[float, float] = (8.5, 3.4)) -> tuple[Figure, Sequence[Axes]]:
    drawing = Figure(figsize=size, layout="constrained", facecolor="white")
    found = drawing.subplots(1, len(titles), squeeze=False)[0]
    for axes, title in zip(found, titles, strict=True):
        dress(axes)
        axes.grid(color=LIGHT.grid, linewidth=0.8)
        axes.set_title(title, fontsize=10)
    return drawing, found


def _logarithmic(axes: Axes, ticks: Sequence[float], label: str) -> None:
    """Give lines over a logarithmic axis their legend, and that axis its ticks and name."""
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label, color=LIGHT.muted)
    axes.legend(frameon=False, labelcolor=LIGHT.text)


def _line(axes: Axes, number: int, name: str, places: Sequence[float], values: Sequence[float | None]) -> None:
    axes.plot(places, values, color=COLOURS[number], marker=MARKERS[number], markersize=4, linewidth=1.2, label=name)  # type: ignore[arg-type]  # matplotlib draws None as a gap


def _rows(name: str) -> list[list[str]]:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


if __name__ == "__main__":
    main()
