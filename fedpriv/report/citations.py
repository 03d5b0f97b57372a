"""Where the papers are that theorems are cited from: a reader of a report has the report alone."""

import re
from collections.abc import Mapping

from markupsafe import Markup, escape

__all__ = ["PAPERS", "cited"]

PAPERS: Mapping[str, str] = {
    "Balle and Wang 2018": "https://arxiv.org/abs/1805.06530",
    "Balle, Barthe and Gaboardi 2018": "https://arxiv.org/abs/1807.01647",
    "Canonne, Kamath and Steinke 2020": "https://arxiv.org/abs/2004.00010",
    "Dong, Roth and Su 2022": "https://arxiv.org/abs/1905.02383",
    "Doroshenko et al. 2022": "https://arxiv.org/abs/2207.04380",
    "Dwork et al. 2006": "https://doi.org/10.1007/11681878_14",
    "Kairouz, Oh and Viswanath 2017": "https://arxiv.org/abs/1311.0776",
    "Mironov 2017": "https://arxiv.org/abs/1702.07476",
    "Mironov, Talwar and Zhang 2019": "https://arxiv.org/abs/1908.10530",
    "Phan et al. 2019": "https://arxiv.org/abs/1906.01444",
    "Wang, Balle and Kasiviswanathan 2019": "https://arxiv.org/abs/1808.00087",
    "Weggenmann and Kerschbaum 2021": "https://doi.org/10.1145/3460120.3484734",
}
"""Authors and year, as the accountant's texts have them -> address."""

_PAPER = re.compile("|".join(map(re.escape, PAPERS)))


def cited(text: str) -> Markup:
    """Return a text with its citations as links."""
    return Markup(_PAPER.sub(lambda paper: f'<a href="{PAPERS[paper[0]]}">{paper[0]}</a>', str(escape(text))))
