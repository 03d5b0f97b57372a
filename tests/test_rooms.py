"""A capability lies in its folder and, where it is an attack, its family's; the core, which all share, names none."""

import re
from itertools import chain

from tests.rooms import CAPABILITIES, MOST_FOLDERS, ROOT, measured, sources

LIBRARIES = {"accounting", "algorithms", "attacks", "clients", "core", "data", "engines", "gradients", "mechanisms"}
LIBRARIES |= {"models", "server", "algorithms/rounds", "attacks/methods", "attacks/reconstruction"}
SHARED = ("fedpriv/core/", "fedpriv/engines/", "clients/", "server/", "attacks/")
NAMES = re.compile(r"\b(pate|erm|label_epsilon|label_correction|prompts|robustness|service)\b")


def test_a_capability_lies_in_two_folders_at_most() -> None:
    folders = {name: measured(capability).folders for name, capability in CAPABILITIES.items()}
    assert {name: each for name, each in folders.items() if not 0 < len(each) <= MOST_FOLDERS} == {}


def test_each_folder_is_of_a_capability_or_of_all() -> None:
    """Without a row in rooms.py its removal is not tested; without a place in a layer, its imports are not checked."""
    folders = {path.parent.name for path in (ROOT / "fedpriv").glob("*/__init__.py")}
    for family in ("algorithms", "attacks"):
        folders |= {f"{family}/{path.parent.name}" for path in (ROOT / "fedpriv" / family).glob("*/__init__.py")}
    known = {re.sub("^fedpriv/", "", each.folder) for each in CAPABILITIES.values() if not each.folder.endswith(".py")}
    assert folders == known | LIBRARIES
    layers = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [name for name in known if "/" not in name and f"(fedpriv.{name})" not in layers] == []


def test_what_all_share_names_no_capability() -> None:
    pages = (str(path.relative_to(ROOT)) for place in SHARED for path in (ROOT / place).rglob("*.html"))
    shared = chain((path for path in sources() if path.startswith(SHARED)), pages)
    lines = ((path, line) for path in shared for line in (ROOT / path).read_text().splitlines())
    assert [(path, line) for path, line in lines if NAMES.search(line)] == []
