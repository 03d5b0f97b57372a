"""Eavesdropping on real processes: without TLS the listener's pictures come from the traffic; with TLS it has none."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deployments import fedpriv, free_ports

from fedpriv.attacks.observation import list_observations

MLP = """
name = "wiretap"
seed = 11
[model]
name = "mlp"
hidden = [32]
[federation]
clients = CLIENTS
rounds = 1
[training]
batch_size = 1
[adversary]
attacks = ["closed_form"]
[engine]
device = "cpu"
"""

pytestmark = pytest.mark.slow


@contextmanager
def deployment(here: Path, nodes: int, *flags: str) -> Iterator[Path]:
    """A deployment with a listener; its folder."""
    (here / "mlp.toml").write_text(MLP.replace("CLIENTS", str(nodes)))
    port = free_ports(nodes + 2)
    done = fedpriv("deploy", "up", "--nodes", str(nodes), "--port", str(port), "--listener", *flags, cwd=here)
    assert done.returncode == 0, done.stderr
    try:
        yield here / "deployment"
    finally:
        assert fedpriv("deploy", "down", cwd=here).returncode == 0


def run_and_attack(here: Path) -> dict:
    """A run, then the attack on what was heard of it: the summary."""
    done = fedpriv("deploy", "run", "mlp.toml", "--out", "run", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    done = fedpriv("attack", "run", "--heard", "deployment/heard", "--out", "heard", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_tls_the_pictures_come_from_real_traffic(tmp_path: Path) -> None:
    with deployment(tmp_path, 2, "--insecure") as folder:
        summary = run_and_attack(tmp_path)
    heard = {path.name: path.read_bytes() for path in list_observations(tmp_path / "heard" / "observations")}
    served = {path.name: path.read_bytes() for path in list_observations(tmp_path / "run" / "observations")}
    assert heard == served  # the server's tap and the network's listener have the same, bit for bit
    assert len(heard) == 2
    assert summary["threat_model"]["name"] == "network-plaintext"
    (exact,) = [row for row in summary["attacks"] if row["attack"] == "closed_form"]
    assert (exact["victims"], exact["recovered"]) == (2, 2)
    assert exact["psnr"] > 60
    assert "without TLS" in summary["verdict"][0]
    assert "stored 2 uploads" in summary["verdict"][0]
    assert "2 of 2 images" in summary["verdict"][1]
    report = (tmp_path / "heard" / "report.html").read_text()
    assert "network-plaintext" in report
    # Down has not touched what was heard; the seed was never on the wire.
    (told,) = folder.glob("heard/run-*/experiment.json")
    assert json.loads(told.read_text())["seed"] == 0


def test_with_tls_the_listener_has_nothing_and_the_report_says_so(tmp_path: Path) -> None:
    with deployment(tmp_path, 1) as folder:
        summary = run_and_attack(tmp_path)
    listened = json.loads((folder / "heard" / "listener.json").read_text())
    assert set(listened["connections"]) <= {"tls", "silent"}
    assert (listened["uploads"], listened["exchanges"]) == (0, 0)
    assert listened["bytes_up"] > 10_000  # the uploads did pass
    assert not list(folder.glob("heard/run-*"))
    assert not list_observations(tmp_path / "heard" / "observations")
    assert summary["attacks"] == []
    assert summary["threat_model"]["name"] == "network-tls"
    assert "all of them TLS: it could read nothing" in summary["verdict"][0]
    assert "cannot read the uploads" in summary["verdict"][1]
    assert "could read nothing" in (tmp_path / "heard" / "report.html").read_text()
