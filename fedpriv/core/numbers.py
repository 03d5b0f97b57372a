"""Numbers as the report prints them: rounded for a reader, never more exact than they are."""

import math
from collections.abc import Callable
from typing import Any

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LARGEST_PLAIN, _SMALLEST_PLAIN = 1e7, 1e-3
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def count(value: int) -> str:
    """Return a whole number with its thousands apart: 1,797."""
    return f"{value:,}"


def several(value: int, noun: str) -> str:
    """Return how many there are of something: 1 round, 1,797 rounds."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def figure(value: float, digits: int = 4, largest: float = _LARGEST_PLAIN) -> str:
    """Return a number with significant digits: 12.35, 158,300, 10⁻⁵, 3.2 × 10⁻⁹; from ``largest`` on a power."""
    if value == 0 or not math.isfinite(value):
        return _minus(f"{value:g}")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    rounded = float(f"{mantissa}e{exponent}")
    if not _SMALLEST_PLAIN <= abs(rounded) < largest:
        power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
        plain = f"{float(mantissa):g}"
        return power if plain == "1" else _minus(f"{plain} × {power}")
    text = f"{rounded:,.{max(0, digits - 1 - int(exponent))}f}"
    return _minus(text.rstrip("0").rstrip(".") if "." in text else text)


def percent(share: float, places: int = 1) -> str:
    """Return a share as a percentage, with one decimal unless said otherwise; zero has no sign."""
    return _minus(f"{share:z.{places}%}")


def decimal(value: float | None, places: int = 3) -> str:
    """Return a number with a fixed number of decimals, so that a column of them compares; zero has no sign."""
    return "n/a" if value is None else _minus(f"{value:z.{places}f}")


def decibel(value: float | None) -> str:
    """Return a level in decibels with one decimal."""
    return "n/a" if value is None else _minus(f"{value:z.1f} dB")


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: 7.3 s, 2 min 5 s, 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def bytes_text(value: int) -> str:
    """Return a size in decimal units: 512 bytes, 4.1 kB, 12.6 MB."""
    if value < 1000:
        return f"{value} bytes"
    power = min(int(math.log10(value) // 3), len(_UNITS) - 1)
    return f"{value / 1000**power:.1f} {_UNITS[power]}"


def _minus(text: str) -> str:
    """Set the sign of the number as a minus, not as a hyphen."""
    return f"−{text[1:]}" if text.startswith("-") else text


ALL: tuple[Callable[..., Any], ...] = (bytes_text, count, decibel, decimal, duration, figure, percent)
"""How a page may print a number."""
