"""The package as others get it: installed from a wheel, packed by Flower, next to modules of the same names."""

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email import message_from_string as metadata_of
from importlib.metadata import Distribution, distribution
from pathlib import Path
from venv import EnvBuilder

import pytest
from flwr.app import Context, RecordDict
from flwr.superlink.grid import InMemoryGrid
from packaging.requirements import Requirement

import fedpriv as package
from fedpriv.clients.app import app as client_app
from fedpriv.core.config import load_experiment
from fedpriv.core.errors import RunFailedError
from fedpriv.engines.inline import InlineGrid
from fedpriv.flower import server_app
from tests.clone import copied
from tests.command_line import fedpriv, flower
from tests.docs.pages import blocks, words

HOME = Path(__file__).parents[1]
ROOMS = ("clients", "server", "attacks")
# Two clients, one round, one attack: enough to pass through every room.
SMALL = (
    "federation.rounds=1",
    "federation.clients=2",
    "adversary.attacks=['closed_form']",
    "adversary.victims=1",
    "engine.name=inline",
)
NAMES = "from importlib.metadata import distributions; print(*(each.name.lower() for each in distributions()))"
EXAMPLE = """
import torch
from torch import nn
from fedpriv.attacks import reconstruct

model, image = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), torch.rand(1, 1, 4, 4)
loss = nn.functional.cross_entropy(model(image), torch.tensor([1]))
upload = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True))
result = reconstruct(model, nn.functional.cross_entropy, upload, (1, 4, 4), attack="closed_form")
print(float((result.images - image).abs().max()) < 1e-4)
"""


def python(*arguments: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | changes
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=400
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = python("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=HOME)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel is unpacked, as an installer does."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder)
    return folder


def needed(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The distributions that these need, and those that they need, as they are installed here; no others."""
    found: dict[str, Distribution] = {}
    seen, waiting = set(requirements), [Requirement(each) for each in requirements]
    while waiting:
        wanted = waiting.pop()
        found[wanted.name.lower()] = here = distribution(wanted.name)
        extras = [{"extra": extra} for extra in ("", *wanted.extras)]
        further = {text for text in here.requires or () if _holds(Requirement(text), extras)} - seen
        seen |= further
        waiting += map(Requirement, further)
    return found


def _holds(requirement: Requirement, extras: Iterable[dict[str, str]]) -> bool:
    return requirement.marker is None or any(map(requirement.marker.evaluate, extras))


@pytest.fixture(scope="module")
def alone(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python in an environment with the wheel and what it says that it needs, without any extra.

    They are links to what is installed here: to install it anew, and to compile it, takes most of a minute.
    """
    folder = tmp_path_factory.mktemp("alone")
    EnvBuilder(symlinks=True, with_pip=False).create(folder)
    (site,) = folder.glob("lib/*/site-packages")
    (metadata,) = installed.glob("*.dist-info/METADATA")
    told = metadata_of(metadata.read_text())
    plain = [text for text in told.get_all("Requires-Dist", []) if _holds(Requirement(text), [{"extra": ""}])]
    for name, each in needed(plain).items():
        # Flower installs its servers' libraries; training and attacks need none of them.
        tops = {file.parts[0] for file in each.files or () if name not in ("fastapi", "uvicorn")}
        for top in tops - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(each.locate_file(top))
    for path in installed.iterdir():
        (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


def test_a_wheel_takes_one_name_only(installed: Path) -> None:
    names = {path.name for path in installed.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"fedpriv"}
    source = {path.relative_to(HOME / room).as_posix() for room in ROOMS for path in (HOME / room).rglob("*.py")}
    inside = installed / "fedpriv"
    assert source == {
        path.relative_to(inside / room).as_posix() for room in ROOMS for path in (inside / room).rglob("*.py")
    }
    assert not any(path.is_symlink() for path in inside.rglob("*"))


def users_modules(folder: Path) -> None:
    for room in ROOMS:
        (folder / f"{room}.py").write_text("raise SystemExit('a module of the user was imported')\n")


@pytest.mark.long
def test_a_wheel_works_alone(alone: Path, tmp_path: Path) -> None:
    """In an environment of its own, without a clone and without any extra, next to modules of the same names."""

    def inside(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(alone), *arguments], cwd=cwd, capture_output=True, text=True, timeout=1200)

    names = inside("-c", NAMES, cwd=tmp_path).stdout.split()
    assert {"torch", "flwr", "pydantic", "typer", "fedpriv"} <= set(names)
    assert not {"fastapi", "uvicorn", "flwr-datasets", "datasets", "pandas", "ray", "transformers", "mlflow"} & set(
        names
    )
    done = inside("-m", "fedpriv", "init", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "quickstart"
    users_modules(folder)
    (said,) = (block.text for block in blocks(HOME / "README.md") if block.language == "text")
    done = inside("-m", "fedpriv", "run", "quickstart.toml", "--out", "runs/quickstart-1-1", cwd=folder)
    assert (done.returncode, words(done.stdout)) == (0, words(said)), done.stderr
    assert (folder / "runs" / "quickstart-1-1" / "report.html").is_file()
    done = inside("-m", "fedpriv", "serve", "runs/quickstart-1-1", cwd=folder)
    assert (done.returncode, done.stderr) == (
        2,
        "fedpriv: fedpriv serve needs fastapi: pip install 'fedpriv[service]'\n",
    )


@pytest.mark.essential
def test_next_to_modules_of_the_same_names(tmp_path: Path) -> None:
    users_modules(tmp_path)
    (tmp_path / "example.py").write_text(EXAMPLE)
    done = python("example.py", cwd=tmp_path)
    assert done.stdout.split() == ["True"], done.stderr


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The app as Flower packs it from a clone and unpacks it."""
    folder = tmp_path_factory.mktemp("packed")
    # Flower looks at each file of the folder, and so at all of an environment in it.
    done = flower("build", "--app", str(copied(folder / "clone")), cwd=folder, FLWR_HOME=str(folder / "home"))
    (path,) = folder.glob("*.fab") or pytest.fail(done.stdout + done.stderr)
    with zipfile.ZipFile(path) as content:
        content.extractall(folder / "app")
    return folder / "app"


RUN_PACKED = f"""
import sys
sys.path.insert(0, sys.argv[2])
import clients.app
import fedpriv.flower.server_app
from flwr.app import Context, RecordDict
from fedpriv.engines.inline import assume_server_identity
from fedpriv.engines.inline import InlineGrid

assume_server_identity(5)
grid = InlineGrid(clients.app.app, int(sys.argv[1]))
config = {{"experiment": "configs/quickstart.toml", "overrides": "{",".join(SMALL)}", "seed": ""}}
context = Context(run_id=5, node_id=1, node_config={{}}, state=RecordDict(), run_config=config)
fedpriv.flower.server_app.app(grid, context)
"""


def test_the_packed_app_runs_the_experiment_whole(packed: Path, tmp_path: Path) -> None:
    assert not (packed / "fedpriv" / "server").exists()
    # Ray tells its workers of the app's folder by PYTHONPATH, as here; what writes the report must not look there.
    done = python("-c", RUN_PACKED, "2", str(packed), cwd=tmp_path, PYTHONPATH=str(packed))
    assert done.returncode == 0, done.stderr
    assert "round 1 of 1" in done.stderr
    assert "Proven for the whole run" in done.stdout
    report = re.search(r"^Report: (.*)$", done.stdout, re.MULTILINE)
    assert report is not None, done.stdout
    assert Path(report[1]) == tmp_path / "runs" / "run-5" / "report.html"
    assert Path(report[1]).is_file()


@pytest.mark.parametrize("limit", ["_CONNECT_SECONDS", "_STEADY_SECONDS"])
def test_too_few_supernodes_are_a_failure(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a minute, or sooner where their number stays the same; while it waits, it says so."""
    monkeypatch.setattr(f"fedpriv.server.app.{limit}", 0.2)
    monkeypatch.setattr("fedpriv.server.app._TELL_SECONDS", 0.05)
    monkeypatch.chdir(tmp_path)
    grid = InlineGrid(client_app, 5)
    config = {"experiment": "configs/quickstart.toml", "overrides": "", "seed": ""}
    context = Context(run_id=5, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    said = "clients = 8, but 5 SuperNodes are connected; a run needs one for each client"
    with pytest.raises(RunFailedError, match=said):
        server_app.app(grid, context)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == "waiting for SuperNodes: 5 of 8 are connected\n"


class Simulated(InlineGrid, InMemoryGrid):
    """A grid of ours that Flower seems to simulate."""


def test_where_flower_simulates_too_few_the_servers_process_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two SuperNodes are Flower's default; the parameters are those of a run with one for each client."""
    monkeypatch.setattr("fedpriv.server.app._TELL_SECONDS", 0.05)
    monkeypatch.setattr(server_app, "_report", lambda folder: None)
    monkeypatch.chdir(tmp_path)
    config = {
        "experiment": "configs/quickstart.toml",
        "overrides": ",".join(("federation.rounds=1", "federation.clients=3", "adversary.attacks=[]")),
        "seed": "",
    }
    for run, nodes in ((5, 2), (6, 3)):
        context = Context(run_id=run, node_id=1, node_config={}, state=RecordDict(), run_config=config)
        server_app.app(Simulated(client_app, nodes), context)
    few, enough = (tmp_path / "runs" / f"run-{run}" / "checkpoint" / "server.safetensors" for run in (5, 6))
    assert few.read_bytes() == enough.read_bytes()
    said = capsys.readouterr().err
    assert said.count("clients = 3, but 2 SuperNodes are connected: the server's process answers for all of them") == 1
    assert "flwr run . --stream --federation-config num-supernodes=3" in " ".join(said.split())


def test_init_writes_what_runs(tmp_path: Path) -> None:
    done = fedpriv("init", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "quickstart"
    assert {path.name for path in folder.iterdir()} == {"quickstart.toml", "experiment.schema.json", "README.md"}
    assert load_experiment(folder / "quickstart.toml") == load_experiment(HOME / "configs" / "quickstart.toml")
    readme = (folder / "README.md").read_text()
    assert "fedpriv run quickstart.toml" in readme
    assert len(readme.splitlines()) <= 12
    again = fedpriv("init", cwd=tmp_path)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "quickstart exists and is not empty" in again.stderr


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fedpriv("init", "--list", cwd=tmp_path_factory.mktemp("list")).stdout


@pytest.mark.parametrize("path", sorted(HOME.glob("configs/**/*.toml")), ids=lambda path: path.stem)
def test_every_example_can_be_written(path: Path, examples: str, tmp_path: Path) -> None:
    done = fedpriv("init", path.stem, "--out", "there", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "there" / path.name).read_text()
    strip = re.compile("^#.*$", re.MULTILINE)
    assert strip.sub("", written) == strip.sub("", path.read_text())
    texts = written + (tmp_path / "there" / "README.md").read_text()
    assert not re.search(r"configs/|\bmake |studies", texts)  # a clone has these, and nobody else
    assert all(file.name in done.stdout for file in (tmp_path / "there").iterdir())
    assert all((tmp_path / "there" / name).is_file() for name in re.findall(r"^#:schema (\S+)", written, re.MULTILINE))
    assert path.stem in examples
    settings = [line for line in path.read_text().splitlines() if re.match(r"(name|seed|noise) = ", line)]
    assert not [line for line in settings if line[1:] in texts.replace(written, "")], "the comment alone describes it"


def test_init_of_something_else(tmp_path: Path) -> None:
    done = fedpriv("init", "quikstart", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "fedpriv: there is no example 'quikstart'; did you mean quickstart?\n"
    assert not list(tmp_path.iterdir())


def test_the_face_of_the_package_is_what_its_stubs_say() -> None:
    """Each name that is imported when it is first used is the one that type checkers see."""
    code = Path(package.__file__).read_text()
    seen = {name: module for module, name in re.findall(r"^    from (\S+) import (\w+) as \2$", code, re.MULTILINE)}
    assert seen == package._HOME
    assert all(hasattr(package, name) for name in package._HOME)
    with pytest.raises(AttributeError, match="no attribute 'start'"):
        _ = package.start
