"""Whole runs on real processes: SuperLink, SuperNodes and executors, with TLS and keys."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import psutil
import pytest
from deployments import SMALL, fedpriv, free_ports

from fedpriv.deploy.certificates import Authority, make_node_key
from fedpriv.deploy.commands import supernode
from fedpriv.deploy.folder import HOST, DeploymentFolder
from fedpriv.deploy.processes import is_alive, stop
from fedpriv.deploy.up import keys_of, look, start_process
from fedpriv.runs import RunFolder

NODES = 2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentFolder]:
    here = tmp_path_factory.mktemp("deployment")
    (here / "small.toml").write_text(SMALL.replace("clients = 3", f"clients = {NODES}"))
    port = free_ports(NODES + 3)
    done = fedpriv("deploy", "up", "--nodes", str(NODES), "--port", str(port), cwd=here)
    assert done.returncode == 0, done.stderr
    folder = DeploymentFolder(here / "deployment")
    started = folder.read().processes
    assert len(started) == 2 + 2 * NODES
    yield folder
    family = [member for one in started for member in (one.pid, *children(one.pid))]
    done = fedpriv("deploy", "down", cwd=here)
    assert done.returncode == 0, done.stderr
    assert not [pid for pid in family if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert not [path for part in (folder.tls, folder.keys, folder.seeds) for path in part.iterdir()]


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)] if psutil.pid_exists(pid) else []


def wait_for(what: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def log_of(folder: DeploymentFolder, name: str) -> str:
    path = folder.logs / f"{name}.log"
    return path.read_text(errors="replace") if path.exists() else ""


@pytest.mark.essential
def test_the_same_bits_as_inline(deployment: DeploymentFolder) -> None:
    here = deployment.path.parent
    done = fedpriv("deploy", "run", "small.toml", "--out", "deployed", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    status = look(deployment.path)
    assert (status.online, status.nodes) == (NODES, NODES)
    assert [run.status for run in status.runs] == ["finished:completed"]

    inline = fedpriv("run", "small.toml", "--out", "inline", cwd=here)
    assert inline.returncode == 0, inline.stderr
    checkpoint = Path("checkpoint") / "server.safetensors"
    assert (here / "deployed" / checkpoint).read_bytes() == (here / "inline" / checkpoint).read_bytes()
    assert json.loads(done.stdout)["engine"] == "deployment"
    names = {path.relative_to(here / "inline") for path in (here / "inline").rglob("*")}
    assert {path.relative_to(here / "deployed") for path in (here / "deployed").rglob("*")} == names | {
        Path("deployment.json")
    }
    assert (here / "deployed" / "ledger.json").read_text() == (here / "inline" / "ledger.json").read_text()


def test_who_has_no_right_to_take_part_is_refused(deployment: DeploymentFolder) -> None:
    here, record = deployment.path.parent, deployment.read()
    keys = keys_of(deployment, record)
    assert keys is not None
    strange = here / "strange"
    strange.mkdir()
    Authority().certify(strange, ("localhost", HOST))
    make_node_key(strange / "key")
    elsewhere = replace(keys, authority=strange / "ca.pem")
    port = record.port + NODES + 1
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
    # The answer of the killed node never comes; about a minute later the SuperLink says so, or the round ends.
    settings = ("federation.rounds=3", "federation.round_timeout=60")
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
    first, _, last = RunFolder(here / "killed").rounds()[1:]
    assert [failure.client for failure in first.failures] == [1]
    assert first.used == (0,)
    assert last.used == (0, 1)
    assert "client 1 left out" in outcome[0].stderr
