"""``fedpriv attack`` as a user meets it: results in 80 columns, JSON for programs, one clear line for mistakes."""

import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from fedpriv.attacks.cli import _TAPPED, _results, _said_of
from fedpriv.attacks.evasion.methods import EVASIONS
from fedpriv.core.cli.terminal import plain
from fedpriv.core.records import AttackResult, SentenceResult
from fedpriv.core.registry import ATTACKS, PROBES
from tests import command_line

SMALL = """
name = "small"
seed = 3
[model]
name = "mlp"
hidden = [8]
activation = "tanh"
[federation]
clients = 3
rounds = 2
[training]
batch_size = 1
[mechanism]
name = "vmf"
kappa = 300
[adversary]
attacks = ["iga"]
knows_candidates = true
victims = 2
iga = { iterations = 5 }
dlg = { iterations = 3, restarts = 2 }
[engine]
name = "inline"
device = "cpu"
"""


def fedpriv(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return command_line.fedpriv(*arguments, cwd=cwd, COLUMNS="80")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "small.toml").write_text(SMALL)
    done = fedpriv("run", "small.toml", "--out", "run", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_other_attacks_on_a_run(here: Path) -> None:
    arguments = ["attack", "run", "--attack", "dlg", "--attack", "candidate", "--victim", "1-0"]
    arguments += ["--set", "adversary.candidate.labels=unknown"]
    done = fedpriv(*arguments, "--out", "one", cwd=here)
    assert done.returncode == 0, done.stderr
    table, rest = done.stdout.split("medians over images", 1)
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["iga", "protected"], ["iga", "unprotected"], ["dlg", "protected"], ["dlg", "unprotected"],
        ["candidate,", "protected"], ["labels=unknown"], ["candidate,", "unprotected"], ["labels=unknown"],
        ["guess-mean", "none"], ["guess-grey", "none"],
    ]  # fmt: skip
    picked = [line.split() for line in table.splitlines() if line.startswith("candidate")]
    # Picked out: 0 or 1 of 1. Nothing is reconstructed, and no label inferred.
    assert all(cells[2] == "n/a" and cells[4:] == ["of", "1", *["n/a"] * 4] for cells in picked)
    assert max(map(len, table.splitlines())) <= 80
    assert "threat model: honest-but-curious-server" in done.stderr
    assert rest.rstrip().endswith(f"Report: {Path('one') / 'report.html'}")
    command = (here / "one" / "command.txt").read_text().splitlines()
    assert command == ["fedpriv run small.toml", " ".join(["fedpriv", *arguments])]


def test_an_attack_that_was_named_and_cannot_be_made_is_an_error(here: Path) -> None:
    """The report has the reason, too; beside another attack, which has results, it is a remark."""
    small = SMALL.replace('name = "mlp"\nhidden = [8]\nactivation = "tanh"', 'name = "lenet"').replace(
        "victims = 2", ""
    )
    (here / "lenet.toml").write_text(small)
    assert fedpriv("run", "lenet.toml", "--out", "lenet", "--quiet", cwd=here).returncode == 0
    done = fedpriv("attack", "lenet", "--attack", "closed_form", "--quiet", "--out", "refused", cwd=here)
    assert done.returncode == 2 and done.stdout.rstrip().endswith(f"Report: {Path('refused') / 'report.html'}")
    assert "closed_form refused: closed_form needs a network whose first layer" in " ".join(done.stderr.split())
    assert done.stderr.splitlines()[-1] == "fedpriv: --attack closed_form: no result; the reason is above"
    both = ["--attack", "closed_form", "--attack", "dlg"]
    assert fedpriv("attack", "lenet", *both, "--quiet", "--out", "both", cwd=here).returncode == 0


@pytest.mark.parametrize("name", ["guess-frequent", "text_map", "candidate"])
def test_results_on_sentences_break_no_name_in_80_columns(name: str) -> None:
    nothing = dict.fromkeys(("mse", "mse_normalised", "psnr", "ssim", "lpips", "lpips_reason"))
    read = SentenceResult(rouge1=1.0, rouge2=0.5, rouge_l=1.0, exact=128, right=2048, tokens=2048)
    result = AttackResult(
        name, "unprotected", 128, 128, 0.6, label_accuracy=1.0, identified=128, candidates=100, sentences=read,
        picked=name == "candidate", **nothing,
    )  # fmt: skip
    console = Console(width=80)
    with console.capture() as captured:
        console.print(_results([result]))
    *_, row = captured.get().splitlines()
    assert row.split()[:2] == [name, "unprotected"]
    assert len(row) <= 80
    assert "image" not in _said_of([result], _TAPPED) and _said_of([result]).startswith("ROUGE")


def test_json_is_all_that_json_prints(here: Path) -> None:
    done = fedpriv("attack", "--json", "run", "--set", "adversary.iga.tv=0.25", "--out", "json", cwd=here)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    tree = json.loads(done.stdout)
    assert tree["folder"] == "json"
    assert {row["attack"] for row in tree["attacks"]} == {"iga", "iga,tv=0.25", "guess-mean", "guess-grey"}


def test_list(here: Path) -> None:
    done = fedpriv("attack", "list", cwd=here)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    for attack in ATTACKS.values():
        assert f"{attack.name} {attack.title}" in words
        assert attack.reference in words
        assert all(need.words in words for need in attack.needs)
        assert all(f"{kind} {part}" in words for kind, part in attack.parts().items())
        for key, field in attack.model_fields.items():
            assert f"adversary.{attack.name}.{key} = {plain(field.default)} {field.description}" in words
    assert max(map(len, done.stdout.splitlines())) <= 80
    tree = json.loads(fedpriv("attack", "list", "--json", cwd=here).stdout)
    assert [one["name"] for one in tree if one["surface"] == "uploads"] == list(ATTACKS)
    assert [one["name"] for one in tree if one["surface"] == "inputs"] == list(EVASIONS)
    assert all(f"{attack.name} {attack.title} {attack.reference}" in words for attack in EVASIONS.values())
    assert next(one["parts"] for one in tree if one["name"] == "iga")["prior"] == "box, tv, denoiser"
    assert [one["name"] for one in tree if one["surface"] == "answers"] == list(PROBES)
    assert all(f"{attack.name} {attack.title} {attack.reference}" in words for attack in PROBES.values())
    common = {"name", "surface", "title", "reference", "needs", "settings"}
    keys = {"uploads": common | {"active", "reads", "tunable", "parts"}, "answers": common, "inputs": common}
    assert all(keys[one["surface"]] == set(one) for one in tree)
    assert all({"name", "meaning"} == set(need) for one in tree for need in one["needs"])
    assert all({"key", "default", "meaning"} == set(each) for one in tree for each in one["settings"])


def test_tune_prints_a_table_and_the_line_to_use(here: Path) -> None:
    clear = ("--set", "mechanism.kappa=1e6", "--set", "adversary.iga.iterations=100")
    arguments = (
        "attack",
        "tune",
        "small.toml",
        "--grid",
        "tv=0,0.001",
        "--grid",
        "learning_rate=0.1,0.3",
        "--victims",
        "3",
        *clear,
    )
    done = fedpriv(*arguments, cwd=here)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines()[:5])) <= 80
    assert done.stdout.count("best\n") == 1
    last = done.stdout.rstrip().splitlines()[-1]
    assert last.startswith("--set adversary.iga.tv=")
    checked = fedpriv("config", "check", "small.toml", *last.split(), cwd=here)
    assert checked.returncode == 0, checked.stderr
    tree = json.loads(fedpriv(*arguments, "--json", cwd=here).stdout)
    assert len(tree["trials"]) == 4
    assert " ".join(f"--set {text}" for text in tree["overrides"]) == last


def test_tune_recommends_nothing_where_no_setting_beats_a_guess(here: Path) -> None:
    done = fedpriv("attack", "tune", "small.toml", "--grid", "tv=0,0.001", "--victims", "3", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "No setting does better" in done.stdout
    assert "--set" not in done.stdout
    assert "largest value" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["attack", "nowhere"], "Directory 'nowhere' does not exist"),
        (["attack", "."], "is not the folder of a run"),
        (["attack", "small.toml"], "Directory 'small.toml' is a file"),
        (["attack", "run", "--attack", "gan"], "attack 'gan' is not known"),
        (["attack", "run", "--victim", "9-9"], "victim 9-9: the adversary did not observe it"),
        (["attack", "run", "--set", "seed=4"], "an existing run keeps its settings"),
        (["attack", "run", "--out", "run"], "run exists already"),
        (["attack", "run", "--outt", "x"], "No such option"),
        (["attack", "tune", "nothing.toml"], "Path 'nothing.toml' does not exist"),
        (["attack", "tune", "small.toml", "--attack", "dlg"], "dlg has no weights to tune"),
        (["attack", "tune", "small.toml", "--victims", "0"], "0 is not in the range"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(here: Path, arguments: list[str], expected: str) -> None:
    done = fedpriv(*arguments, cwd=here)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_help_names_the_folder_and_the_commands(here: Path) -> None:
    done = fedpriv("attack", "--help", cwd=here)
    assert done.returncode == 0
    for word in ("DIR", "list", "tune", "fedpriv attack runs/"):
        assert word in done.stdout
    assert "Write to a copy" in fedpriv("attack", "DIR", "--help", cwd=here).stdout


def test_train_prior(here: Path) -> None:
    """A file that iga takes; where it cannot be written, nothing is trained."""
    done = fedpriv("attack", "train-prior", "small.toml", "--out", "prior", "--steps", "1", cwd=here)
    assert (done.returncode, done.stdout) == (0, "prior: prior trained on 360 images of digits\n"), done.stderr
    done = fedpriv("attack", "train-prior", "small.toml", "--out", "nowhere/prior", cwd=here)
    assert (done.returncode, done.stderr) == (
        2,
        "fedpriv: --out nowhere/prior: allowed is a file in a folder that exists\n",
    )
