"""The page's own app, in the page's own words: tapped, attacked, protected; in one process, on Flower's simulation, and
on real processes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from safetensors.torch import load_file

from fedpriv.attacks.observation import list_observations, read_observation
from fedpriv.deploy import flower
from fedpriv.deploy.folder import DeploymentFolder
from fedpriv.engines.inline import run_inline
from fedpriv.errors import InputError, RunFailedError
from fedpriv.flower import privatise, tap
from fedpriv.lab.attack_tapped import attack_tapped
from fedpriv.progress import Silent
from tests.command_line import fedpriv
from tests.deploy.deployments import free_ports
from tests.docs.pages import ROOT, blocks
from tests.flower.apps import arrays, client, context, question, settings

PAGE = ROOT / "docs" / "flower-app.md"
PROJECT = """
[project]
name = "quickstart"
version = "1.0.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "quickstart.server_app:app"
clientapp = "quickstart.client_app:app"
"""
CLIENTS = 2


def written(folder: Path, protected: bool = False) -> Path:
    """The app as a reader of the page has it, with the two lines changed."""
    (folder / "quickstart").mkdir()
    (folder / "quickstart" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(PROJECT)
    texts = {block.title: block.text for block in blocks(PAGE)}
    for title in ("quickstart/task.py", "quickstart/client_app.py", "quickstart/server_app.py", "fedpriv.toml"):
        (folder / title).write_text(texts[title])
    added, line = texts["change"].strip().split("\n\n")
    code = folder / "quickstart" / "client_app.py"
    changed = code.read_text().replace("app = ClientApp()\n", f"{added}\n{line}\n")
    assert changed.count("tap(") == 1
    if protected:
        changed = changed.replace("import tap", "import privatise, tap").replace(
            "tap(__file__)]", "tap(__file__), privatise(__file__)]"
        )
        (folder / "fedpriv.toml").write_text(texts["protected.toml"])
    code.write_text(changed)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path / "runs"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
        del sys.modules[name]


def run_here(folder: Path) -> Path:
    """Run both apps in this process, and return the folder of the tap."""
    from quickstart import client_app, server_app

    torch.manual_seed(0)
    run_inline(server_app.app, client_app.app, CLIENTS)
    return folder / "runs" / "tap-1"


@pytest.mark.essential
def test_two_lines_and_one_file_give_the_images_away(home: Path) -> None:
    written(home)
    tapped = run_here(home)
    assert len(list_observations(tapped / "observations")) == CLIENTS  # of the first round only
    summary = attack_tapped(tapped, ["iga"], ["1-0"], ["adversary.iga.iterations=400"], Silent())
    attack, mean, _ = summary.attacks
    assert (attack.victims, attack.recovered, attack.label_accuracy) == (4, 4, 1.0)
    assert attack.mse < mean.mse / 100
    assert "Guess: guess-mean" in summary.verdict[0]
    assert "Proven: nothing" in summary.verdict[-1]
    assert all((tapped / picture).is_file() for picture in summary.pictures)
    assert json.loads((tapped / "attacks.json").read_text())["verdict"] == list(summary.verdict)


def test_the_tap_writes_what_was_sent_and_what_pytorch_did(home: Path) -> None:
    """The change is that of one step of SGD, computed here once more from the images that the tap kept."""
    written(home)
    tapped = run_here(home)
    from quickstart.task import Net

    observation = read_observation(tapped / "observations" / "0001-0001.safetensors")
    public, truth = observation.settings, load_file(tapped / "truth" / "0001-0001.safetensors")
    assert (public.batch_size, public.local_steps, public.learning_rate, public.optimizer) == (4, 1, 0.1, "sgd")
    assert (public.shape, public.classes, public.examples, public.momentum) == ((1, 8, 8), 10, 4, 0.0)
    net = Net()
    net.load_state_dict(observation.parameters)
    torch.nn.functional.cross_entropy(net(truth["images"]), truth["labels"]).backward()
    for name, value in net.named_parameters():
        torch.testing.assert_close(observation.upload[name], -0.1 * value.grad, atol=1e-6, rtol=1e-4)
    assert "truth" not in str(sorted(path.name for path in (tapped / "observations").iterdir()))


def test_protected_uploads_stand_between_guess_and_theorem(home: Path) -> None:
    written(home, protected=True)
    tapped = run_here(home)
    summary = attack_tapped(tapped, [], ["1-0"], ["adversary.iga.iterations=20"], Silent())
    assert summary.attacks[0].upload == "protected"
    assert summary.attacks[0].recovered == 0
    assert re.search(r"Proven, of client 0 after 1 answers.*-DP; .* in at most [\d.]+% of cases", summary.verdict[-1])
    assert read_observation(tapped / "observations" / "0001-0000.safetensors").settings.mechanism["sigma"] == 4.0
    assert json.loads((home / "privacy" / "client-0.json").read_text())["participations"] == 2
    for victim, said in (("1-9", "victim 1-9: not in"), ("2-0", "victim 2-0: not in")):
        with pytest.raises(InputError, match=said):
            attack_tapped(tapped, [], [victim], [], Silent())
    with pytest.raises(InputError, match=r"--set engine.device: of a tap's folder adversary.NAME.KEY"):
        attack_tapped(tapped, [], [], ["engine.device=cpu"], Silent())


def test_a_reply_is_passed_on_as_it_is_even_if_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    sent = {"weight": np.ones((3, 2), np.float32)}
    mod = tap(settings(tmp_path, '[tap]\nmodel = "somewhere:Net"'))
    plain, tapped = (client(mods, lambda given: {"weight": given["weight"] * 2}) for mods in ([], [mod]))
    replies = [app(question(sent), context()) for app in (plain, tapped)]
    assert replies[0].content == replies[1].content
    assert "nothing was written: the network was not seen to take images (B, C, H, W): set tap.shape" in caplog.text


def test_without_pytorch_the_settings_say_what_is_public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path))
    known = 'shape = [1, 2, 3]\nclasses = 4\nbatch_size = 5\nlocal_steps = 2\nlearning_rate = 0.5\noptimizer = "adam"'
    app = client(
        [tap(settings(tmp_path, f'[tap]\nmodel = "somewhere:Net"\n{known}\n'))], lambda given: {"w": given["w"] + 1}
    )
    app(question({"w": np.zeros((4, 6), np.float32)}), context())
    observation = read_observation(tmp_path / "tap-1" / "observations" / "0001-0003.safetensors")
    assert bool((observation.upload["w"] == 1).all())
    assert (observation.settings.batch_size, observation.settings.local_steps) == (5, 2)
    with pytest.raises(InputError, match="'somewhere:Net': module somewhere cannot be imported"):
        attack_tapped(tmp_path / "tap-1", [], [], [], Silent())


def test_evaluations_are_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRIV_RUNS", str(tmp_path / "runs"))
    app = client([tap(settings(tmp_path, '[tap]\nmodel = "somewhere:Net"'))], lambda given: given)
    sent = {"weight": np.ones(3, np.float32)}
    assert (arrays(app(question(sent, "evaluate"), context()))["weight"] == 1).all()
    assert not (tmp_path / "runs").exists()


def test_a_tap_needs_its_section(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"fedpriv.toml has no section \[tap\]"):
        tap(settings(tmp_path, ""))
    assert isinstance(ClientApp(mods=[privatise]), ClientApp)


@pytest.mark.slow
def test_on_flowers_own_simulation(tmp_path: Path) -> None:
    """`flwr run`, with the SuperLink that it would start by itself, on a port that is free."""
    (tmp_path / "app").mkdir()
    folder = DeploymentFolder(tmp_path)
    folder.flower.mkdir()
    port = free_ports(1)
    flower.write_connection(folder, f"127.0.0.1:{port}", None)
    written(tmp_path / "app")
    at = ["--host", "127.0.0.1", "--port", str(port), "--control-api-address", f"127.0.0.1:{port}"]
    command = [flower.program("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess", *at]
    with subprocess.Popen(command, cwd=tmp_path, env=flower.environment(folder), start_new_session=True) as superlink:
        try:
            run = over(folder, submitted(folder, tmp_path / "app"))
        finally:
            os.killpg(superlink.pid, signal.SIGTERM)
    assert len(list_observations(folder.runs / f"tap-{run}" / "observations")) == CLIENTS


def submitted(folder: DeploymentFolder, app: Path) -> str:
    """Send the app as soon as the SuperLink answers."""
    for _ in range(60):
        try:
            return flower.submit(folder, app, {})
        except RunFailedError:
            time.sleep(1)
    raise RunFailedError("no answer from the SuperLink")


def over(folder: DeploymentFolder, run: str) -> str:
    """Wait for the end of a run, which is to be a good one."""
    deadline = time.monotonic() + 240
    while not (status := flower.run_status(folder, run)).is_over and time.monotonic() < deadline:
        time.sleep(1)
    assert status.is_completed, status
    return run


@pytest.mark.slow
def test_on_real_processes(tmp_path: Path) -> None:
    """SuperLink, two SuperNodes and their executors; the app is sent as `flwr run` sends it."""
    (tmp_path / "app").mkdir()
    written(tmp_path / "app", protected=True)
    done = fedpriv("deploy", "up", "--nodes", str(CLIENTS), "--port", str(free_ports(CLIENTS + 3)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = DeploymentFolder(tmp_path / "deployment")
    try:
        run = over(folder, flower.submit(folder, tmp_path / "app", {}))
        tapped = folder.runs / f"tap-{run}"
        assert len(list_observations(tapped / "observations")) == CLIENTS
        command = [sys.executable, "-m", "fedpriv", "attack", str(tapped), "--set", "adversary.iga.iterations=5"]
        said = subprocess.run(command, cwd=tmp_path / "app", capture_output=True, text=True, check=True)
        assert "Proven, of client" in said.stdout
    finally:
        done = fedpriv("deploy", "down", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
