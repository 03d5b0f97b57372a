"""What attacks on the finished model and its answers found: the words, the plot and the pictures of the report."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from fedpriv.records import Inverted, Probe, ProbeFigure, ProbeResult
from fedpriv.registry import PROBES
from fedpriv.report.drawing import Plot, Theme, dress, level, plot
from fedpriv.report.numbers import count, decibel, figure, percent
from fedpriv.report.view import Picture

__all__ = ["ADVERSARIES", "Gallery", "extraction_plot", "galleries", "probe_title", "probe_value"]

ADVERSARIES: Mapping[str, str] = {
    "participant": "The adversary is a client, or whoever else has the model, and may ask its endpoint, too.",
    "student-holder": "The adversary has the student and the answers that it learnt from, and never saw a vote.",
    "user": "The adversary may ask the endpoint, and has nothing else of the model.",
    "curious-endpoint": "The adversary runs the endpoint, and reads what people ask it.",
}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True)
class Gallery:
    """The inverted classes of one attack.

    Attributes:
        title: of the attack.
        guess: what a guess offers for every class; ``None``: no picture.
        shots: a picture and its class, the first so many.
        hidden: how many classes are not shown.
    """

    title: str
    guess: Picture | None
    shots: tuple[tuple[Picture | None, Inverted], ...]
    hidden: int


def probe_title(name: str) -> str:
    """Return an attack in words; its name where no package here has it."""
    return str(PROBES[name].title) if name in PROBES else name


def probe_value(shown: ProbeFigure, value: float | None, absent: str) -> str:
    """Return a number of a figure in its unit."""
    if value is None:
        return absent
    match shown.unit:
        case "share":
            return percent(value)
        case "dB":
            return decibel(value)
        case _:
            return figure(value, 3)


def galleries(probe: Probe, pictures: Mapping[str, Picture], most: int) -> list[Gallery]:
    """Return the pictures of each attack that makes some, of at most so many classes."""
    return [
        Gallery(
            f"{probe_title(result.attack)}{f', {result.variant}' if result.variant else ''}",
            pictures.get(result.guess_picture),
            tuple((pictures.get(one.picture), one) for one in result.inverted[:most]),
            max(0, len(result.inverted) - most),
        )
        for result in probe.results
        if result.inverted
    ]


def extraction_plot(probe: Probe) -> Plot | None:
    """Draw how alike copies are against the questions that they took; ``None`` where no attack made one."""
    curves = [result for result in probe.results if result.curve]
    if not curves:
        return None
    guess = next((result.figures[0].guess for result in curves), None)

    def build(theme: Theme) -> Figure:
        drawing = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = drawing.subplots()
        dress(axes, theme)
        axes.grid(axis="y", color=theme.grid, linewidth=0.8)
        if guess is not None:
            level(axes, guess, f"without a question {percent(guess)}", theme)
        for number, result in enumerate(curves):
            axes.plot(
                [point.queries for point in result.curve], [point.share for point in result.curve], label=_name(result),
                color=theme.line if number % 2 == 0 else theme.alarm, marker=_MARKERS[number % len(_MARKERS)],
                linestyle=("-", (0, (6, 2)), (0, (3, 2)), (0, (1, 1.2)))[number // 2 % 4], markersize=5,
                markerfacecolor=theme.surface,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(round(value))))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(0, 1.04)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlabel("questions", color=theme.muted)
        axes.set_ylabel("agreement on test images", color=theme.muted)
        drawing.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8.5, labelcolor=theme.text)
        return drawing

    return plot(build, _alt(curves))


def _name(result: ProbeResult) -> str:
    return f"{result.attack}: {result.variant}" if result.variant else result.attack


def _alt(curves: list[ProbeResult]) -> str:
    parts = [
        f"{_name(result)}: "
        + ", ".join(f"{percent(point.share)} after {count(point.queries)}" for point in result.curve)
        for result in curves
    ]
    return f"Share of test images for which a copy names the model's class, by questions asked. {'; '.join(parts)}."
