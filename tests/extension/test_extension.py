"""One of each kind of another package, one file each: nothing in this tree names them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import fedpriv as forked

OUTSIDE = Path(__file__).with_name("outside")
ENTRY_POINTS = """
[fedpriv.mechanisms]
rounded = outside.rounded:RoundedSettings
doubled = outside.doubled:DoubledSettings

[fedpriv.attacks]
brightest = outside.brightest:BrightestSettings

[fedpriv.evasions]
few = outside.few:Few

[fedpriv.probes]
constant = outside.constant:Constant

[fedpriv.answers]
steps = outside.steps:Steps

[fedpriv.findings]
dropouts = outside.dropouts:Dropouts

[fedpriv.datasets]
stripes = outside.stripes:Stripes

[fedpriv.models]
narrow = outside.narrow:NarrowSettings

[fedpriv.rules]
trusted = outside.trusted:Trusted
"""
EXPERIMENT = """
[data]
name = "stripes"
[model]
name = "narrow"
units = 5
[federation]
clients = 2
rounds = 2
aggregation = "trusted"
believed = 1
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


EACH = """
import json, sys
from fedpriv.core.cli.app import app
from fedpriv.core.errors import InputError
for words in json.load(sys.stdin):
    try:
        app(words, standalone_mode=False)
    except InputError as error:
        print("refused:", error)
    print("----")
"""
ACCOUNT = ("--scale", "20", "--participations", "10", "--json")
COMMANDS = {
    "schema": ("config", "schema"),
    "data": ("data",),
    "list": ("attack", "list"),
    "doubled": ("account", "doubled", *ACCOUNT),
    "rounded": ("account", "rounded", "--step", "2"),
    "run": ("run", "mine.toml", "--out", "run"),
    "few": ("probe", "run", "--attack", "few", "-a", "ifgsm", "--victims", "20", "--size", "0.3", "--json"),
    "constant": ("probe", "run", "--attack", "constant", "--answers", "steps:3", "--queries", "5", "--json"),
    "attack": ("attack", "run", "--attack", "iga", "--set", "adversary.iga.iterations=3"),
}


@pytest.fixture(scope="module")
def said(installed: Path) -> dict[str, str]:
    """What the commands print, one after the other in one process beside the other package."""
    done = started(installed, "-c", EACH, given=json.dumps(list(COMMANDS.values())))
    assert done.returncode == 0, done.stderr
    return dict(zip(COMMANDS, done.stdout.split("----\n")[:-1], strict=True))


def fedpriv(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return started(folder, "-m", "fedpriv", *words)


def started(folder: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parents[2]
    path = os.pathsep.join([str(folder), str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        input=given,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_their_mistakes_are_named_like_ours(installed: Path) -> None:
    mistakes = ("--set", "mechanism.stepp=3", "--set", "model.hidden=[3]")
    wrong = fedpriv(installed, "config", "check", "mine.toml", *mistakes)
    assert wrong.returncode == 2 and "unknown key mechanism.stepp; did you mean mechanism.step?" in wrong.stderr
    assert (
        'unknown key model.hidden: "embedding" and "mlp" read it, but "narrow" reads init, units; leave it out'
        in wrong.stderr
    )


@pytest.mark.slow
def test_they_are_settings_like_ours(said: dict[str, str]) -> None:
    schema, data, listed = json.loads(said["schema"]), said["data"], said["list"]
    assert schema["$defs"]["RoundedSettings"]["properties"]["name"]["const"] == "rounded"
    assert schema["$defs"]["NarrowSettings"]["properties"]["name"]["const"] == "narrow"
    assert "stripes" in schema["$defs"]["DataConfig"]["properties"]["name"]["enum"]
    federation = schema["$defs"]["FederationConfig"]["properties"]
    assert "trusted" in federation["aggregation"]["enum"] and federation["believed"]["default"] == 0
    assert "made by the package outside" in data
    assert "Few pixels" in listed and "constant  The commonest answer" in listed
    assert "--set constant.images=20" in listed
    assert "few" in schema["$defs"]["EvadeConfig"]["properties"]["attacks"]["items"]["enum"]
    assert "brightest  White images" in listed and "adversary.brightest.light = 1.0" in listed


def test_one_that_cannot_be_imported_is_named(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(installed, tmp_path / "broken")
    (tmp_path / "broken" / "outside" / "rounded.py").write_text("import nothing_of_this_name\n")
    done = fedpriv(tmp_path / "broken", "config", "check", "mine.toml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "mechanism 'rounded' of the package outside cannot be used: ModuleNotFoundError" in done.stderr


def broken(tmp_path: Path, kind: str, entry: str, code: str) -> Path:
    """A package with one thing that cannot be used."""
    (tmp_path / "strange-1.dist-info").mkdir()
    (tmp_path / "strange-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1\n")
    (tmp_path / "strange-1.dist-info" / "entry_points.txt").write_text(f"[fedpriv.{kind}]\nodd = strange:{entry}\n")
    (tmp_path / "strange.py").write_text(f"{code}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        (
            "rules",
            "import sys; sys.exit(0)",
            "aggregation rule 'odd' of the package strange cannot be used: SystemExit",
        ),
        (
            "attacks",
            "from fedpriv.attacks.settings import Recipe; Recipe('cosine', 'adamm')",
            "cannot be used: ValidationError: Recipe: 'adamm': Input should be 'lbfgs', 'adam',",
        ),
        ("models", "Odd = 3", "network 'odd' of the package strange cannot be used: TypeError: 3 is no subclass of"),
    ],
)
def test_one_that_is_not_what_it_should_be_is_named(kind: str, code: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("")
    done = fedpriv(broken(tmp_path, kind, "Odd", code), "config", "check", "mine.toml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert words in done.stderr


@pytest.mark.slow
def test_account_knows_them(installed: Path, said: dict[str, str]) -> None:
    """The same noise under another name has the same figures."""
    ours = forked("account", "laplace", *ACCOUNT, cwd=installed)
    assert json.loads(said["doubled"])["epsilon"] == json.loads(ours.stdout)["epsilon"] > 0
    assert said["rounded"].startswith("refused: nothing is proven about rounded; allowed: central, ")


@pytest.mark.slow
def test_a_run_trains_and_attacks_with_them(installed: Path, said: dict[str, str]) -> None:
    summary = json.loads((installed / "run" / "summary.json").read_text())
    assert {attack["attack"] for attack in summary["attacks"]} >= {"brightest"}
    ledger = json.loads((installed / "run" / "ledger.json").read_text())
    assert (ledger["mechanism"], ledger["worst"]["epsilon"]) == ("rounded", None)
    # One client is believed: the other one's uploads leave no trace in the model.
    assert summary["model"] == {"name": "narrow", "parameters": 64 * 5 + 5 + 5 * 8 + 8, "tensors": [320, 5, 40, 8]}
    few, all_pixels = (curve["shares"][0]["value"] for curve in json.loads(said["few"])["curves"])
    assert all_pixels <= few <= json.loads(said["few"])["clean"]["value"]
    probed = json.loads(said["constant"])
    assert (probed["answers"], probed["results"][0]["queries"]) == ("steps:3", 5)
    page = (installed / "run" / "report.html").read_text()
    assert all(word in page for word in ("White images", "rounding", "stripes", "narrow"))
    assert "Few pixels" in page and "The commonest answer" in page
    assert "0 uploads that were asked for were not used." in said["run"] and '<h2 id="dropouts">Dropouts</h2>' in page
