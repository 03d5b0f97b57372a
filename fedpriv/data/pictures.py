"""Pictures in files: of any mode, as 8-bit grey or RGB, turned as EXIF says, all of one size that fits into memory."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import IO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedpriv.core.errors import InputError, one_line
from fedpriv.data.files import check_memory

ENDINGS = (".png", ".jpg", ".jpeg", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""What the names of pictures end with, as for torchvision's ImageFolder."""

_GREY = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"})
_TURNED = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")  # where a picture may say that it is turned
_TWELVE_BITS = 16  # 4095 where 65,535 is white, of 255
_BYTES_OF_A_PIXEL = 8  # as unpacked, and as RGB
_PNG = b"\x89PNG\r\n\x1a\n"
_CHUNK = struct.Struct(">I4s")  # how long it is, and its kind
_PLAIN = frozenset((b"IHDR", b"IDAT", b"IEND", b"sRGB", b"gAMA", b"pHYs", b"tIME"))  # chunks that change no pixel


def read_pictures(
    pictures: Iterable[tuple[str, str | bytes]],
    count: int,
    size: int | None,
    memory: int,
    where: str,
    places: np.ndarray | None = None,
) -> np.ndarray:
    """Read pictures, paths or what such files hold, as uint8 (count, C, H, W): C is 1 where all are grey, else 3. ::
    With ``size`` the shorter side is scaled to it and the middle cut out; without, all have one size already.
    """
    pile: np.ndarray | None = None
    first = ""
    for row, (name, content) in enumerate(pictures):
        pixels = _pixels(name, content, size, memory)
        if pile is None:
            first = name
            check_memory(where, count * pixels.nbytes, memory)
            pile = np.empty((count, 3 if pixels.ndim == 3 else 1, *pixels.shape[:2]), np.uint8)
        if pixels.shape[:2] != pile.shape[2:]:
            (height, width), (rows, columns) = pixels.shape[:2], pile.shape[2:]
            raise InputError(
                f"{name}: {width}x{height} pixels, and {first} has {columns}x{rows}; data.size = {min(rows, columns)} "
                "scales the shorter side of each and cuts the middle out"
            )
        if pixels.ndim == 3 and pile.shape[1] == 1:
            check_memory(where, 3 * pile.nbytes, memory)
            pile = np.repeat(pile, 3, axis=1)
        pile[row if places is None else places[row]] = pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels
    if pile is None:
        raise InputError(f"{where}: there is no picture in it")
    if all(each.max() <= _TWELVE_BITS for each in pile) and _mode(content).startswith("I"):
        raise InputError(
            f"{where}: its pictures have 16 bits and are nearly black, as where 12 bits are used: none has more than "
            f"{pile.max()} of 255 where 65535 is white; save 8 bits, or multiply by {255 // max(int(pile.max()), 1)}"
        )
    return pile


def _pixels(name: str, content: str | bytes, size: int | None, memory: int) -> np.ndarray:
    """Return uint8 (H, W) or (H, W, 3)."""
    if isinstance(content, bytes) and _has_opencv():
        plain = _plain_png(name, content, size, memory)
        if plain is not None:
            return plain
    try:
        with _opened(content) as stream, Image.open(stream) as picture:
            check_memory(name, _BYTES_OF_A_PIXEL * picture.width * picture.height, memory)
            picture.load()
            return np.asarray(_fitted(turned(picture), size))
    except FileNotFoundError:
        raise InputError(f"{name}: no such file") from None
    except InputError:
        raise
    except UnidentifiedImageError:
        raise InputError(f"{name}: not a picture, truncated or damaged: of no format that is known") from None
    except Exception as error:  # noqa: BLE001 (each format has a reader of its own, and each fails in its own way)
        raise InputError(f"{name}: not a picture, truncated or damaged: {one_line(error)}") from None


@cache
def _has_opencv() -> bool:
    return find_spec("cv2") is not None


def _plain_png(name: str, content: bytes, size: int | None, memory: int) -> np.ndarray | None:
    """What OpenCV unpacks in a third of Pillow's time; ``None``: it is left to Pillow, which says what is wrong."""
    found = _plain_size(content)
    if found is None or (size is not None and found != (size, size)):
        return None
    import cv2

    check_memory(name, _BYTES_OF_A_PIXEL * found[0] * found[1], memory)
    kind = cv2.IMREAD_GRAYSCALE if content[25] == 0 else cv2.IMREAD_COLOR_RGB
    return cv2.imdecode(np.frombuffer(content, np.uint8), kind)


def _plain_size(content: bytes) -> tuple[int, int] | None:
    """Width and height of an undamaged PNG of 8-bit grey or RGB that nothing turns, moves or makes clear."""
    if content[: len(_PNG)] != _PNG or content[24:26] not in (b"\x08\x00", b"\x08\x02"):
        return None
    view, place, kind = memoryview(content), len(_PNG), b""
    while place + 12 <= len(content):
        length, kind = _CHUNK.unpack_from(content, place)
        end = place + 8 + length
        if kind not in _PLAIN or content[end : end + 4] != zlib.crc32(view[place + 4 : end]).to_bytes(4, "big"):
            return None
        place = end + 4
    width, height = struct.unpack_from(">II", content, 16)
    return (width, height) if kind == b"IEND" and place == len(content) else None


def _mode(content: str | bytes) -> str:
    with _opened(content) as stream, Image.open(stream) as picture:
        return picture.mode


def _opened(content: str | bytes) -> IO[bytes]:
    return io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb")  # noqa: PTH123


def turned(picture: Image.Image) -> Image.Image:
    """The picture as it is to be seen, in mode L or RGB."""
    if any(key in picture.info for key in _TURNED):
        picture = ImageOps.exif_transpose(picture)
    if picture.mode in ("L", "RGB"):
        return picture
    if picture.mode.startswith("I"):
        return _scaled(picture)
    if picture.mode == "F":
        raise ValueError("its pixels are floating point; 8 or 16 bits are read")
    return picture.convert("L" if picture.mode in _GREY else "RGB")


def _scaled(picture: Image.Image) -> Image.Image:
    """16 bits as 8: scaled, and not cut."""
    values = np.asarray(picture).astype(np.int64)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise ValueError(f"its pixels go from {values.min()} to {values.max()}; 8 or 16 bits are read")
    return Image.fromarray(((values * 255 + 0x7FFF) // 0xFFFF).astype(np.uint8))


def _fitted(picture: Image.Image, size: int | None) -> Image.Image:
    """The middle of the picture, ``size`` on each side."""
    if size is None or picture.size == (size, size):
        return picture
    return ImageOps.fit(picture, (size, size), Image.Resampling.BILINEAR)
