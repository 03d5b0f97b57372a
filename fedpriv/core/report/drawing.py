"""Drawing as SVG, light and dark, in Okabe and Ito's colours (2008), without matplotlib's global state."""

import base64
import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from PIL import Image

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


def panel(theme: Theme, size: tuple[float, float], grid: Literal["both", "y"] = "both") -> tuple[Figure, Axes]:
    """Return a drawing of this size in inches, and its one pair of axes, in the theme's colours."""
    drawing = Figure(figsize=size, layout="constrained")
    axes = drawing.subplots()
    dress(axes, theme)
    axes.grid(axis=grid, color=theme.grid, linewidth=0.8)
    return drawing, axes


def plot(build: Callable[[Theme], Figure], alt: str, colours: Mapping[str, str] = _NO_COLOURS) -> Plot:
    """Draw in the light theme, and recolour that for the dark one, which takes a fiftieth of the time of a drawing."""
    light, width, height = to_svg(build, LIGHT)
    themes = dict(zip(asdict(LIGHT).values(), asdict(DARK).values(), strict=True))
    return Plot(light, recoloured(light, {**colours, **themes}), alt, width, height)


def to_svg(build: Callable[[Theme], Figure], theme: Theme, *, transparent: bool = True) -> tuple[bytes, int, int]:
    """Draw as SVG without date or other traces of the machine; also return width and height in CSS pixels."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A glyph that matplotlib's font lacks is set by the reader's browser.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        drawing = build(theme)
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
