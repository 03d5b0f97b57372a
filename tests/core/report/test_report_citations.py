"""What the figures rest on is named by papers that a reader can open, never by a file of this project."""

import ast
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from fedpriv import accounting
from fedpriv.accounting import Release, guarantee
from fedpriv.core.report.filters import PAPERS, cited

NOISE: dict[str, dict[str, Any]] = {
    "gaussian": {"noise": 1.5},
    "hgm": {"noise": 1.5},
    "laplace": {"noise": 4.0},
    "vmf": {"noise": 0.5, "dimensions": (50, 50)},
}


def statements(mechanism: str, sampling: str, adjacency: str) -> list[str]:
    release: dict[str, Any] = {
        "unit": "example", "rate": 0.1, "participations": 20, "dimensions": (100,), "delta": 1e-5, **NOISE[mechanism],
    }  # fmt: skip
    found = guarantee(Release(mechanism=mechanism, sampling=sampling, adjacency=adjacency, **release))  # type: ignore[arg-type]
    return [*found.theorem.values(), *found.notes]


CASES = [
    *(
        (mechanism, sampling, "replace-one")
        for mechanism, sampling in itertools.product(NOISE, ("shuffled", "fixed", "full"))
    ),
    *(
        (mechanism, "poisson", adjacency)
        for mechanism in ("gaussian", "hgm")
        for adjacency in ("replace-one", "zero-out")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_paper_is_a_link_and_no_file_is_named(case: tuple[str, str, str]) -> None:
    for text in statements(*case):
        links = re.findall(r'<a href="https://[^"]+">[^<]+ (?:19|20)\d\d</a>', cited(text))
        assert len(links) == len(re.findall(r"\b(?:19|20)\d\d\b", text))
        assert not re.search(r"\.md\b|\.py\b|docs/", text)


def test_every_paper_in_the_texts_of_the_accountant_has_an_address() -> None:
    paper = re.compile(r"[A-Z]\w+(?:(?:, [A-Z]\w+)* and [A-Z]\w+| et al\.) (?:19|20)\d\d")
    cites: set[str] = set()
    for path in Path(accounting.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                cites |= set(paper.findall(node.value))
    assert len(cites) > 10
    assert cites - PAPERS.keys() == set()


def test_what_is_around_a_citation_is_escaped() -> None:
    (name, address), *_ = PAPERS.items()
    assert cited(f"<b> {name}, Thm 1") == f'&lt;b&gt; <a href="{address}">{name}</a>, Thm 1'
