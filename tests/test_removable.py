"""A capability is one folder: without it, its tests, page and configs, everything else still works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rooms import CAPABILITIES, ROOT

REMOVABLE = [name for name in CAPABILITIES if name not in ("evasion", "own model", "secure aggregation")]

# One process, since most of the time goes into importing PyTorch; no report may need a network or a browser.
SCRIPT = """
import sys
from fedpriv.core.cli import main
small = sys.argv[1:]
def run(*words):
    sys.argv = ["fedpriv", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
run("--help")
run("config", "schema")
run("config", "check", "configs/quickstart.toml")
run("run", "configs/quickstart.toml", "--quiet", "--out", "run", *small)
"""
ATTACKS = ("dlg", "iga", "map")
SMALL = ("federation.rounds=20", "adversary.victims=1", *(f"adversary.{name}.iterations=20" for name in ATTACKS))


@pytest.fixture(params=REMOVABLE)
def without(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The tree without one capability's folder."""
    folder = CAPABILITIES[request.param].folder
    listed = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    kept = [name for name in listed.splitlines() if not name.startswith((f"{folder}/", "tests/", "docs/", "studies/"))]
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, tmp_path / name, follow_symlinks=False)
    return tmp_path


def test_everything_else_works_without_a_capability(without: Path) -> None:
    words = [word for key in SMALL for word in ("--set", key)]
    environment = {**os.environ, "PYTHONPATH": str(without)}
    subprocess.run([sys.executable, "-c", SCRIPT, *words], cwd=without, env=environment, check=True, timeout=300)
    assert (without / "run" / "report.html").stat().st_size > 10_000
    linted = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=without, env=environment,
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert linted.returncode == 0, linted.stdout
