"""The rules of the documentation's pages: beginning, length, width, links; and the schemas of the files beside it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, blocks, outside_blocks

LINES, COLUMNS = 150, 120


def paragraphs(page: Path) -> list[str]:
    """The prose of a page: neither headings, tables, code nor comments."""
    parts = "\n".join(outside_blocks(page)).split("\n\n")
    return [part.strip() for part in parts if part.strip() and not part.strip().startswith(("#", "|", "<!--", ":::"))]


def test_each_page_begins_with_what_the_reader_can_do() -> None:
    for page in PAGES:
        title, empty, first = page.read_text(encoding="utf-8").splitlines()[:3]
        assert title.startswith("# ") and empty == "", page
        assert re.match(r"After reading this page, you (can|know) ", first), page


def test_each_page_is_short_or_holds_tables_only() -> None:
    """A long page has one paragraph at its head, and one for each heading at most."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if text.count("\n") > LINES:
            assert all(len(part) < 3 * COLUMNS for part in paragraphs(page)[1:]), page
            assert len(paragraphs(page)) <= 1 + text.count("\n## "), page


def test_lines_are_wrapped() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES):
        prose = [line for line in outside_blocks(page) if not line.startswith(("|", "!["))]
        code = [line for block in blocks(page) for line in block.text.splitlines()]
        assert max(map(len, prose + code)) <= COLUMNS, page


def test_the_readme_is_two_screens_up_to_its_commands() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").partition("## Commands")[0].count("\n") <= 80


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Those within the documentation are checked by ``mkdocs build --strict``."""
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == project["version"]
    assert (citation["license"], project["license"]) == ("Apache-2.0", {"file": "LICENSE"})


@pytest.mark.parametrize(
    ("name", "schema"),
    [("CITATION.cff", "vendor.citation-file-format"), (".github/workflows/ci.yml", "vendor.github-workflows")],
)
def test_it_follows_its_schema(name: str, schema: str) -> None:
    """The schemas are those that check-jsonschema ships."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(ROOT / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
