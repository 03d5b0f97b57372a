"""The rules of the documentation's pages: beginning, length, width, links; and the schemas of the files beside it."""

import csv
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, blocks, outside_blocks

LINES, COLUMNS, WORDS = 150, 120, 900
RESULTS = ROOT / "docs" / "results"


def paragraphs(page: Path) -> list[str]:
    """The prose of a page: neither headings, tables, code nor comments."""
    parts = "\n".join(outside_blocks(page)).split("\n\n")
    return [part.strip() for part in parts if part.strip() and not part.strip().startswith(("#", "|", "<!--", ":::"))]


def test_each_page_begins_with_what_it_is_about() -> None:
    """A title, and a paragraph of at most 60 words, which search engines and readers see first."""
    for page in PAGES:
        title, empty, *rest = page.read_text(encoding="utf-8").split("\n")
        assert title.startswith("# ") and empty == "", page
        first = "\n".join(rest).partition("\n\n")[0]
        assert 3 < len(first.split()) <= 60 or page.parent.name == "api", page


def test_each_page_is_short_or_holds_tables_only() -> None:
    """A long page has one paragraph at its head, and one for each heading at most."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if text.count("\n") > LINES:
            assert all(len(part) < 3 * COLUMNS for part in paragraphs(page)[1:]), page
            assert len(paragraphs(page)) <= 1 + text.count("\n## "), page


def test_each_page_is_read_in_minutes() -> None:
    """Code and tables count; reference pages are generated, and all pages together have a limit, too."""
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert not [name for name, count in words.items() if count > WORDS]
    assert sum(words.values()) <= 46_000


def test_each_measurement_stands_on_its_page_with_its_date() -> None:
    """``docs/tables.py`` puts the figures in the place of the link, which readers without the site follow."""
    with (RESULTS / "measurements.csv").open(encoding="utf-8", newline="") as file:
        made = {row["file"]: row for row in csv.DictReader(file)}
    assert made.keys() == {path.stem for path in RESULTS.glob("*.csv")} - {"measurements"}
    for name, row in made.items():
        page = (ROOT / "docs" / f"{row['page']}.md").read_text(encoding="utf-8")
        assert f"](results/{name}.csv)" in page, row
        assert row["versions"] and row["device"] and re.match(r"20\d\d-\d\d-\d\d", row["date"]), row
        if row["command"].startswith("python -m "):
            package, *more = row["command"].split()[2:]
            assert find_spec(f"{package}.{more[0]}" if package in ("studies", "benchmarks") else package), row


def test_lines_are_wrapped() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES):
        prose = [line for line in outside_blocks(page) if not line.startswith(("|", "!["))]
        code = [line for block in blocks(page) for line in block.text.splitlines()]
        assert max(map(len, prose + code)) <= COLUMNS, page


def test_the_readme_is_two_screens() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 85


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Those within the documentation are checked by ``mkdocs build --strict``."""
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_each_finding_has_a_sentence_and_a_test() -> None:
    """The table of ``findings/`` has a row for each script, in order; its page names the script, its test exists."""
    table = (ROOT / "findings" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \[(\S+)\]\((\S+)\) .* \[\S+\]\(\.\./(\S+)\) \| \[(\S+)\]\(\.\./(\S+)\) \|$", table, re.MULTILINE
    )
    assert [file for _, file, *_ in rows] == sorted(path.name for path in (ROOT / "findings").glob("*.sh"))
    for name, file, page, test, tests in rows:
        assert file == f"{name}.sh"
        assert any(
            fnmatch(file, each) for each in re.findall(r"([\w-]+\*?\.sh)`", (ROOT / page).read_text(encoding="utf-8"))
        )
        assert f"def {test}(" in (ROOT / tests).read_text(encoding="utf-8"), test


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
