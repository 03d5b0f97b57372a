"""A capability lies in its folder and, where it is an attack, its family's; the core, which all share, names none."""

import re
from itertools import chain

from tests.rooms import CAPABILITIES, MOST_FOLDERS, ROOT, measured, sources

SHARED = ("fedpriv/core/", "fedpriv/engines/", "clients/", "server/", "attacks/")
NAMES = re.compile(r"\b(pate|erm|label_epsilon|label_correction|prompts|robustness|service)\b")


def test_a_capability_lies_in_two_folders_at_most() -> None:
    folders = {name: measured(capability).folders for name, capability in CAPABILITIES.items()}
    assert {name: each for name, each in folders.items() if not 0 < len(each) <= MOST_FOLDERS} == {}


def test_what_all_share_names_no_capability() -> None:
    pages = (str(path.relative_to(ROOT)) for place in SHARED for path in (ROOT / place).rglob("*.html"))
    shared = chain((path for path in sources() if path.startswith(SHARED)), pages)
    lines = ((path, line) for path in shared for line in (ROOT / path).read_text().splitlines())
    assert [(path, line) for path, line in lines if NAMES.search(line)] == []
