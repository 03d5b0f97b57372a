"""What the templates of all pages share: numbers in words, settings as in the file, drawings as data."""

import base64
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, StrictUndefined

from fedpriv.report import numbers
from fedpriv.report.citations import cited

__all__ = ["environment", "plain", "svg_uri"]


def environment(**filters: Callable[..., Any]) -> Environment:
    """Return an environment that escapes everything, with the common filters and these."""
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {
        "bytes_text": numbers.bytes_text,
        "cited": cited,
        "count": numbers.count,
        "decibel": numbers.decibel,
        "decimal": numbers.decimal,
        "duration": numbers.duration,
        "figure": numbers.figure,
        "percent": numbers.percent,
        "plain": plain,
        "svg_uri": svg_uri,
    }
    made.filters |= filters
    return made


def svg_uri(svg: bytes) -> str:
    """Return a drawing as an address that holds it."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def plain(value: object) -> str:
    """Return a setting as it would be written in the experiment file."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(plain(item) for item in value)}]"
    return str(value) if value != "" else "empty"
