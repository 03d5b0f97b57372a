"""Whole runs on real processes: SuperLink, a listener, SuperNodes and executors, with TLS and keys."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import psutil
import pytest
from deployments import SMALL, fedpriv, free_ports, light, over, wait_for

from fedpriv.attacks.observation import list_observations
from fedpriv.core.runs import RunFolder
from fedpriv.deploy import flower
from fedpriv.deploy.certificates import Authority, make_node_key
from fedpriv.deploy.folder import HOST, DeploymentFolder
from fedpriv.deploy.processes import is_alive, stop
from fedpriv.deploy.up import keys_of, look, start_process, supernode
from tests.flower.apps import own_app

NODES = 2
# Every message is a process; masked, a round has four for each client.
MASKED = ("--set=federation.secure_aggregation=true", "--set=federation.rounds=1")

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentFolder]:
    here = tmp_path_factory.mktemp("deployment")
    (here / "small.toml").write_text(light(here, SMALL.replace("clients = 3", f"clients = {NODES}")))
    port = free_ports(NODES + 4)
    done = fedpriv("deploy", "up", "--nodes", str(NODES), "--port", str(port), "--listener", cwd=here)
    assert done.returncode == 0, done.stderr
    folder = DeploymentFolder(here / "deployment")
    started = folder.read().processes
    assert len(started) == 4 + 2 * NODES
    yield folder
    family = [member for one in started for member in (one.pid, *children(one.pid))]
    done = fedpriv("deploy", "down", cwd=here)
    assert done.returncode == 0, done.stderr
    assert not [pid for pid in family if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert not [path for part in (folder.tls, folder.keys, folder.seeds) for path in part.iterdir()]
    assert (folder.heard / "listener.json").is_file()


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)] if psutil.pid_exists(pid) else []


def log_of(folder: DeploymentFolder, name: str) -> str:
    path = folder.logs / f"{name}.log"
    return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture(scope="module")
def deployed(deployment: DeploymentFolder) -> RunFolder:
    """A run with secure aggregation, whose secrets outlive each message, though every message starts a process."""
    here = deployment.path.parent
    done = fedpriv("deploy", "run", "small.toml", *MASKED, "--out", "deployed", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engine"] == "deployment"
    return RunFolder(here / "deployed")


def test_the_same_bits_as_inline(deployment: DeploymentFolder, deployed: RunFolder) -> None:
    here = deployment.path.parent
    status = look(deployment.path)
    assert (status.online, status.nodes) == (NODES, NODES)
    assert [run.status for run in status.runs] == ["finished:completed"]

    inline = fedpriv("run", "small.toml", *MASKED, "--out", "inline", cwd=here)
    assert inline.returncode == 0, inline.stderr
    names = {path.relative_to(here / "inline") for path in (here / "inline").rglob("*")}
    assert {path.relative_to(deployed.path) for path in deployed.path.rglob("*")} == names | {Path("deployment.json")}
    for name in (Path("checkpoint") / "server.safetensors", "ledger.json"):
        assert (deployed.path / name).read_bytes() == (here / "inline" / name).read_bytes()


def test_with_tls_the_listener_has_nothing_and_the_report_says_so(
    deployment: DeploymentFolder, deployed: RunFolder
) -> None:
    here = deployment.path.parent
    heard = ("--heard", str(deployment.heard), "--out", "heard")
    done = fedpriv("attack", str(deployed.path), "--attack", "closed_form", *heard, "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    listened = json.loads((deployment.heard / "listener.json").read_text())
    assert set(listened["connections"]) <= {"tls", "silent"}
    assert (listened["uploads"], listened["exchanges"]) == (0, 0)
    assert listened["bytes_up"] > 10_000  # the uploads did pass
    assert not list(deployment.heard.glob("run-*"))
    assert not list_observations(here / "heard" / "observations")
    assert summary["attacks"] == []
    assert summary["threat_model"]["name"] == "network-tls"
    assert "all of them TLS: it could read nothing" in summary["verdict"][0]
    assert "cannot read the uploads" in summary["verdict"][1]
    assert "could read nothing" in (here / "heard" / "report.html").read_text()


def test_somebodys_own_app_is_tapped_and_protected(deployment: DeploymentFolder, tmp_path: Path) -> None:
    """The app of docs/flower-app.md, sent as `flwr run` sends it."""
    own_app(tmp_path, protected=True)
    server = tmp_path / "quickstart" / "server_app.py"
    server.write_text(server.read_text().replace("num_rounds=2", "num_rounds=1"))
    run = flower.submit(deployment, tmp_path, {})
    tapped = deployment.runs / f"tap-{run}"
    wait_for(lambda: len(list_observations(tapped / "observations")) == NODES)
    done = fedpriv("attack", str(tapped), "--set", "adversary.iga.iterations=5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Proven, of client" in done.stdout
    status = over(deployment, run)
    assert status.is_completed, status


def test_who_has_no_right_to_take_part_is_refused(deployment: DeploymentFolder) -> None:
    here, record = deployment.path.parent, deployment.read()
    keys = keys_of(deployment, record)
    assert keys is not None
    strange = here / "strange"
    strange.mkdir()
    Authority().certify(strange, ("localhost", HOST))
    make_node_key(strange / "key")
    elsewhere = replace(keys, authority=strange / "ca.pem")
    port = record.port + NODES + 2
    own_key = deployment.keys / "supernode-0"
    rogues = (
        replace(supernode(0, NODES, record.server, HOST, port, keys, strange / "key"), name="strange-key"),
        replace(supernode(0, NODES, record.server, HOST, port + 1, elsewhere, own_key), name="strange-authority"),
    )
    refused = [start_process(deployment, command) for command in rogues]
    try:
        wait_for(lambda: not any(is_alive(one) for one in refused))
    finally:
        stop(refused)
    assert "No SuperNode found with the given public key" in log_of(deployment, "superlink")
    assert "CERTIFICATE_VERIFY_FAILED" in deployment.last_words("strange-authority")
    status = look(deployment.path)
    assert (status.online, status.nodes) == (NODES, NODES)


def test_a_supernode_killed_in_mid_round_and_restarted_takes_part_again(deployment: DeploymentFolder) -> None:
    here = deployment.path.parent
    outcome = []
    # The answer of the killed node never comes; about a minute later the round goes on.
    settings = ("federation.rounds=4", "federation.round_timeout=90")
    arguments = ("deploy", "run", "small.toml", *(f"--set={text}" for text in settings), "--out", "killed")
    run = Thread(target=lambda: outcome.append(fedpriv(*arguments, cwd=here)))
    run.start()
    before = log_of(deployment, "supernode-1").count("Receiving: train")
    wait_for(lambda: log_of(deployment, "supernode-1").count("Receiving: train") > before)
    victim = deployment.read().process("supernode-1")
    psutil.Process(victim.pid).send_signal(signal.SIGKILL)
    again = fedpriv("deploy", "restart", cwd=here)
    assert (again.returncode, again.stdout) == (0, "Started again: supernode-1\n"), again.stderr
    run.join()
    assert outcome[0].returncode == 0, outcome[0].stderr
    first, *later = RunFolder(here / "killed").rounds()[1:]
    # It is asked again if it had left its secret on its disk before it was killed.
    lost = [failure.client for failure in first.failures]
    assert (lost, first.used) in (([1], (0,)), ([], (0, 1)))
    assert later[-1].used == (0, 1)
    assert ("client 1 left out" in outcome[0].stderr) == bool(lost)
