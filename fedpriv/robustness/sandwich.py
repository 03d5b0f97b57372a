"""The plot of what is proven, what attacks left right and what was right unattacked, against the size of the change."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.report.drawing import LIGHT, Plot, level, panel, plot, styled
from fedpriv.robustness.records import Evasion
from fedpriv.robustness.report import AXES, NORMS, Sandwich

# The extended mechanism with exact bounds is in the table only: it lies beside the classic one.
_WEAKER: tuple[tuple[str, str, Any], ...] = (
    ("renyi", "Renyi", (0, (6, 2))),
    ("analytic", "analytic Gaussian", (0, (3, 2))),
    ("classic", "classic Gaussian", (0, (1, 1.2))),
    ("paper", "the paper's rule", (0, (5, 1.5, 1, 1.5))),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@styled()
def sandwich_plot(shown: Sandwich) -> Plot:
    """Draw the shares of images against size: what is proven below, what attacks left right above."""
    end = 1.04 * max([*shown.sizes, *(radius for radii in shown.radii.values() for radius in radii)], default=1.0)

    drawing, axes = panel((7.2, 5.0), "y")
    level(axes, shown.clean, f"right unattacked {percent(shown.clean)}")
    if shown.evasion is not None and shown.radii and not shown.evasion.broken:
        _between(axes, shown, end)
    if shown.evasion is not None:
        _attacks(axes, shown, shown.evasion, end)
    if shown.radii:
        _certificates(axes, shown, end)
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel(AXES[shown.norm], color=LIGHT.muted)
    axes.set_ylabel("share of images", color=LIGHT.muted)
    drawing.legend(
        loc="outside lower left", ncols=4 if shown.evasion is not None and shown.radii else 5, frameon=False,
        fontsize=8.5, labelcolor=LIGHT.text, handlelength=2.4, columnspacing=1.4,
    )  # fmt: skip

    return plot(drawing, _alt(shown))


def _certificates(axes: Axes, shown: Sandwich, end: float) -> None:
    """Exact: a curve falls where it passes the radius of an image."""
    for bound, name, dashes in (("main", "proven (main)", "-"), *_WEAKER):
        steps = (0.0, *sorted(set(shown.radii[bound])), end)
        axes.step(
            steps, [shown.proven(size, bound) for size in steps], where="post", label=name, color=LIGHT.line,
            linestyle=dashes, linewidth=2.4 if bound == "main" else 1.2,
        )  # fmt: skip


def _attacks(axes: Axes, shown: Sandwich, evasion: Evasion, end: float) -> None:
    """A change that fits into a ball fits into all larger ones: between two sizes the figure of the smaller holds."""
    steps = (0.0, *shown.sizes, end)
    axes.step(
        steps, _least(shown, steps), where="post", label="under every attack", color=LIGHT.alarm, linewidth=2.4
    )  # fmt: skip
    for number, curve in enumerate(evasion.curves):
        axes.plot(
            shown.sizes, [share.value for share in curve.shares], label=f"under {curve.attack}",
            color=LIGHT.alarm, linewidth=1, linestyle=(0, (1, 2)), marker=_MARKERS[number % len(_MARKERS)],
            markersize=5, markerfacecolor=LIGHT.surface,
        )  # fmt: skip


def _between(axes: Axes, shown: Sandwich, end: float) -> None:
    """Shade what neither proofs nor attacks decide."""
    grid = sorted({0.0, *shown.radii["main"], *shown.sizes, end})
    axes.fill_between(
        grid, [shown.proven(size) for size in grid], _least(shown, grid), step="post", color=LIGHT.line, alpha=0.14,
        linewidth=0, label="proven ≤ truth ≤ attacked",
    )  # fmt: skip


def _least(shown: Sandwich, sizes: Sequence[float]) -> list[float]:
    """What is right at most at each size."""
    if shown.evasion is None:
        return [shown.clean] * len(sizes)
    known = [(0.0, shown.clean), *zip(shown.sizes, (each.value for each in shown.evasion.least), strict=True)]
    return [[share for at, share in known if at <= size][-1] for size in sizes]


def _alt(shown: Sandwich) -> str:
    """The figures of the two curves that matter."""
    parts = [f"unattacked {percent(shown.clean)}"]
    if shown.evasion is not None:
        parts.append(f"under every attack {_course(shown.sizes, _least(shown, shown.sizes))}")
    if shown.radii and shown.sizes:
        parts.append(f"proven {_course(shown.sizes, [shown.proven(size) for size in shown.sizes])}")
    what = f"Share of {count(shown.images)} test images that stay right, by size of the change ({NORMS[shown.norm]})"
    return f"{what}: {'; '.join(parts)}."


def _course(sizes: Sequence[float], shares: Sequence[float]) -> str:
    return ", ".join(f"{percent(share)} at {figure(size)}" for size, share in zip(sizes, shares, strict=True))
