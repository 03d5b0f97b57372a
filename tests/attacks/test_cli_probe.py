"""``fedpriv probe`` as a user meets it: a table in 80 columns, JSON for programs, one clear line for mistakes."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from fedpriv.accounting.ceiling import membership_auc
from fedpriv.attacks.endpoint.cli import _answers_words
from fedpriv.attacks.endpoint.report import Probe
from fedpriv.attacks.probing import ProbeResult
from fedpriv.core.figure import Figure, Interval
from tests.attacks.test_cli_attack import fedpriv, here
from tests.core.lab.test_summary import VMF

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
    assert "votes for each: 1." in done.stdout
    assert "Nothing is proven: no certificates were made (fedpriv certify)." in done.stdout
    assert lines[-2:] == ["Attempts: run/robustness/attacks.jsonl", "Report: run/report.html"]
    assert "Right under attack at ℓ∞ 0.05" in (here / "run" / "report.html").read_text()


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
    assert "broken certificates" in done.stderr
    assert json.loads(done.stdout)["broken"] > 0
    assert json.loads((here / "certified" / "evasion.json").read_text())["broken"] > 0
    assert "Certificates are broken" in (here / "certified" / "report.html").read_text()


def test_answers_and_bounds_are_said_in_words(here: Path) -> None:
    """Of a run without a mechanism; the second probe replaces the first."""
    probes = [fedpriv("probe", "run", "--attack", "mi-face", cwd=here) for _ in range(2)]
    assert [done.returncode for done in probes] == [0, 0], probes[0].stderr
    first, second = (done.stdout.splitlines() for done in probes)
    said = "Answers: exact probabilities (policy none); nothing is proven about answers. Adversary: participant."
    assert first[0] == second[0] == said
    assert second[-2:] == ["This replaces the earlier results in probe.json: mi-face.", "Report: run/report.html"]
    assert not any("replaces" in line for line in first)
    assert "Each figure lies between" not in (here / "run" / "report.html").read_text()


def bounded(epsilon: float) -> Probe:
    figure = Figure("AUC of lira", Interval(0.5, 0.4, 0.6), 0.5, ceiling=membership_auc(epsilon, 1e-5), unit="number")
    return Probe(
        adversary="user", answers="rounded:2", heuristic=True, seconds=0.0,
        results=(ProbeResult("membership-answers", "", "", 1, (figure,)),),
    )  # fmt: skip


def test_a_bound_that_rounds_to_one_is_not_printed_as_one() -> None:
    assert [bounded(epsilon).results[0].figures[0].near_one for epsilon in (1, 9, 300)] == ["", "> 0.999", "> 0.999"]
    assert Figure("agreement", Interval(1, None, None), ceiling=1.0).near_one == ""  # a copy may be perfect
    assert Figure("advantage", Interval(0, None, None), ceiling=0.9999).near_one == "> 99.9%"
    words = _answers_words(bounded(VMF.epsilon or 0.0), VMF)
    assert words.startswith("rounded probabilities (policy rounded:2); nothing is proven about answers, epsilon ")
    assert words.endswith(f"({VMF.adjacency}) about the model")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "Directory 'nowhere' does not exist"),
        (["."], "not the folder of a run"),
        (["run", "--attack", "pdg"], "did you mean pgd?"),
        (["run", "--attack", "wrongname"], "there is no attack 'wrongname'; known: "),
        (["run", "--attack", "pgd", "--attack", "pgd"], "each is named once"),
        (["run", "--attack", "extraction", "--size", "0.1"], "--size is for evasion attacks"),
        (["run", "--attack", "fgsm", "--answers", "none"], "are for attacks on the model and its answers"),
        (["run", "--attack", "extraction", "--answers", "rounded:-1"], "decimals = '-1':"),
        (["run", "--attack", "extraction", "--answers", "wrong"], "there is no answer policy 'wrong'"),
        (["run", "--attack", "extraction", "--as", "usr"], "did you mean user?"),
        (["run", "--attack", "extraction", "--queries", "0"], "0 is not in the range x>=1"),
        (["run", "--attack", "extraction", "--set", "extraction.points=0"], "points = 0:"),
        (["run", "--attack", "extraction", "--set", "points=3"], "expected ATTACK.KEY=VALUE"),
        (["run", "--attack", "equation-solving"], "is for models whose logits are affine in the image"),
        (["run", "--attack", "equation-solving", "--answers", "label-only"], "this policy names labels only"),
        (["run", "--attack", "cloak"], "cloak needs an attribute other than the model's task: a run with data.groups"),
        (["run", "--attack", "cloak", "--as", "user"], "as they are sent, which the threat model user withholds"),
        (["run", "--attack", "cloak", "--set", "cloak.least=2"], "least = 2: not below most = 1.5"),
        (["run", "--attack", "cloak", "--set", "cloak.network=lnet"], "did you mean lenet?"),
        (["run", "--attack", "cloak", "--set", "cloak.weights=[]"], "cloak: weights"),
        (["run", "--norm", "l1"], "norm = 'l1':"),
        (["run", "--size", "0"], "--size"),
        (["run", "--size", "0.1", "--size", "0.1"], "sizes ascend, each once"),
        (["run", "--draws", "-1"], "draws = -1: allowed is from 0"),
        (["run", "--victims", "100000"], "evade.victims = 100000: allowed is from 1 to"),
    ],
)
def test_mistakes_are_one_line(here: Path, arguments: list[str], said: str) -> None:
    done = fedpriv("probe", *arguments, cwd=here)
    assert done.returncode == 2
    assert said in done.stderr and "(2)" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout
