"""Apps of every shape, each in its framework: what leaves is told of truly, with the tap and with privatise.

Frameworks that the project does not depend on are installed on demand: ``make flower-test``.
"""

import re
from pathlib import Path

import pytest

from tests.flower.shapes import CLIENTS, EXAMPLES, SHAPES, ask, missing

# Claims that hold of no app here: nothing was protected, or recovered, or seen, where it was.
LEADS_NOWHERE = re.compile(r"Traceback|set tap\.shape|was not seen to take images")


@pytest.mark.parametrize("name", SHAPES)
def test_what_leaves_an_app_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if absent := missing(name):
        pytest.skip(f"not installed: {', '.join(absent)}; make flower-test installs them")
    monkeypatch.setenv("FEDPRIV_RUNS", "")  # set anew by each
    said = ask(name, tmp_path / "tap", protected=False)
    assert not said.refused and said.summary is not None
    assert SHAPES[name].says in said.text
    assert not LEADS_NOWHERE.search(said.text)
    assert not re.search(rf"recovered 0 of {CLIENTS * EXAMPLES}", said.text) or not _is_doubted(said.text)
    protected = ask(name, tmp_path / "privatise", protected=True, iterations=5)
    if SHAPES[name].protected:
        assert SHAPES[name].protected in " ".join([protected.text, *protected.logged])
        assert not protected.ledgers
    else:
        assert protected.summary is not None
        assert re.search(r"Proven, of client .*-DP|bounded by its ledger", protected.text)
        assert {ledger["participations"] for ledger in protected.ledgers.values()} <= {1, 2}
        assert len(protected.ledgers) == CLIENTS
        assert "num-examples = 1" not in protected.text.replace("(num-examples = 1", "")


def _is_doubted(text: str) -> bool:
    return "the training that was watched is another than ours" in text


def test_the_page_has_a_row_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flower-shapes.md").read_text()
    rows = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")}
    assert set(SHAPES) <= rows
