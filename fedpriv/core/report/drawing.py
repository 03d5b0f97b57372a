"""Plots as SVG, light and dark, in Okabe and Ito's colours (2008), without matplotlib's global state."""

import base64
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter
from PIL import Image

from fedpriv.core.figure import CurvePoint
from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.records import Partition, RoundRecord

PIXELS_PER_INCH = 96
_MATPLOTLIB_FONT = "font-family: 'DejaVu Sans', sans-serif"
_READERS_FONT = "font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_NO_COLOURS: Mapping[str, str] = MappingProxyType({})
# Only in styles: a class may be called #ffffff.
_COLOUR = re.compile(rb"(?P<place>(?:fill|stroke): )(?P<colour>#[0-9a-fA-F]{6})(?=[;\"])")
_PICTURE = re.compile(rb"(?<=data:image/png;base64,)\s*[A-Za-z0-9+/=]+")


@dataclass(frozen=True)
class Plot:
    """One drawing, as two SVG files of the same size, and what it says in words. Width and height are in CSS pixels."""

    light: bytes
    dark: bytes
    alt: str
    width: int
    height: int


@dataclass(frozen=True)
class Theme:
    """Colours of text and surfaces, and of lines that mean nothing else."""

    surface: str
    text: str
    muted: str
    grid: str
    line: str
    alarm: str
    full: str


LIGHT = Theme("#ffffff", "#1d2126", "#5a6169", "#e3e5e7", "#0072B2", "#B84A00", "#004F7F")
DARK = Theme("#16191d", "#e8e6e1", "#a4abb3", "#33393f", "#56B4E9", "#F0883E", "#8FD0F7")

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedpriv",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw inside, or in a function that this decorates, in the style of all plots, whatever matplotlib is set to."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A glyph that matplotlib's font lacks is set by the reader's browser.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def level(axes: Axes, value: float, name: str) -> None:
    """Draw a dotted line across, with its name above its end."""
    axes.axhline(value, color=LIGHT.muted, linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        name, (1, value), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", va="bottom", color=LIGHT.muted, fontsize=8.5,
    )  # fmt: skip


def dress(axes: Axes) -> None:
    """Give axes quiet colours."""
    axes.set_facecolor("none")
    axes.tick_params(colors=LIGHT.muted, length=3)
    for spine in axes.spines.values():
        spine.set_color(LIGHT.grid)


def panel(size: tuple[float, float], grid: Literal["both", "y"] = "both") -> tuple[Figure, Axes]:
    """Return a drawing of this size in inches, and its one pair of axes."""
    drawing = Figure(figsize=size, layout="constrained")
    axes = drawing.subplots()
    dress(axes)
    axes.grid(axis=grid, color=LIGHT.grid, linewidth=0.8)
    return drawing, axes


def plot(drawing: Figure, alt: str, colours: Mapping[str, str] = _NO_COLOURS) -> Plot:
    """Return a light drawing, and recolour it for the dark version, which takes a fiftieth of the time of another."""
    light, width, height = to_svg(drawing)
    themes = dict(zip(asdict(LIGHT).values(), asdict(DARK).values(), strict=True))
    return Plot(light, recoloured(light, {**colours, **themes}), alt, width, height)


@styled()
def to_svg(drawing: Figure, *, transparent: bool = True) -> tuple[bytes, int, int]:
    """Return a drawing as SVG, without date or other traces of the machine, and width and height in CSS pixels."""
    buffer = io.BytesIO()
    if transparent:
        for patch in (drawing.patch, *(axes.patch for axes in drawing.axes)):
            patch.set(facecolor="none", edgecolor="none")
    # Not savefig: it draws everything once more, only to let the layout settle before.
    FigureCanvasSVG(drawing).print_svg(buffer, metadata={"Date": None, "Creator": None})
    width, height = drawing.get_size_inches() * PIXELS_PER_INCH
    text = buffer.getvalue().decode().replace(_MATPLOTLIB_FONT, _READERS_FONT)
    return text.encode(), round(width), round(height)


def recoloured(svg: bytes, colours: Mapping[str, str]) -> bytes:
    """Return a drawing with other colours, those of the pixels of pictures in it included."""
    wanted = {key.lower(): value.lower() for key, value in colours.items()}

    def colour(match: re.Match[bytes]) -> bytes:
        given = match["colour"].decode().lower()
        return match["place"] + wanted.get(given, given).encode()

    def picture(match: re.Match[bytes]) -> bytes:
        return b"\n" + base64.b64encode(_recoloured_picture(base64.b64decode(match[0]), wanted))

    return _PICTURE.sub(picture, _COLOUR.sub(colour, svg))


def _recoloured_picture(png: bytes, wanted: Mapping[str, str]) -> bytes:
    """Give the pixels of a PNG other colours, ``#rrggbb`` to ``#rrggbb``, up to 1/255 in each channel."""
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.array(image.convert("RGBA"))
    colours, places = np.unique(pixels[..., :3].reshape(-1, 3), axis=0, return_inverse=True)
    distances = ((colours[:, None].astype(int) - _channels(wanted.keys())[None]) ** 2).sum(axis=2)  # (colours, keys)
    known = distances.min(axis=1, keepdims=True) <= 3
    others = np.where(known, _channels(wanted.values())[distances.argmin(axis=1)], colours)
    pixels[..., :3] = others[places.reshape(pixels.shape[:2])]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    return buffer.getvalue()


def _channels(colours: Iterable[str]) -> np.ndarray:
    """Red, green and blue of colours as ``#rrggbb``: a (colours, 3) array of integers from 0 to 255."""
    return np.array([list(bytes.fromhex(colour[1:])) for colour in colours])


_LONGEST = 16
_DRAWN = 1000  # clients that a drawing has columns for
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@styled()
def accuracy_plot(rounds: Sequence[RoundRecord], classes: int | None, majority: float = 0.0) -> Plot | None:
    """Draw test accuracy over rounds, with the level of blind guessing (of a majority, if there is one)."""
    points = [(record.round, record.accuracy) for record in rounds if record.accuracy is not None]
    if not points:
        return None

    drawing, axes = _curve("Test accuracy", points, rounds, percent)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylim(0, 1)
    if classes:
        guess = (1 / classes, f"guessing among {classes}")
        height, words = (majority, "the most common class") if majority else guess
        level(axes, height, words)

    return plot(drawing, f"Test accuracy over rounds: {_course(points, percent)}{_faults(rounds)}.")


@styled()
def loss_plot(rounds: Sequence[RoundRecord]) -> Plot | None:
    """Draw test loss over rounds, on a logarithmic scale if it spans more than a factor of 20."""
    points = [(record.round, record.loss) for record in rounds if record.loss is not None]
    if not points:
        return None
    values = [value for _, value in points]
    logarithmic = min(values) > 0 and max(values) > 20 * min(values)

    drawing, axes = _curve("Test loss", points, rounds, figure)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value, 2)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(min(0.0, *values), max(values) * 1.08 or 1)

    scale = ", logarithmic scale" if logarithmic else ""
    return plot(drawing, f"Test loss over rounds{scale}: {_course(points, figure)}{_faults(rounds)}.")


@styled()
def epsilon_plot(rounds: Sequence[RoundRecord], target: float | None) -> Plot | None:
    """Draw the worst client's running epsilon over rounds, with the ``target``; ``None`` where it tells nothing."""
    points = [(record.round, record.epsilon) for record in rounds if record.epsilon is not None]
    values = {value for _, value in points if value > 0}
    if not values or (len(values) == 1 and target is None):
        return None

    drawing, axes = _curve("Proven ε of the worst client", points, (), figure)
    axes.set_ylim(0, 1.12 * max(*values, target or 0.0))
    if target is not None:
        level(axes, target, f"target {figure(target)}")

    limit = f"; clients stop at {figure(target)}" if target is not None else ""
    course = _course(points, figure)
    meaning = "an upper bound as the run went on (the final figure may be lower)"
    return plot(drawing, f"Proven epsilon of the worst client, {meaning}: {course}{limit}.")


@styled()
def questions_plot(
    curves: Sequence[tuple[str, Sequence[CurvePoint]]], across: tuple[float, str] | None, measured: str, said: str
) -> Plot:
    """Draw shares against numbers of questions, on a logarithmic scale."""

    drawing, axes = panel((7.2, 4.6), "y")
    if across is not None:
        level(axes, *across)
    for number, (name, points) in enumerate(curves):
        axes.plot(
            [point.queries for point in points], [point.share for point in points], label=name,
            color=LIGHT.line if number % 2 == 0 else LIGHT.alarm, marker=_MARKERS[number % len(_MARKERS)],
            linestyle=("-", (0, (6, 2)), (0, (3, 2)), (0, (1, 1.2)))[number // 2 % 4], markersize=5,
            markerfacecolor=LIGHT.surface,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(round(value))))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("questions", color=LIGHT.muted)
    axes.set_ylabel(measured, color=LIGHT.muted)
    drawing.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8.5, labelcolor=LIGHT.text)

    courses = [
        f"{name}: " + ", ".join(f"{percent(point.share)} after {count(point.queries)}" for point in points)
        for name, points in curves
    ]
    return plot(drawing, f"{said}. {'; '.join(courses)}.")


@styled()
def partition_plot(partition: Partition) -> Plot:
    """Draw how the data are shared: a heat map of classes and the first clients, under bars of totals."""
    counts = np.array(partition.clients[:_DRAWN], dtype=np.int64)  # (clients, classes)
    clients, classes = counts.shape
    totals = counts.sum(axis=1)
    names = [name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…" for name in partition.class_names]
    named = classes <= 24
    written = clients <= 16 and classes <= 24
    width = 1.3 + min(max(0.42 * clients, 2.6), 7.4)
    heat = min(max(0.25 * classes, 1.2), 4.6) if named else 4.6

    drawing = Figure(figsize=(width, heat + 1.5), layout="constrained")
    bars, cells = drawing.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [0.8, heat]})
    dress(bars)
    dress(cells)
    bars.bar(range(clients), totals, width=0.8, color=LIGHT.line)
    bars.set_ylabel("examples", color=LIGHT.muted)
    bars.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    bars.tick_params(axis="x", length=0)
    image = cells.imshow(
        counts.T, cmap=_shades(LIGHT), vmin=0, vmax=max(int(counts.max()), 1), aspect="auto", interpolation="none"
    )
    cells.set_xlabel("client", color=LIGHT.muted)
    cells.set_ylabel("class", color=LIGHT.muted)
    cells.tick_params(length=0)
    if clients <= 24:
        cells.set_xticks(range(clients))
    else:
        cells.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    if named:
        cells.set_yticks(range(classes), names, parse_math=False)
    else:
        cells.yaxis.set_major_locator(MaxNLocator(10, integer=True))
    if written:
        _write_counts(cells, counts)
    else:
        scale = drawing.colorbar(image, ax=cells, pad=0.01, fraction=0.03, aspect=30)
        scale.set_label("examples of the class", color=LIGHT.muted)
        scale.outline.set_visible(False)
        scale.ax.tick_params(colors=LIGHT.muted, length=0)

    held = (counts > 0).sum(axis=1)
    first = f"the first {clients} of " if clients < partition.count else ""
    kinds = "" if classes == 1 else f", of {_range(held)} of the {classes} classes"
    alt = f"Who holds what: {_range(totals)} examples a client{kinds}; {first}{count(partition.count)} clients."
    return plot(drawing, alt, _dark_shades())


def _shades(theme: Theme) -> LinearSegmentedColormap:
    return LinearSegmentedColormap.from_list("share", [theme.surface, theme.line, theme.full])


@cache
def _dark_shades() -> dict[str, str]:
    """Each shade of the light heat map, as #rrggbb, and what takes its place in the dark one."""
    light, dark = _shades(LIGHT), _shades(DARK)
    pairs = zip(light(range(light.N), bytes=True), dark(range(dark.N), bytes=True), strict=True)
    return {f"#{bytes(old[:3]).hex()}": f"#{bytes(new[:3]).hex()}" for old, new in pairs}


def _write_counts(axes: Axes, counts: np.ndarray) -> None:
    most = max(int(counts.max()), 1)
    for (client, label), number in np.ndenumerate(counts):
        # Dark ink on pale cells and pale ink on dark ones, in either theme.
        ink = LIGHT.surface if number > 0.45 * most else LIGHT.text if number else LIGHT.muted
        text = count(int(number)) if number else "·"
        # Cells hold their texts: the layout need not measure them.
        axes.text(client, label, text, ha="center", va="center", fontsize=8, color=ink, in_layout=False)


def _curve(
    title: str,
    points: Sequence[tuple[int, float]],
    rounds: Sequence[RoundRecord],
    text: Callable[[float], str],
) -> tuple[Figure, Axes]:
    """A line with its last value written at its end and crosses at rounds in which clients failed."""
    drawing, axes = panel((5.0, 3.0), "y")
    numbers, values = zip(*points, strict=True)
    marker = "o" if len(points) <= 30 else ""
    axes.plot(numbers, values, color=LIGHT.line, linewidth=2, marker=marker, markersize=3.5, clip_on=False)
    failed = {record.round for record in rounds if record.failures}
    crosses = [point for point in points if point[0] in failed]
    if crosses:
        axes.plot(
            *zip(*crosses, strict=True), linestyle="", marker="x", markersize=9, markeredgewidth=2.2,
            color=LIGHT.alarm, clip_on=False, zorder=3,
        )  # fmt: skip
    axes.annotate(
        text(values[-1]), (numbers[-1], values[-1]), (8, 0), textcoords="offset points", va="center",
        color=LIGHT.text, fontweight="bold", annotation_clip=False,
    )  # fmt: skip
    axes.set_title(title, loc="left", color=LIGHT.text, fontsize=11, fontweight="bold")
    axes.set_xlabel("round", color=LIGHT.muted)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.margins(x=0.02)
    return drawing, axes


def _course(points: Sequence[tuple[int, float]], text: Callable[[float], str]) -> str:
    (first, start), (last, end) = points[0], points[-1]
    return f"{text(start)} at round {first}, {text(end)} at round {last}"


def _faults(rounds: Sequence[RoundRecord]) -> str:
    number = sum(bool(record.failures) for record in rounds)
    return f"; crosses mark {number} round{'s' if number != 1 else ''} in which clients failed" if number else ""


def _range(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return count(low) if low == high else f"{count(low)} to {count(high)}"
