"""``fedpriv audit`` as a user meets it: a table in 80 columns, JSON for programs, one clear line for mistakes."""

import json
from pathlib import Path

import pytest

from fedpriv.attacks.membership.attacks import ATTACKS
from tests.attacks.test_cli_attack import fedpriv, here

__all__ = ["here"]


@pytest.mark.slow
def test_a_table_in_80_columns_and_a_sentence_about_epsilon(here: Path) -> None:
    done = fedpriv("audit", "run", "--references", "8", "--pairs", "30", cwd=here)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(ATTACKS)]] == list(ATTACKS)
    assert max(len(line) for line in lines[: 1 + len(ATTACKS)]) <= 80
    assert lines[-2].startswith("Epsilon: at least 0 at delta = 1e-05")
    assert lines[-1] == "Report: run/report.html"


@pytest.mark.slow
def test_json_is_what_the_folder_holds(here: Path) -> None:
    done = fedpriv("audit", "run", "--references", "6", "--pairs", "20", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("folder") == "run"
    assert found == json.loads((here / "run" / "membership.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "Directory 'nowhere' does not exist"),
        (["."], "not the folder of a run"),
        (["run", "--references", "7"], "even number from 6"),
        (["run", "--pairs", "1"], "--pairs"),
    ],
)
def test_mistakes_are_one_line(here: Path, arguments: list[str], said: str) -> None:
    done = fedpriv("audit", *arguments, cwd=here)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout
