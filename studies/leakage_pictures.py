"""The pictures of the leakage table: originals, the guess, and the best reconstructions behind each mechanism."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fedpriv.core.numbers import decimal
from studies.leakage_cells import GUESS, Row
from studies.leakage_page import groups, strongest

SHOWN, TILE, GAP, LABEL, TEXT = 6, 64, 4, 220, 13
WITHHELD = ("lfw",)  # faces of real people, whose names are known


def save_strip(folder: Path, name: str, images: Tensor) -> None:
    """Write images (V, C, H, W) on [0, 1] side by side; none of a data set of faces."""
    if name.startswith(WITHHELD):
        return
    path = _strip(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (images.clamp(0, 1) * 255).round().byte().permute(2, 0, 3, 1).flatten(1, 2).numpy()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(path)


def compose(folder: Path, rows: Sequence[Row]) -> None:
    """Write one picture a data set and network, from strips that are there."""
    for (data, model, network), cells in groups(rows).items():
        lines = [("original", f"{data}-original"), ("guess: the public mean", f"{data}-{GUESS}")]
        for mechanism, row in strongest(cells).items():
            if row is not None and row.result is not None:
                label = f"{row.cell.attack}, {decimal(row.result.psnr, 1)} dB"
                lines.append((f"{mechanism}\n{label}", f"{data}-{model}-{network}-{row.cell.attack}-{mechanism}"))
        there = [(label, _strip(folder, name)) for label, name in lines if _strip(folder, name).is_file()]
        if len(there) > 2:
            _stack(there).save(folder / f"leakage-{data}-{model}-{network}.png", optimize=True)


def _stack(lines: Sequence[tuple[str, Path]]) -> Image.Image:
    """The strips below each other, each with its label."""
    strips = [_cut(path) for _, path in lines]
    height = len(strips) * (TILE + GAP) + GAP
    sheet = Image.new("RGB", (LABEL + max(strip.width for strip in strips) + GAP, height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
    for number, ((label, _), strip) in enumerate(zip(lines, strips, strict=True)):
        top = GAP + number * (TILE + GAP)
        draw.multiline_text((GAP, top + TILE // 2), label, "black", font, anchor="lm")
        sheet.paste(strip, (LABEL, top))
    return sheet


def _cut(path: Path) -> Image.Image:
    """The first images of a strip, enlarged without smoothing, with gaps between them."""
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    side = picture.height
    shown = min(SHOWN, picture.width // side)
    strip = Image.new("RGB", (shown * (TILE + GAP), TILE), "white")
    for number in range(shown):
        tile = picture.crop((number * side, 0, (number + 1) * side, side))
        strip.paste(tile.resize((TILE, TILE), Image.Resampling.NEAREST), (number * (TILE + GAP), 0))
    return strip


def _strip(folder: Path, name: str) -> Path:
    return folder / "cells" / f"{name.replace(':', '_')}.png"
