"""The plot of ``fedpriv account compare``, in Okabe and Ito's colours (2008); lines differ in dashes and marks, too."""

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from fedpriv.accounting import Comparison
from fedpriv.core.files import write_whole, writing_to

_LINES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "linestyle": "-", "marker": "o", "markersize": 5},
    {"color": "#D55E00", "linestyle": "--", "marker": "s", "markersize": 4},
    {"color": "#009E73", "linestyle": ":", "marker": "o", "markersize": 10},
    {"color": "#CC79A7", "linestyle": "-.", "marker": "D", "markersize": 5},
    {"color": "#E69F00", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "^", "markersize": 6},
)
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fedpriv",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draw noise-to-signal ratios over proven epsilons, both logarithmic, to a .png or .svg file."""
    with matplotlib.rc_context(_STYLE):
        drawing = Figure(figsize=(7.0, 4.6), layout="constrained")
        axes = drawing.subplots()
        axes.axhline(1, color="#5a6169", linewidth=1)
        for (contender, points), line in zip(comparison.curves, _LINES, strict=False):
            known = [(point.epsilon, point.ratio) for point in points if point.ratio is not None]
            epsilons, ratios = [epsilon for epsilon, _ in known], [ratio for _, ratio in known]
            axes.plot(epsilons, ratios, label=contender.label, linewidth=1.8, markerfacecolor="none", **line)
        for scale, axis in ((axes.set_xscale, axes.xaxis), (axes.set_yscale, axes.yaxis)):
            scale("log")
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"proven ε of the whole run at δ = {comparison.delta:g}, replace-one")
        axes.set_ylabel("noise over signal in the mean gradient")
        axes.set_title(_title(comparison), fontsize=10, loc="left")
        axes.grid(color="#e3e5e7", linewidth=0.8)
        axes.legend(frameon=False)
        kind, content = path.suffix.lower()[1:], io.BytesIO()
        drawing.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    with writing_to(f"--plot {path}:"):
        write_whole(path, content.getvalue())


def _title(comparison: Comparison) -> str:
    sampling = "no sampling" if comparison.rate is None else f"sampled, rate {comparison.rate:g}"
    return (
        f"{comparison.batch_size:,} gradients of {comparison.dimension:,} numbers, {comparison.participations:,} "
        f"participations, {sampling}"
    )
