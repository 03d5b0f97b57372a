"""``fedpriv probe`` as a user meets it: a table in 80 columns, JSON for programs, one clear line for mistakes."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_cli_attack import fedpriv, here

__all__ = ["here"]

FEW = ("--victims", "12", "--votes", "30")


def test_a_table_in_80_columns(here: Path) -> None:
    sizes = ("--size", "0.3", "--size", "0.05")
    done = fedpriv("probe", "run", *FEW, *sizes, "--attack", "pgd", "-a", "fgsm", "--norm", "linf", cwd=here)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["right", "at", "linf", "0.05", "0.3"]
    assert [line.split()[0] for line in lines[1:5]] == ["unattacked", "pgd", "fgsm", "every"]
    assert max(len(line) for line in lines[:5]) <= 80
    assert "one answer for each attacked image" in done.stdout
    assert "nothing is proven (fedpriv certify)." in done.stdout
    assert lines[-1] == "Attempts: run/robustness/attacks.jsonl"


def test_json_is_what_the_folder_holds_and_a_broken_certificate_is_exit_1(here: Path) -> None:
    shutil.copytree(here / "run", here / "certified")
    few = ("--examples", "60", "--votes", "80", "--noise", "0.1")
    done = fedpriv("certify", "certified", *few, cwd=here)
    assert done.returncode == 0, done.stderr

    def probe(size: str) -> subprocess.CompletedProcess[str]:
        options = ("--victims", "60", "--votes", "30", "--norm", "l2", "--draws", "3", "--attack", "ifgsm", "--json")
        return fedpriv("probe", "certified", "--size", size, *options, cwd=here)

    done = probe("0.5")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("folder") == "certified"
    assert found == json.loads((here / "certified" / "evasion.json").read_text())
    assert (found["norm"], found["sizes"], found["votes"], found["victims"]) == ("l2", [0.5], 30, 60)
    assert found["curves"][0]["draws"] == 3 and found["certified"] is not None
    path = here / "certified" / "robustness" / "certificates.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "radius_l2": 1e3 * line["radius_l2"]}) + "\n" for line in lines))
    done = probe("8")
    assert done.returncode == 1, done.stderr
    assert "attacks broke" in done.stderr
    assert json.loads(done.stdout)["broken"] > 0
    assert json.loads((here / "certified" / "evasion.json").read_text())["broken"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "Directory 'nowhere' does not exist"),
        (["."], "not the folder of a run"),
        (["run", "--attack", "pdg"], "did you mean pgd?"),
        (["run", "--attack", "pgd", "--attack", "pgd"], "each is named once"),
        (["run", "--norm", "l1"], "norm = 'l1' is not allowed"),
        (["run", "--size", "0"], "sizes"),
        (["run", "--size", "0.1", "--size", "0.1"], "sizes ascend, each once"),
        (["run", "--draws", "-1"], "draws = -1 is not allowed; allowed is from 0"),
        (["run", "--victims", "100000"], "evade.victims = 100000: allowed is from 1 to"),
    ],
)
def test_mistakes_are_one_line(here: Path, arguments: list[str], said: str) -> None:
    done = fedpriv("probe", *arguments, cwd=here)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout
