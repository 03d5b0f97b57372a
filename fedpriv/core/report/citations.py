"""Where the papers are that theorems are cited from: a reader of a report has the report alone."""

import re
from collections.abc import Mapping

from markupsafe import Markup, escape

PAPERS: Mapping[str, str] = {
    "Agarwal, Kairouz and Liu 2021": "https://arxiv.org/abs/2110.04995",
    "Balle and Wang 2018": "https://arxiv.org/abs/1805.06530",
    "Balle, Barthe and Gaboardi 2018": "https://arxiv.org/abs/1807.01647",
    "Balle, Cherubin and Hayes 2022": "https://arxiv.org/abs/2201.04845",
    "Canonne, Kamath and Steinke 2020": "https://arxiv.org/abs/2004.00010",
    "Cesar and Rogers 2021": "https://arxiv.org/abs/2004.07223",
    "Chaudhuri, Monteleoni and Sarwate 2011": "https://arxiv.org/abs/0912.0071",
    "Dong, Roth and Su 2022": "https://arxiv.org/abs/1905.02383",
    "Doroshenko et al. 2022": "https://arxiv.org/abs/2207.04380",
    "Dwork et al. 2006": "https://doi.org/10.1007/11681878_14",
    "Ghosh, Roughgarden and Sundararajan 2009": "https://arxiv.org/abs/0811.2841",
    "Hayes, Mahloujifar and Balle 2023": "https://arxiv.org/abs/2302.07225",
    "Iyengar et al. 2019": "https://doi.org/10.1109/SP.2019.00001",
    "Kairouz, Liu and Steinke 2021": "https://arxiv.org/abs/2102.06387",
    "Kairouz, Oh and Viswanath 2016": "https://arxiv.org/abs/1407.1338",
    "Kairouz, Oh and Viswanath 2017": "https://arxiv.org/abs/1311.0776",
    "Kaissis et al. 2023": "https://arxiv.org/abs/2307.03928",
    "Mironov 2017": "https://arxiv.org/abs/1702.07476",
    "Mironov, Talwar and Zhang 2019": "https://arxiv.org/abs/1908.10530",
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
