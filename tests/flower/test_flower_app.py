"""The page's own app, in the page's own words: tapped, attacked, protected; in one process and on Flower's simulation.

On real processes it is in tests/deploy.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedpriv.attacks.observation import list_observations, read_observation
from fedpriv.core.errors import InputError
from fedpriv.core.progress import Silent
from fedpriv.deploy import flower
from fedpriv.deploy.folder import DeploymentFolder, is_free
from fedpriv.engines.inline import InlineGrid, run_server
from fedpriv.flower import tap
from fedpriv.flower.attack import attack_tapped
from tests.deploy.deployments import free_ports, over, wait_for
from tests.flower.apps import client, context, own_app, question, settings

CLIENTS = 2


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
    run_server(server_app.app, InlineGrid(client_app.app, CLIENTS))
    return folder / "runs" / "tap-1"


@pytest.mark.essential
def test_two_lines_and_one_file_give_the_images_away(home: Path) -> None:
    own_app(home)
    tapped = run_here(home)
    assert len(list_observations(tapped / "observations")) == CLIENTS  # of the first round only
    summary = attack_tapped(tapped, ["iga"], ["1-0"], ["adversary.iga.iterations=400"], Silent())
    attack, mean, _ = summary.attacks
    assert (attack.victims, attack.recovered, attack.label_accuracy) == (4, 4, 1.0)
    assert attack.mse < mean.mse / 100
    assert "hold the parameters after training (compared with the network that was watched)" in summary.verdict[0]
    assert "Guess: guess-mean" in summary.verdict[1]
    assert "Proven: nothing" in summary.verdict[-1]
    assert all((tapped / picture).is_file() for picture in summary.pictures)
    assert json.loads((tapped / "attacks.json").read_text())["verdict"] == list(summary.verdict)


def test_the_tap_writes_what_was_sent_and_what_pytorch_did(home: Path) -> None:
    """The change is that of one step of SGD, computed here once more from the images that the tap kept."""
    own_app(home)
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
    assert not (tapped / "base.safetensors").exists()  # the whole network is in the message


def test_protected_uploads_stand_between_guess_and_theorem(home: Path) -> None:
    own_app(home, protected=True)
    tapped = run_here(home)
    summary = attack_tapped(tapped, [], ["1-0"], ["adversary.iga.iterations=20"], Silent())
    assert summary.attacks[0].upload == "protected"
    assert summary.attacks[0].recovered == 0
    assert re.search(r"Proven, of client 0 after 1 answer.*-DP; .* in at most [\d.]+% of cases", summary.verdict[-1])
    assert read_observation(tapped / "observations" / "0001-0000.safetensors").settings.mechanism["sigma"] == 4.0
    assert json.loads((home / "privacy" / "client-0.json").read_text())["participations"] == 2
    for victim, said in (("1-9", "victim 1-9: not in"), ("2-0", "victim 2-0: not in")):
        with pytest.raises(InputError, match=said):
            attack_tapped(tapped, [], [victim], [], Silent())
    with pytest.raises(InputError, match=r"--set engine.device: allowed is adversary.NAME.KEY of an attack"):
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
    assert "no gradient attack fits: PyTorch was not seen to train a network with these arrays" in caplog.text


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
    with pytest.raises(InputError, match=r"tap\.model = 'somewhere:Net': no module somewhere in "):
        attack_tapped(tmp_path / "tap-1", [], [], [], Silent())


def test_a_folder_of_an_earlier_version_is_read(home: Path) -> None:
    """It has no messages, no order, and clients without a form of their reply."""
    own_app(home)
    tapped = run_here(home)
    for path in (tapped / "messages").iterdir():
        path.unlink()
    (tapped / "messages").rmdir()
    for path in (tapped / "observations").glob("*.json"):
        about = json.loads(path.read_text())
        del about["order"]
        path.write_text(json.dumps(about))
    summary = attack_tapped(tapped, [], ["1-0"], ["adversary.iga.iterations=20"], Silent())
    assert summary.attacks[0].victims == 4 and "Replies" not in summary.verdict[0]
    # Four pictures are offered for each of four images among five.
    assert any("of 4 (each among 5; a guess is right in at most 80.0%)" in line for line in summary.verdict)


@pytest.mark.slow
def test_on_flowers_own_simulation(tmp_path: Path) -> None:
    """`flwr run`, with the SuperLink that it would start by itself, on a port that is free."""
    (tmp_path / "app").mkdir()
    folder = DeploymentFolder(tmp_path)
    folder.flower.mkdir()
    port = free_ports(1)
    flower.write_connection(folder, f"127.0.0.1:{port}", None)
    own_app(tmp_path / "app")
    at = ["--host", "127.0.0.1", "--port", str(port), "--control-api-address", f"127.0.0.1:{port}"]
    command = [flower.program("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess", *at]
    with subprocess.Popen(command, cwd=tmp_path, env=flower.environment(folder), start_new_session=True) as superlink:
        try:
            wait_for(lambda: not is_free(port))
            run = flower.submit(folder, tmp_path / "app", {})
            tapped = folder.runs / f"tap-{run}"
            wait_for(lambda: len(list_observations(tapped / "observations")) == CLIENTS)
            status = over(folder, run)
        finally:
            os.killpg(superlink.pid, signal.SIGTERM)
    assert status.is_completed, status
