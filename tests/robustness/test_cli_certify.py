"""``fedpriv certify`` as a user meets it: a table in 80 columns, JSON for programs, one clear line for mistakes."""

import json
from pathlib import Path

import pytest

from tests.attacks.test_cli_attack import fedpriv, here

__all__ = ["here"]

FEW = ("--examples", "10", "--votes", "30")


def test_a_table_in_80_columns_and_what_is_proven(here: Path) -> None:
    done = fedpriv("certify", "run", *FEW, "--noise", "0.1", "--place", "input", "--norm", "linf", cwd=here)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[2:6] == ["0.01", "0.02", "0.03", "0.04"]
    assert [line.split(":")[0].split(",")[0].split()[0] for line in lines[1:7]] == [
        *("main", "Renyi", "PixelDP", "PixelDP", "PixelDP", "the")
    ]
    assert max(len(line) for line in lines[:7]) <= 80
    assert "Noise: σ = 0.1 in ℓ₂, on the input, not used in training" in done.stdout
    assert "Each may be wrong: with probability 0.001\nWrong in total: at most 0, with 95 % confidence" in done.stdout
    assert lines[-2:] == ["Certificates: run/robustness/certificates.jsonl", "Report: run/report.html"]
    assert "Certified at ℓ₂ 0.5" in (here / "run" / "report.html").read_text()


def test_json_is_what_the_folder_holds(here: Path) -> None:
    done = fedpriv("certify", "run", *FEW, "--alpha", "0.01", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("folder") == "run"
    assert found == json.loads((here / "run" / "robustness.json").read_text())
    assert (found["alpha"], found["examples"], found["votes"]) == (0.01, 10, 30)
    noise = found["noise"]  # unless it is given, of a run that was trained without
    assert (noise["sigma"], noise["place"], noise["afterwards"]) == (0.25, "input", True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "Directory 'nowhere' does not exist"),
        (["."], "not the folder of a run"),
        (["run", "--noise", "0"], "--noise 0: expected a deviation from 1e-06 to 1e+06"),
        (["run", "--noise", "nan"], "--noise nan: expected a deviation from"),
        (["run", "--noise", "1e-46"], "--noise 1e-46: expected a deviation from"),
        (["run", "--noise", "1e39"], "--noise 1e+39: expected a deviation from"),
        (["run", "--noise", "1", "--place", "hidden"], "--place hidden: noise that is added afterwards"),
        (["run", "--place", "input"], "--place input is for --noise"),
        (["run", "--norm", "l1"], "--norm l1: allowed: l2, linf"),
        (["run", "--votes", "0"], "votes = 0: allowed is from 1"),
        (["run", "--alpha", "0.7"], "alpha = 0.7: allowed is below 0.5"),
        (["run", "--alpha", "5e-324"], "alpha = 5e-324: allowed is from 1e-15"),
        (["run", "--noise", "0.1", "--examples", "100000"], "certify.examples = 100000: allowed is from 1 to"),
    ],
)
def test_mistakes_are_one_line(here: Path, arguments: list[str], said: str) -> None:
    done = fedpriv("certify", *arguments, cwd=here)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout
