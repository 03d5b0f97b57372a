"""What the templates of all pages share: numbers in words, settings as in the file, drawings as data."""

import base64
from collections.abc import Callable
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template

from fedpriv.report import numbers
from fedpriv.report.citations import cited


def template(name: str, **filters: Callable[..., Any]) -> Template:
    """Return a page of this package, or below fedpriv: it escapes everything, with the common filters and these."""
    pages = Environment(
        loader=ChoiceLoader([PackageLoader("fedpriv.report", ""), PackageLoader("fedpriv", "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for common in (*numbers.ALL, cited, plain, svg_uri):
        pages.filters[common.__name__] = common
    pages.filters |= filters
    return pages.get_template(name)


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
