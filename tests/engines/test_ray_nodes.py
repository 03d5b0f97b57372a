"""Ray clusters of several nodes, all on this machine: who answers, and what is lost with a node.

Minutes, and memory for every node: with FEDPRIV_RAY_NODES=1 only (``make ray-test``).
"""

import json
import os
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.command_line import Started, fedpriv

pytestmark = pytest.mark.skipif(not os.environ.get("FEDPRIV_RAY_NODES"), reason="FEDPRIV_RAY_NODES is not set")

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")
HUNDRED = """
name = "hundred"
seed = 5
noise = "reproducible"
[model]
name = "mlp"
hidden = [16]
[federation]
clients = 100
rounds = 3
algorithm = "fedavg"
[training]
local_epochs = 1
batch_size = 7
[adversary]
attacks = []
[engine]
device = "cpu"
"""
# The client's step takes a while: rounds in which something can happen.
SLOW = """
import time
from torch import nn

class Slow(nn.Flatten):
    def forward(self, images):
        time.sleep(0.02)
        return super().forward(images)

def build(shape, classes):
    return nn.Sequential(Slow(), nn.Linear(64, 10))
"""
SWEEP = """
name = "seeds"
base = "hundred.toml"
seeds = [1, 2]
[set.federation]
clients = 4
rounds = 1
"""
RESOURCES = """[resources]
address = "{address}"
"""
# The quickstart has 716 rounds, and this many nodes share two cores.
SHORT = ("--set", "adversary.attacks=[]", "--set", "federation.rounds=20")
Up = Callable[..., Cluster]


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    """Start clusters, each node with one CPU; the head can be reached by ray:// where a port is given."""
    started: list[Cluster] = []
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short, as the paths of sockets have to be
        monkeypatch.setenv("RAY_TMPDIR", folder)

        def start(nodes: int, **head: object) -> Cluster:
            bare = {"include_log_monitor": False, "object_store_memory": 80 * 2**20}
            first = {"num_cpus": 1, "include_dashboard": False, "no_monitor": True, **bare, **head}
            started.append(Cluster(initialize_head=True, head_node_args=first))
            for _ in range(nodes - 1):
                started[-1].add_node(num_cpus=1, **bare)
            return started[-1]

        yield start
        for cluster in started:
            cluster.shutdown()
        for log in Path(folder).glob("ray/session_2*/logs/*.err"):  # pytest shows them where a test fails
            print(log.name, log.read_text(errors="replace")[-2000:], sep="\n")


def made(folder: Path) -> bytes:
    return (folder / "checkpoint" / "server.safetensors").read_bytes()


def made_by_sweep(folder: Path) -> list[bytes]:
    return [made(trial) for trial in sorted(folder.glob("trials/*"))]


def swept(here: Path, out: str, sweep: str) -> list[bytes]:
    """What the trials of a sweep make."""
    (here / "sweep.toml").write_text(sweep)
    done = fedpriv("sweep", "sweep.toml", "--out", out, cwd=here)
    assert done.returncode == 0, done.stderr
    return made_by_sweep(here / out)


def on(address: str) -> tuple[str, ...]:
    return ("--set", "engine.name=ray", "--set", f"engine.address={address}")


def inline(name: str, here: Path, *flags: str) -> bytes:
    done = fedpriv("run", name, *flags, "--set", "engine.name=inline", "--out", "inline", cwd=here)
    assert done.returncode == 0, done.stderr
    return made(here / "inline")


@pytest.mark.parametrize("nodes", [2, 4])
def test_runs_and_a_sweep_are_those_of_one_process(nodes: int, up: Up, tmp_path: Path) -> None:
    port = 20_000 + nodes
    cluster = up(nodes, ray_client_server_port=port)
    (tmp_path / "hundred.toml").write_text(HUNDRED)
    for number, address in enumerate((cluster.address, f"ray://127.0.0.1:{port}")):
        for name in (QUICKSTART, "hundred.toml"):
            out = f"{Path(name).stem}-{number}"
            done = fedpriv("run", name, *on(address), *SHORT, "--out", out, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        assert len(swept(tmp_path, f"sweep-{number}", SWEEP + RESOURCES.format(address=address))) == 2
    for name in (QUICKSTART, "hundred.toml"):
        wanted = inline(name, tmp_path, *SHORT)
        assert [made(tmp_path / f"{Path(name).stem}-{number}") for number in (0, 1)] == [wanted, wanted]
        subprocess.run(["rm", "-r", str(tmp_path / "inline")], check=True)
    alone = swept(tmp_path, "sweep-alone", SWEEP)
    assert [made_by_sweep(tmp_path / f"sweep-{number}") for number in (0, 1)] == [alone, alone]


@pytest.fixture
def slow(tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    """A run whose rounds take seconds."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "slow.toml").write_text(HUNDRED)
    flags = ("federation.clients=12", "federation.rounds=4", "model.name=slow:build", "training.batch_size=20")
    return tmp_path, tuple(part for flag in flags for part in ("--set", flag))


def rounds(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_node_that_dies_in_a_round_costs_nobody(up: Up, slow: tuple[Path, tuple[str, ...]]) -> None:
    here, flags = slow
    cluster = up(3)
    run = Started("run", "slow.toml", *flags, *on(cluster.address), "--out", "killed", cwd=here)
    while rounds(here / "killed") < 2:
        assert not run.is_over(), run.ended().stderr
        time.sleep(0.05)
    cluster.remove_node(next(iter(cluster.worker_nodes)))
    done = run.ended()
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (here / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert not [failure for line in lines for failure in line["failures"]]
    assert made(here / "killed") == inline("slow.toml", here, *flags)


def test_without_its_head_a_run_ends_in_one_line_and_goes_on_later(up: Up, slow: tuple[Path, tuple[str, ...]]) -> None:
    here, flags = slow
    cluster, remote = up(2), ("--set", "engine.name=ray")
    run = Started("run", "slow.toml", *flags, *remote, "--out", "killed", cwd=here, RAY_ADDRESS=cluster.address)
    while rounds(here / "killed") < 2:
        assert not run.is_over(), run.ended().stderr
        time.sleep(0.05)
    cluster.head_node.kill_gcs_server()
    cluster.head_node.kill_raylet()
    done = run.ended()
    assert done.returncode == 1, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("fedpriv: ")]
    assert "the head of the Ray cluster" in said
    resumed = fedpriv("run", "--resume", "killed", cwd=here)
    assert resumed.returncode == 0, resumed.stderr
    assert made(here / "killed") == inline("slow.toml", here, *flags)


@pytest.mark.parametrize("fault", ["no fedpriv", "another flwr"])
def test_a_node_with_other_packages_is_refused_by_name(fault: str, up: Up, tmp_path: Path) -> None:
    """A virtual environment with all packages of this one but fedpriv, which is installed by a .pth file."""
    cluster = up(1)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")], check=True)
    (packages,) = (tmp_path / "other" / "lib").glob("python*/site-packages")
    own = site.getsitepackages()[0]
    if fault == "another flwr":
        (packages / "flwr-9.9.dist-info").mkdir()
        (packages / "flwr-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: flwr\nVersion: 9.9\n")
        (packages / "fedpriv.pth").write_text(f"{ROOT}\n")
    (packages / "zz.pth").write_text(f"{own}\n")
    python = tmp_path / "other" / "bin" / "python"
    command = [
        str(python),
        "-m",
        "ray.scripts.scripts",
        "start",
        f"--address={cluster.address}",
        "--num-cpus=1",
        "--block",
    ]
    node = subprocess.Popen(command, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while sum(bool(each["Alive"]) for each in cluster.global_state.node_table()) < 2:
            assert node.poll() is None
            time.sleep(0.5)
        done = fedpriv("run", QUICKSTART, *on(cluster.address), "--out", "run", cwd=tmp_path)
    finally:
        for member in psutil.Process(node.pid).children(recursive=True):
            member.send_signal(signal.SIGTERM)
        node.terminate()
        node.wait()
    assert done.returncode == 2, done.stderr
    lacks = "has no fedpriv" if fault == "no fedpriv" else "has flwr 9.9"
    assert lacks in done.stderr, done.stderr
