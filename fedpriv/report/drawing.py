"""Drawing as SVG in a light and a dark version; no global state of matplotlib is touched.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision tell apart; no meaning rests on
colour alone. Text stays text, so that it is set in the reader's own system font.
"""

import io
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["DARK", "LIGHT", "Plot", "Theme", "dress", "level", "plot", "recoloured", "to_svg"]

PIXELS_PER_INCH = 96
_MATPLOTLIB_FONT = "font-family: 'DejaVu Sans', sans-serif"
_READERS_FONT = "font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


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
    """Colours of text and surfaces, and of lines that stand for nothing else."""

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


def level(axes: Axes, value: float, name: str, theme: Theme) -> None:
    """Draw a dotted line across, with its name above its end."""
    axes.axhline(value, color=theme.muted, linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        name, (1, value), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", va="bottom", color=theme.muted, fontsize=8.5,
    )  # fmt: skip


def dress(axes: Axes, theme: Theme) -> None:
    """Give axes the theme's quiet colours."""
    axes.set_facecolor("none")
    axes.tick_params(colors=theme.muted, length=3)
    for spine in axes.spines.values():
        spine.set_color(theme.grid)


def plot(build: Callable[[Theme], Figure], alt: str) -> Plot:
    """Draw in both themes."""
    light, dark = to_svg(build, LIGHT), to_svg(build, DARK)
    return Plot(light[0], dark[0], alt, light[1], light[2])


def to_svg(build: Callable[[Theme], Figure], theme: Theme, *, transparent: bool = True) -> tuple[bytes, int, int]:
    """Draw as SVG without date or other traces of the machine; also return width and height in CSS pixels."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A glyph that matplotlib's font lacks is set by the reader's browser.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        drawing = build(theme)
        drawing.savefig(buffer, format="svg", transparent=transparent, metadata={"Date": None, "Creator": None})
        width, height = drawing.get_size_inches() * PIXELS_PER_INCH
    text = buffer.getvalue().decode().replace(_MATPLOTLIB_FONT, _READERS_FONT)
    return text.encode(), round(width), round(height)


def recoloured(svg: bytes, colours: Mapping[str, str]) -> bytes:
    """Return a drawing with other colours, such as ``{"#ffffff": "#16191d"}``; quicker than to draw it again."""
    wanted = {key.lower(): value for key, value in colours.items()}
    return re.sub(
        rb"#[0-9a-fA-F]{6}", lambda match: wanted.get(match[0].decode().lower(), match[0].decode()).encode(), svg
    )
