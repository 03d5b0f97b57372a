"""What the templates of all pages share: numbers in words, settings as in the file, drawings as data."""

import base64
import io
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape
from PIL import Image
from pydantic import BaseModel

from fedpriv.core import numbers
from fedpriv.core.columns import is_signal
from fedpriv.core.finding import Picture

_BAND = 265  # of a curve, which goes from 0 to 255


@cache
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
    """Return a picture as an address that holds it; a signal as curves."""
    if is_signal(picture.height, picture.width):
        return svg_uri(_curves(picture.png))
    return f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"


def _curves(png: bytes) -> bytes:
    """Draw each line of pixels in a band of its own, and in it each colour, from 0 below to 255 above."""
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.atleast_3d(np.asarray(image))
    lines = pixels if pixels.shape[0] <= pixels.shape[1] else pixels.transpose(1, 0, 2)
    bands, steps, _ = lines.shape
    curves = [(_BAND * band + 260 - curve).tolist() for band, line in enumerate(lines.astype(int)) for curve in line.T]
    points = [" ".join(f"{x},{y}" for x, y in enumerate(curve)) for curve in curves]
    drawn = "".join(f'<polyline points="{each}" vector-effect="non-scaling-stroke"/>' for each in points)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="128" height="{max(64, 24 * bands)}" '
        f'viewBox="0 0 {steps - 1} {_BAND * bands}" preserveAspectRatio="none" fill="none" stroke="#000">'
        f'<rect width="100%" height="100%" fill="#fff" stroke="none"/>{drawn}</svg>'
    ).encode()


def svg_uri(svg: bytes) -> str:
    """Return a drawing as an address that holds it."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def plain(value: object) -> str:
    """Return a setting as it would be written in the experiment file."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, BaseModel):  # such as a column of a table
        given = value.model_dump(exclude_defaults=True).items()
        return f"{{ {', '.join(f'{key} = {plain(each)}' for key, each in given)} }}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(plain(item) for item in value)}]"
    return str(value) if value != "" else "empty"


PAPERS: Mapping[str, str] = {
    "Agarwal, Kairouz and Liu 2021": "https://arxiv.org/abs/2110.04995",
    "Balle and Wang 2018": "https://arxiv.org/abs/1805.06530",
    "Balle, Barthe and Gaboardi 2018": "https://arxiv.org/abs/1807.01647",
    "Balle, Cherubin and Hayes 2022": "https://arxiv.org/abs/2201.04845",
    "Canonne, Kamath and Steinke 2020": "https://arxiv.org/abs/2004.00010",
    "Cesar and Rogers 2021": "https://arxiv.org/abs/2004.07223",
    "Chaudhuri, Monteleoni and Sarwate 2011": "https://arxiv.org/abs/0912.0071",
    "Chua et al. 2024": "https://arxiv.org/abs/2412.16802",
    "Denisov et al. 2022": "https://arxiv.org/abs/2202.08312",
    "Dong, Roth and Su 2022": "https://arxiv.org/abs/1905.02383",
    "Doroshenko et al. 2022": "https://arxiv.org/abs/2207.04380",
    "Dwork et al. 2006": "https://doi.org/10.1007/11681878_14",
    "Feldman and Shenfeld 2025": "https://arxiv.org/abs/2502.08202",
    "Ghosh, Roughgarden and Sundararajan 2009": "https://arxiv.org/abs/0811.2841",
    "Hayes, Mahloujifar and Balle 2023": "https://arxiv.org/abs/2302.07225",
    "Iyengar et al. 2019": "https://doi.org/10.1109/SP.2019.00001",
    "Kairouz, Liu and Steinke 2021": "https://arxiv.org/abs/2102.06387",
    "Kairouz, Oh and Viswanath 2016": "https://arxiv.org/abs/1407.1338",
    "Kairouz, Oh and Viswanath 2017": "https://arxiv.org/abs/1311.0776",
    "Kaissis et al. 2023": "https://arxiv.org/abs/2307.03928",
    "Kalinin and Lampert 2024": "https://arxiv.org/abs/2405.13763",
    "Kalinin, McKenna, Upadhyay and Lampert 2025": "https://arxiv.org/abs/2505.12128",
    "Mironov 2017": "https://arxiv.org/abs/1702.07476",
    "Mironov, Talwar and Zhang 2019": "https://arxiv.org/abs/1908.10530",
    "Papernot and Steinke 2022": "https://arxiv.org/abs/2110.03620",
    "Papernot et al. 2018": "https://arxiv.org/abs/1802.08908",
    "Phan et al. 2019": "https://arxiv.org/abs/1906.01444",
    "Vadhan 2017": "https://doi.org/10.1007/978-3-319-57048-8_7",
    "Wang, Balle and Kasiviswanathan 2019": "https://arxiv.org/abs/1808.00087",
    "Weggenmann and Kerschbaum 2021": "https://doi.org/10.1145/3460120.3484734",
    "Wilson et al. 2020": "https://arxiv.org/abs/1909.01917",
}
"""Authors and year, as the accountant's texts have them -> address."""

_PAPER = re.compile("|".join(map(re.escape, PAPERS)))


def cited(text: str) -> Markup:
    """Return a text with its citations as links."""
    return Markup(_PAPER.sub(lambda paper: f'<a href="{PAPERS[paper[0]]}">{paper[0]}</a>', str(escape(text))))
