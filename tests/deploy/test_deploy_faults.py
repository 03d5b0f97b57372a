"""On real processes without TLS: a listener has the pictures; what lies, hangs or dies is named.

Nothing written is lost, and the run can be finished.
"""

import html
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import psutil
import pytest
from deployments import SMALL, fedpriv, free_ports, light, wait_for

from fedpriv.attacks.observation import list_observations
from fedpriv.core.records import RoundRecord
from fedpriv.core.runs import RunFolder
from fedpriv.deploy.folder import DeploymentFolder
from fedpriv.deploy.up import look

NODES = 2
CHECKPOINT = Path("checkpoint") / "server.safetensors"
# A model whose code spoils what its process sends: a client that lies, in the one app that all clients run.
LIARS = """
import sys
from dataclasses import replace

import torch
from torch import nn


def build(shape, classes):
    app = sys.modules.get("fedpriv.clients.answering")
    if app is not None and not hasattr(app, "honest"):
        app.honest = app.local_upload

        def local_upload(world, client, before, number, *secret):
            upload = app.honest(world, client, before, number, *secret)
            lie = torch.nan if (number, client) == (1, 0) else 1.0
            return replace(upload, parameters={name: value * lie for name, value in upload.parameters.items()})

        app.local_upload = local_upload
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
# Who hangs is found out by the server's clock, or by the SuperLink, which misses the node: whichever comes first.
REASONS = (((1, 0), "sent NaN or infinity in"), ((2, 1), "did not reply within 90 s|failed to report a heartbeat"))
WIRETAP = """
name = "wiretap"
seed = 11
[model]
name = "mlp"
hidden = [32]
[federation]
clients = 1
rounds = 1
[training]
batch_size = 1
[adversary]
attacks = ["closed_form"]
[engine]
device = "cpu"
"""
# Where the server is at fault one client shows it: every message is a process, and takes seconds.
ALONE = ("federation.clients=1", "federation.rounds=4")

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentFolder]:
    here = tmp_path_factory.mktemp("faults")
    (here / "small.toml").write_text(light(here, SMALL.replace("clients = 3", f"clients = {NODES}")))
    (here / "wiretap.toml").write_text(light(here, WIRETAP))
    (here / "liars.py").write_text(LIARS)
    port = str(free_ports(NODES + 2))
    done = fedpriv("deploy", "up", "--nodes", str(NODES), "--port", port, "--insecure", "--listener", cwd=here)
    assert done.returncode == 0, done.stderr
    yield DeploymentFolder(here / "deployment")
    assert fedpriv("deploy", "down", cwd=here).returncode == 0


class Deployed:
    """A run on the deployment, in the background."""

    def __init__(self, deployment: DeploymentFolder, out: str, *settings: str) -> None:
        self.here, self.folder = deployment.path.parent, RunFolder(deployment.path.parent / out)
        flags = [part for text in settings for part in ("--set", text)]
        self._before = set(deployment.runs.iterdir())
        self._runs = deployment.runs
        self._thread = Thread(target=self._go, args=(["deploy", "run", "small.toml", *flags, "--out", out],))
        self._thread.start()

    def _go(self, arguments: list[str]) -> None:
        self._done = fedpriv(*arguments, cwd=self.here)

    def wait_for_round(self, number: int) -> None:
        wait_for(lambda: len(self.served()) > number or not self._thread.is_alive())
        assert len(self.served()) > number, self.end().stderr

    def served(self) -> list[RoundRecord]:
        """The rounds that the server has written."""
        new = set(self._runs.iterdir()) - self._before
        return RunFolder(min(new)).rounds() if new else []

    def end(self) -> subprocess.CompletedProcess[str]:
        self._thread.join()
        return self._done

    def rounds(self) -> list[RoundRecord]:
        return self.folder.rounds()[1:]

    def bytes_when_finished(self) -> bytes:
        """The parameters after what is missing was done here."""
        done = fedpriv("run", "--resume", str(self.folder.path), cwd=self.here)
        assert done.returncode == 0, done.stderr
        return (self.folder.path / CHECKPOINT).read_bytes()


def inline(here: Path, name: str, *settings: str) -> bytes:
    """The parameters of the same run inline, uninterrupted."""
    out = here / f"inline-{name}"
    if not out.exists():
        done = fedpriv("run", "small.toml", *(f"--set={text}" for text in settings), "--out", out.name, cwd=here)
        assert done.returncode == 0, done.stderr
    return (out / CHECKPOINT).read_bytes()


@pytest.mark.essential
def test_without_tls_the_pictures_come_from_real_traffic(deployment: DeploymentFolder) -> None:
    here = deployment.path.parent
    done = fedpriv("deploy", "run", "wiretap.toml", "--out", "wiretap", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    done = fedpriv("attack", "wiretap", "--heard", "deployment/heard", "--out", "heard", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    heard, served = (
        {path.name: path.read_bytes() for path in list_observations(here / name / "observations")}
        for name in ("heard", "wiretap")
    )
    assert heard == served  # the server's tap and the network's listener have the same, bit for bit
    assert len(heard) == 1
    assert summary["threat_model"]["name"] == "network-plaintext"
    (exact,) = [row for row in summary["attacks"] if row["attack"] == "closed_form"]
    assert (exact["victims"], exact["recovered"]) == (1, 1)
    assert exact["psnr"] > 60
    assert "without TLS" in summary["verdict"][0]
    assert re.search(r"stored [1-9]\d* uploads?\b", summary["verdict"][0])  # of whatever ran here before, too
    assert "1 of 1 image" in summary["verdict"][1]
    assert "network-plaintext" in (here / "heard" / "report.html").read_text()
    told = [json.loads(path.read_text()) for path in deployment.path.glob("heard/run-*/experiment.json")]
    assert {experiment["seed"] for experiment in told} == {0}  # the seed was never on the wire


def test_clients_that_lie_or_hang_are_named_and_left_out(deployment: DeploymentFolder) -> None:
    run = Deployed(deployment, "liars", "model.name=liars:build", "federation.rounds=2", "federation.round_timeout=90")
    run.wait_for_round(1)
    node = psutil.Process(deployment.read().process("supernode-1").pid)
    node.send_signal(signal.SIGSTOP)
    try:
        run.wait_for_round(2)
    finally:
        node.send_signal(signal.SIGCONT)
    done = run.end()
    assert done.returncode == 0, done.stderr
    report = html.unescape((run.folder.path / "report.html").read_text())
    told = {(record.round, failure.client): failure.reason for record in run.rounds() for failure in record.failures}
    assert set(told) == {key for key, _ in REASONS}
    for key, words in REASONS:
        assert re.search(words, told[key])
        assert told[key] in report
    assert [record.used for record in run.rounds()] == [(1,), (0,)]


@pytest.fixture
def small_disk(deployment: DeploymentFolder) -> Iterator[Path]:
    """A disk of one MiB where the server writes its runs."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(deployment.runs)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    yield deployment.runs
    subprocess.run(["umount", "--lazy", str(deployment.runs)], check=True)


def test_a_full_disk_stops_the_run_and_keeps_what_there_is(deployment: DeploymentFolder, small_disk: Path) -> None:
    run = Deployed(deployment, "full", *ALONE)
    run.wait_for_round(1)
    with pytest.raises(OSError, match="No space left"), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    done = run.end()
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "No space left on device" in json.loads((run.folder.path / "summary.json").read_text())["reason"]
    assert run.rounds()[0].used == (0,)
    assert run.bytes_when_finished() == inline(deployment.path.parent, "alone", *ALONE)


# The last one: Flower's SuperNodes may stumble over what is left of a run that was stopped.
def test_a_superlink_killed_and_restarted_keeps_its_state(deployment: DeploymentFolder) -> None:
    here = deployment.path.parent
    run = Deployed(deployment, "cut", *ALONE)
    run.wait_for_round(1)
    psutil.Process(deployment.read().process("superlink").pid).send_signal(signal.SIGKILL)
    done = run.end()
    assert done.returncode == 1
    # In our words or in those of Flower's command line: whoever of the two looks first.
    words = re.compile("superlink of the deployment in .* has died|SuperLink is unavailable")
    assert words.search(done.stderr)
    summary = json.loads((run.folder.path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert words.search(summary["reason"])
    assert words.search((run.folder.path / "report.html").read_text())
    assert run.rounds()[0].used == (0,)

    again = fedpriv("deploy", "restart", cwd=here)
    assert again.returncode == 0, again.stderr
    assert "superlink" in again.stdout
    assert run.bytes_when_finished() == inline(here, "alone", *ALONE)
    wait_for(lambda: look(deployment.path).online == NODES)
    number = json.loads((run.folder.path / "deployment.json").read_text())["run_id"]
    assert f"{number} finished:stopped" in [f"{each.run_id} {each.status}" for each in look(deployment.path).runs]
