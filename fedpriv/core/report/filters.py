"""What the templates of all pages share: numbers in words, settings as in the file, drawings as data."""

import base64
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from fedpriv.core import numbers
from fedpriv.core.finding import Picture
from fedpriv.core.report.citations import cited


def template(name: str, **filters: Callable[..., Any]) -> Template:
    """Return a page of this package, or below fedpriv: it escapes everything, with the common filters and these."""
    return _pages(**filters).get_template(name)


def fragment(finding: type[Any], values: Mapping[str, object]) -> Markup:
    """Return the section of a finding: report.html in the folder of its class, with these values."""
    return Markup(_fragment(finding.__module__.rpartition(".")[0]).render(values))


@cache
def _fragment(package: str) -> Template:
    return _pages().from_string(resources.files(package).joinpath("report.html").read_text(encoding="utf-8"))


def _pages(**filters: Callable[..., Any]) -> Environment:
    pages = Environment(
        loader=ChoiceLoader([PackageLoader("fedpriv.core.report", ""), PackageLoader("fedpriv", "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for common in (*numbers.ALL, cited, lower_first, picture_uri, plain, svg_uri):
        pages.filters[common.__name__] = common
    pages.filters |= filters
    return pages


def lower_first(text: str) -> str:
    """Return a heading as the rest of a sentence."""
    return text[:1].lower() + text[1:]


def picture_uri(picture: Picture) -> str:
    """Return a picture as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"


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
