"""The command line as a user meets it: one clear line and the right exit code."""

import gzip
import io
import json
import math
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import numpy as np
import pytest
from rich.console import Console
from typer.main import get_command

from fedpriv.algorithms.rounds.ledger import upload_warnings
from fedpriv.core.cli.app import app
from fedpriv.core.cli.display import Display
from fedpriv.core.cli.terminal import default_folder
from fedpriv.core.config import load_experiment
from fedpriv.core.records import RoundRecord
from fedpriv.core.world import build_world
from tests.command_line import fedpriv

SMALL = """
name = "small"
seed = 3
[model]
name = "mlp"
hidden = [8]
[federation]
clients = 3
rounds = 2
[training]
batch_size = 4
[adversary]
attacks = []
[engine]
name = "inline"
device = "cpu"
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


def save_npz(path: Path, **changes: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (30, 8, 8), dtype=np.uint8),
        "y_train": np.arange(30) % 3,
        "x_test": rng.integers(0, 256, (9, 8, 8), dtype=np.uint8),
        "y_test": np.arange(9) % 3,
    }
    np.savez(path, **{**arrays, **changes})


def test_a_run_ends_with_its_result_in_words_and_the_report(here: Path) -> None:
    done = fedpriv("run", "small.toml", "--out", "out", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "No attack on uploads was run" in done.stdout
    assert done.stdout.rstrip().endswith(f"Report: {Path('out') / 'report.html'}")
    page = (here / "out" / "report.html").read_text()
    assert page.index(">Test accuracy<") < page.index("No attack on uploads was run.")
    assert 'id="pictures"' not in page and "#pictures" not in page
    summary = json.loads((here / "out" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["command"] == "fedpriv run small.toml"

    again = fedpriv("report", "out", "--open", cwd=here, BROWSER="true")
    assert again.returncode == 0, again.stderr
    again = fedpriv("run", "--resume", "out", cwd=here)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert "out is complete: running its attacks" in again.stderr


def test_json_is_all_that_json_prints(here: Path) -> None:
    done = fedpriv("run", "small.toml", "--out", "out", "--json", "--set", "seed=9", cwd=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == "out"
    assert done.stderr == ""


def test_runs_of_one_second_have_folders_of_their_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    with click.Context(click.Command("run")):
        paths = [default_folder("mine") for _ in range(3)]
        assert len({*paths}) == 3 and all(path.is_dir() for path in paths)
        (paths[1] / "config.toml").touch()
    assert [*Path("runs").iterdir()] == [paths[1]]


def test_quiet_runs_still_warn(here: Path) -> None:
    changes = ("--set", "adversary.victims=999999", "--set", 'adversary.attacks=["closed_form"]')
    done = fedpriv("run", "small.toml", "--out", "out", "-q", *changes, cwd=here)
    assert done.returncode == 0, done.stderr
    assert "warning: adversary.victims = 999999, but a round has 3 uploads: those are attacked\n" in done.stderr


def test_no_command_is_no_mistake(here: Path) -> None:
    done = fedpriv(cwd=here)
    assert done.returncode == 0
    assert "Usage: fedpriv" in done.stdout + done.stderr


def test_python_does_not_look_for_garbage_at_its_end() -> None:
    """A second of CPU time and more, after each command and each Ctrl-C."""
    code = """
import atexit, gc, sys
from fedpriv.core.cli import main

atexit.register(lambda: print(gc.get_freeze_count() > 0))  # before those of the command, so called after them
sys.argv = ["fedpriv", "--version"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


def test_ctrl_c_while_modules_load_is_one_line() -> None:
    code = """
import sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from fedpriv.core.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fedpriv: interrupted\n")


@pytest.mark.parametrize("figures", ["accuracy 100.0%  loss 12.345  ε ≤ 123,456,789", "loss 1.23e-05"])
def test_count_and_time_are_visible_in_80_columns(figures: str) -> None:
    console = Console(width=80, force_terminal=True, file=io.StringIO())
    display = Display(console)
    display._advance("closed_form", 715, 1716, figures)
    console.print(display._bars)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "715/1716" in shown
    assert "-:--:--" in shown  # left


@pytest.mark.parametrize(("seconds", "told"), [(2.5, "714 more rounds take about 29 min 45 s"), (0.05, "")])
def test_a_long_run_says_after_two_rounds_how_long_it_takes(seconds: float, told: str) -> None:
    """Also one that goes on: the first round of a process takes longer than others."""
    console = Console(width=80, file=io.StringIO())
    display = Display(console)
    for number in (1, 2, 3):
        display.round_finished(
            RoundRecord(number, 1.0, 0.5, (), (), (), seconds * (4 if number == 1 else 1), 1, 1), 716
        )
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown == (f"{told}\n" if told else "")


@pytest.mark.parametrize("pace", [1.0, 0.01])  # seconds for each of 300 iterations
def test_a_long_attack_says_how_long_it_takes_and_in_a_log_how_far_it_is(
    pace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(width=80, file=io.StringIO())
    display = Display(console)
    for done in range(1, 301):
        compiling = 1_000 * pace * (done > 1)
        monkeypatch.setattr("time.monotonic", lambda now=done * pace + compiling: now)
        display.attack_advanced("dlg", done, 300, 0.5)
        display.attack_advanced("dlg", 1, 2, math.nan)  # another part of it, which is over at once
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    if pace < 1:
        assert shown == []
    else:
        assert shown[0] == "dlg: 293 more iterations take about 4 min 53 s"
        assert shown[1:] == [f"dlg: iteration {done} of 300, loss 5.00e-01" for done in range(30, 301, 30)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rnu"], "fedpriv: No such command 'rnu'. Did you mean 'run'?\n"),
        (["config", "xyz"], "fedpriv: No such command 'xyz'. Allowed: check, show, schema\n"),
        (["config", "chek"], "fedpriv: No such command 'chek'. Did you mean 'check', 'schema'?\n"),
        (
            ["data", "--unicity", "5", "--of", "csv"],
            "fedpriv: --of csv: this data set is a file of yours, and --unicity takes those that come without one, "
            "such as location30\n",
        ),
        (["account", "gausian"], "fedpriv: No such command 'gausian'. Did you mean 'gaussian'?\n"),
        (
            ["config", "check", "small.toml", "--set", "adversary.attacks=closed"],
            'expected a list, such as ["dlg", "iga"]\n',
        ),
        (["config", "check", "small.toml", "--set", "federation.rounds=abc"], ": expected a whole number\n"),
        (["config", "check", "small.toml", "--set", "seed=99999999999999999999"], "up to 9223372036854775807\n"),
        (["config", "check", "small.toml", "--set", "mechanism.delta=0"], "= 0: allowed is above 0\n"),
        (["account", "gaussian", "--sampling-rate", "2", "--sigma", "1"], "--sampling-rate 2: allowed is from"),
        (["account", "gaussian", "--sigma", "-1"], "--sigma -1: allowed is from"),
        (["account", "gaussian", "--target-epsilon", "0"], "--target-epsilon 0: allowed is above 0"),
        (["account", "gaussian", "--epsilon", "-1"], "--epsilon -1"),
        (["run"], "run needs an experiment FILE, such as the one that fedpriv init writes, or --resume DIR"),
        (["run", "missing.toml"], "missing.toml: no such file"),
        (
            ["run", "small.toml", "--set", "mechanism.epsilonn=5"],
            "unknown key mechanism.epsilonn; did you mean mechanism.epsilon?",
        ),
        (["run", "small.toml", "--set", "training.batch_size=5000"], "larger than the data of client 0"),
        (["run", "small.toml", "--set", "engine.device=cuda"], "this machine has no cuda device"),
        (["run", "small.toml", "--set", "data.name=npz"], "data.path"),
        (["run", "small.toml", "--set", "data.name=npz", "--set", "data.path=none.npz"], "none.npz"),
        (["run", "small.toml", "--set", "data.name=npz", "--set", "data.path=cut.npz"], "cut.npz"),
        (
            ["run", "small.toml", "--set", "data.name=npz", "--set", "data.path=large.npz", "--set", "data.memory=1"],
            "large.npz: reading it takes 3 MiB of memory, data.memory = 1 allows 1; --set data.memory=3 reads it",
        ),
        (["run", "small.toml", "--set", "data.name=mnist", "--set", "data.download=false"], "mnist"),
        (["run", "small.toml", "--set", "data.name=mnist", "--set", "data.root=cut"], "train-images-idx3-ubyte.gz"),
        (["run", "small.toml", "--out", "full"], "full exists already"),
        (["run", "small.toml", "--set", "model.name=nowhere:net"], "nowhere"),
        (["run", "--resume", "full"], "full is not the folder of a run"),
        (
            ["run", "small.toml", "--resume", "full"],
            "run needs an experiment FILE, such as the one that fedpriv init writes, or --resume DIR",
        ),
        (["run", "small.toml", "--set", "federation.clients=5000"], "5000"),
        (["report", "full"], "full"),
        (["config", "check", "missing.toml"], "missing.toml: no such file"),
        (
            ["config", "check", "small.toml", "--deep", "--set", "training.batch_size=5000"],
            "batch_size = 5000: larger",
        ),
        (["confg"], "No such command 'confg'"),
        (["run", "small.toml", "--sett", "a=b"], "No such option"),
        (["deploy", "admit", "--server", "a:b:c"], "--server a:b:c: expected HOST:PORT"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(here: Path, arguments: list[str], expected: str) -> None:
    (here / "full").mkdir()
    (here / "full" / "note.txt").write_text("mine")
    save_npz(here / "good.npz")
    (here / "cut.npz").write_bytes((here / "good.npz").read_bytes()[:700])
    save_npz(here / "large.npz", x_train=np.zeros((30, 200, 200), np.uint8), x_test=np.zeros((9, 200, 200), np.uint8))
    raw = here / "cut" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte.gz").write_bytes(gzip.compress(bytes(5000))[:-9])
    before = sorted(path for path in here.rglob("*"))
    done = fedpriv(*arguments, cwd=here)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts) == before


def test_batchnorm_is_refused_with_a_mechanism_and_works_without(here: Path) -> None:
    (here / "mine.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    c, h, w = shape\n"
        "    return nn.Sequential(nn.Conv2d(c, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), "
        "nn.Linear(4 * (h - 2) * (w - 2), classes))\n"
    )
    refused = fedpriv(
        "run", "small.toml", "--set", "model.name=mine:net", "--set", "mechanism.name=gaussian", "--set",
        "mechanism.sigma=1", cwd=here,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "layer 1 mixes the examples of a batch" in refused.stderr
    done = fedpriv("run", "small.toml", "--set", "model.name=mine:net", "--out", "out", cwd=here)
    assert done.returncode == 0, done.stderr


def test_dropout_under_attack_is_a_warning(here: Path) -> None:
    (here / "mine.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, classes))\n"
    )
    done = fedpriv(
        "run", "small.toml", "--set", "model.name=mine:net", "--set", 'adversary.attacks=["iga"]', "--set",
        "adversary.iga.iterations=3", "--set", "adversary.victims=1", "--out", "out", cwd=here,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "draws random numbers while clients train" in done.stderr
    warnings = json.loads((here / "out" / "summary.json").read_text())["warnings"]
    assert any("draws random numbers while clients train" in text for text in warnings)


@pytest.mark.parametrize("command", [[], ["run"], ["report"], ["config"], ["config", "show"], ["data"]])
def test_help_is_there(here: Path, command: list[str]) -> None:
    done = fedpriv(*command, "--help", cwd=here)
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_the_help_says_what_each_argument_and_option_is() -> None:
    """Typer keeps the words of an argument by itself: a newer click once made them empty."""
    commands = [get_command(app)]
    for command in commands:  # a group adds its own
        commands += getattr(command, "commands", {}).values()
        empty = [each.name for each in command.params if not getattr(each, "help", None)]
        assert not empty, (command.name, empty)
    assert len(commands) > 30


def test_the_version_is_told(here: Path) -> None:
    done = fedpriv("--version", cwd=here)
    assert (done.returncode, done.stdout) == (0, f"fedpriv {version('fedpriv')}\n")


def test_config_show_tells_every_key(here: Path) -> None:
    done = fedpriv("config", "show", "small.toml", cwd=here)
    assert done.returncode == 0
    assert "training.batch_size" in done.stdout
    shown = json.loads(fedpriv("config", "show", "small.toml", "--json", cwd=here).stdout)
    assert shown["training"]["batch_size"] == 4


def test_what_was_given_is_printed_as_it_is(here: Path) -> None:
    done = fedpriv("config", "show", "small.toml", "--json", "--set", "data.root=a:b:c", cwd=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["root"] == "a:b:c"


def test_doctor_tells_versions_and_what_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told() -> dict[str, tuple[str, str]]:
        app(["doctor", "--json"], standalone_mode=False)
        return {row["what"]: (row["found"], row["problem"]) for row in json.loads(capsys.readouterr().out)}

    rows = told()
    assert rows["flwr"] == (f"{version('flwr')} (tested: <1.43,>=1.41)", "")
    assert rows["ray"][0].startswith(f"{version('ray')} (tested: ==")
    assert rows["extra service"] == ("installed", "") and "extra dev" not in rows
    assert "digits" in rows["data sets"][0] and "GiB free" in rows["disk"][0] and "cpu" in rows["devices"][0]
    others = {"flwr": "1.50.0", "fastapi": None}

    def changed(name: str) -> str:
        if name in others and others[name] is None:
            raise PackageNotFoundError(name)
        return others.get(name) or version(name)

    monkeypatch.setattr("fedpriv.core.cli.doctor.version", changed)
    rows = told()
    assert rows["flwr"] == ("1.50.0 (tested: <1.43,>=1.41)", "this version was not tested")
    assert rows["extra service"] == ("no fastapi: pip install 'fedpriv[service]'", "")
    app(["doctor"], standalone_mode=False)
    assert "pip install 'fedpriv[service]'" in " ".join(capsys.readouterr().out.split())


def test_data_lists_what_is_here(here: Path) -> None:
    listed = json.loads(fedpriv("data", "--json", cwd=here).stdout)
    assert {entry["name"]: entry["available"] for entry in listed}["digits"] is True


def test_data_says_what_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts against those of the arrays in the file."""
    rng = np.random.default_rng(0)
    y, y_test, client = rng.choice(["ill", "well"], 40, p=[0.2, 0.8]), np.array(["ill", "well"]), rng.choice(5, 40)
    x = rng.integers(0, 256, (42, 12, 60), np.uint8)
    np.savez(tmp_path / "own.npz", x_train=x[:40], y_train=y, x_test=x[40:], y_test=y_test, client=client)
    (tmp_path / "own.toml").write_text(
        f'data = {{ name = "npz", path = "{tmp_path / "own.npz"}", partition = "key" }}\nfederation.clients = 4\n'
    )
    asked = ["data", "--of", str(tmp_path / "own.toml")]
    app([*asked, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["example"] == "a signal of 12 series, 60 steps, as (C, H, W) = (1, 12, 60)"
    assert any("data.channels = 'first' makes it signals" in note for note in found["notes"])
    assert found["examples"] == [40, 2]
    assert found["classes"] == {name: [int((y == name).sum()), 1] for name in ("ill", "well")}
    assert found["clients"] == sorted(np.bincount(client).tolist(), reverse=True)[:4]
    app(asked, standalone_mode=False)
    shown = capsys.readouterr().out
    assert "4 clients of 5 keys in the data, training examples: " in shown and "ill (" in shown
    plain = (tmp_path / "own.toml").read_text().replace('partition = "key"', 'key = "client"')
    (tmp_path / "own.toml").write_text(plain)
    app(asked, standalone_mode=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 clients, data.partition = 'iid' ('key' would make clients of 5 keys in the data), training exam" in shown
    said = upload_warnings(build_world(load_experiment(tmp_path / "own.toml", ["training.batch_size=2"])))
    assert any(line.startswith("data.key = 'client' does not decide who holds an example") for line in said)


def test_checking_a_file_imports_nothing_slow(here: Path) -> None:
    program = (
        "import sys; from fedpriv.core.cli.app import app\n"
        "app(['config', 'check', 'small.toml'], standalone_mode=False)\n"
        "heavy = 'numpy', 'torch', 'scipy', 'sklearn', 'flwr', 'ray', 'datasets', 'matplotlib', 'jinja2', 'PIL', "
        "'pyarrow'\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=here)
    assert done.stdout.splitlines()[-1] == "[]"


def test_each_room_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    """In one process, from the lightest to the heaviest: what one room may not import the next one may."""
    program = (
        "import sys\n"
        "def imported(*names): print([name for name in names if name in sys.modules])\n"
        "import fedpriv.accounting; imported('torch', 'dp_accounting', 'flwr')\n"
        "import fedpriv.attacks.metrics; imported('torchvision', 'torchmetrics', 'lpips')\n"
        f"from fedpriv.data.datasets import list_datasets; list_datasets({str(tmp_path)!r})\n"
        "imported('torchvision', 'sklearn', 'datasets', 'flwr_datasets')\n"
        "import fedpriv.attacks; imported('flwr', 'ray')\n"
        "import fedpriv.clients.app; imported('sqlalchemy', 'matplotlib', 'ray')\n"
        "import fedpriv.core.lab, fedpriv.flower.server_app\n"
        "from fedpriv.core.finding import findings; findings()\n"
        "imported('torchvision', 'torchmetrics', 'torch._dynamo', 'matplotlib', 'jinja2', 'sqlalchemy', 'ray', "
        "'sklearn', 'pyarrow')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]"] * 6
