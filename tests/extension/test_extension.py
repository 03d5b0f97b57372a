"""A mechanism and an attack of another package, one file each: nothing in this tree names them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OUTSIDE = Path(__file__).with_name("outside")
ENTRY_POINTS = """
[fedpriv.mechanisms]
rounded = outside.rounded:RoundedSettings

[fedpriv.attacks]
brightest = outside.brightest:BrightestSettings
"""
EXPERIMENT = """
[model]
name = "mlp"
hidden = [8]
[federation]
clients = 2
rounds = 2
[mechanism]
name = "rounded"
step = 0.02
[adversary]
attacks = ["brightest"]
[adversary.brightest]
light = 0.9
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the other package is installed, as pip does it."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(OUTSIDE, folder / "outside")
    meta = folder / "outside-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "mine.toml").write_text(EXPERIMENT)
    return folder


def fedpriv(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parents[2]
    path = os.pathsep.join([str(folder), str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "fedpriv", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_they_are_settings_like_ours(installed: Path) -> None:
    assert fedpriv(installed, "config", "check", "mine.toml").returncode == 0
    wrong = fedpriv(installed, "config", "check", "mine.toml", "--set", "mechanism.stepp=3")
    assert wrong.returncode == 2 and "unknown key mechanism.stepp; did you mean step?" in wrong.stderr
    schema = json.loads(fedpriv(installed, "config", "schema").stdout)
    assert schema["$defs"]["RoundedSettings"]["properties"]["name"]["const"] == "rounded"
    listed = fedpriv(installed, "attack", "list").stdout
    assert "brightest  White images" in listed and "adversary.brightest.light = 1.0" in listed


def test_one_that_cannot_be_imported_is_named(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(installed, tmp_path / "broken")
    (tmp_path / "broken" / "outside" / "rounded.py").write_text("import nothing_of_this_name\n")
    done = fedpriv(tmp_path / "broken", "config", "check", "mine.toml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "mechanism 'rounded' of the package outside cannot be used: ModuleNotFoundError" in done.stderr


@pytest.mark.slow
def test_a_run_trains_and_attacks_with_them(installed: Path) -> None:
    done = fedpriv(installed, "run", "mine.toml", "--out", "run")
    assert done.returncode == 0, done.stderr
    summary = json.loads((installed / "run" / "summary.json").read_text())
    assert {attack["attack"] for attack in summary["attacks"]} >= {"brightest"}
    ledger = json.loads((installed / "run" / "ledger.json").read_text())
    assert (ledger["mechanism"], ledger["worst"]["epsilon"]) == ("rounded", None)
    page = (installed / "run" / "report.html").read_text()
    assert "White images" in page and "rounding" in page
    again = fedpriv(installed, "attack", "run", "--attack", "iga", "--set", "adversary.iga.iterations=3")
    assert again.returncode == 0, again.stderr
