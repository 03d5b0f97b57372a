"""The deployment in real containers: ``make docker-test``, with a Docker engine; outside of the default run of tests.

A copy of the checkout is built and started under a project name of its own, and removed in the end. What a machine's
package registry needs is handed in by the environment: FEDPRIV_DOCKER_PIP (a pip.conf), FEDPRIV_DOCKER_UV (a uv.toml)
and FEDPRIV_DOCKER_WHEELS (a folder with PyTorch's wheels, then taken instead of uv's --torch-backend cpu, in their
versions instead of the pinned ones).

Where others use the cores, too, all containers together get as much of them as one process of the machine. A share of
its own for Docker's control group (``cpu.shares``) halved the time here.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from threading import Thread

import yaml

ROOT = Path(__file__).parents[2]
IMAGE = "fedpriv:0.3.0"
LARGEST_IMAGE = 2e9
SECONDS = 900.0
SMALL = """
name = "small"
seed = 3
noise = "reproducible"
[model]
name = "mlp"
hidden = [12]
[federation]
clients = {clients}
rounds = {rounds}
round_timeout = 900
[training]
batch_size = 4
learning_rate = 0.5
[mechanism]
name = "gaussian"
sigma = 1.0
[adversary]
attacks = ["closed_form"]
victims = 1
[engine]
device = "cpu"
"""
# Asked from a SuperNode's container: what it gets of the SuperLink.
REACH = """
import socket, ssl, urllib.error, urllib.request
trust = ssl.create_default_context(cafile="/keys/ca.pem")
def status(path):
    try:
        asked = urllib.request.Request("https://gateway:8000" + path, data=b"")
        return urllib.request.urlopen(asked, context=trust).status
    except urllib.error.HTTPError as error:
        return error.code
try:
    socket.create_connection(("superlink", 8000), timeout=5)
    print("superlink reached")
except OSError:
    print("superlink hidden")
print(status("/v1/control/register-node"), status("/v1/runtime/pull-messages"), status("/v1/fleet/x") != 403)
"""
REGISTER = """
from pathlib import Path
from fedpriv.deploy.certificates import make_node_key
from fedpriv.deploy.containers import admit
keys = Path("/tmp/strange"); keys.mkdir(); make_node_key(keys / "supernode-9")
(keys / "ca.pem").write_bytes(Path("/keys/ca.pem").read_bytes())
admit("gateway:8000", keys)
"""


class Project:
    """A copy of the checkout, as a compose project."""

    def __init__(self, folder: Path, eight: int) -> None:
        self.eight = eight  # how often eight nodes are compared with inline
        self.folder, self.work = folder / "project", folder / "work"
        self.name = f"fedpriv-{folder.name.lower().replace('_', '-')}"
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, files.decode().split("\0")):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.folder / name, follow_symlinks=False)
        if wheels := os.environ.get("FEDPRIV_DOCKER_WHEELS"):
            _pin(self.folder / "containers" / "constraints.txt", Path(wheels))
        self.user = os.getuid() or 1000
        self.work.mkdir()
        for path in (self.work, self.folder / "deployment", self.folder / "deployment" / "seeds"):
            os.chown(path, self.user, self.user)
        (self.folder / "override.yml").write_text(yaml.safe_dump(_override()))
        self.settings = {"FEDPRIV_PORT": "18600", "COMPOSE_PROFILES": "three", "FEDPRIV_NODES": "3"}

    def compose(self, *arguments: str, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run ``docker compose``."""
        own = {"FEDPRIV_UID": str(self.user), "FEDPRIV_GID": str(self.user), **self.settings, **settings}
        files = ("--file", "docker-compose.yml", "--file", "override.yml")
        command = ["docker", "compose", "--project-name", self.name, *files, *arguments]
        done = subprocess.run(command, cwd=self.folder, env={**os.environ, **own}, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{' '.join(arguments)}: {done.stderr[-3000:]}"
        return done

    def up(self, **settings: str) -> float:
        """Start a profile, and return after how many seconds all is healthy."""
        began = time.monotonic()
        self.settings |= settings
        self.compose("up", "--detach", "--no-build")
        self.wait(self.is_healthy)
        return time.monotonic() - began

    def is_healthy(self) -> bool:
        """Whether all services run and are well, but for those that run once."""
        states = self.containers().values()
        return all(state["Health"] == "healthy" for state in states if state["State"] != "exited")

    def containers(self) -> dict[str, dict[str, str]]:
        """The containers by service, ended ones included."""
        lines = self.compose("ps", "--all", "--format", "json").stdout.splitlines()
        return {state["Service"]: state for state in map(json.loads, lines)}

    def wait(self, what: Callable[[], bool]) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + SECONDS
        while not what():
            assert time.monotonic() < deadline, self.compose("ps", "--all").stdout
            time.sleep(1)

    def fedpriv(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the image's own ``fedpriv`` on this machine's network, as a user does."""
        mounts = ("--volume", f"{self.folder / 'deployment'}:/deployment", "--volume", f"{self.work}:/experiments")
        user = (
            "--user",
            f"{self.user}:{self.user}",
            "--tmpfs",
            "/tmp",
            "--workdir",
            "/experiments",
            "--network",
            "host",
        )
        command = ["docker", "run", "--rm", *user, *mounts, IMAGE, "fedpriv", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    def inside(self, service: str, code: str) -> subprocess.CompletedProcess[str]:
        """Run Python in a service's container."""
        return self.compose("exec", "--no-TTY", service, "python", "-c", code, check=False)

    def experiment(self, name: str, clients: int, rounds: int) -> str:
        """Write an experiment, and return its path in the container."""
        (self.work / name).write_text(SMALL.format(clients=clients, rounds=rounds))
        return f"/experiments/{name}"

    def inline(self, experiment: str) -> dict[str, str]:
        """What the run leaves inline, by file."""
        out = f"inline-{Path(experiment).stem}"
        if not (self.work / out).exists():
            done = self.fedpriv("run", experiment, "--set", "engine.name=inline", "--out", f"/experiments/{out}")
            assert done.returncode == 0, done.stderr
        return hashes(self.work / out)

    def deployed(self, experiment: str, out: str) -> subprocess.CompletedProcess[str]:
        """Run an experiment on the deployment."""
        return self.fedpriv("deploy", "run", experiment, "--dir", "/deployment", "--out", f"/experiments/{out}")


def _override() -> dict[str, object]:
    """What the build is given of this machine's settings."""
    files = {name: os.environ.get(f"FEDPRIV_DOCKER_{name.upper()}", "") for name in ("pip", "uv")}
    secrets = {name: {"file": path} for name, path in files.items() if path}
    build: dict[str, object] = {"network": "host", "secrets": list(secrets)}
    if wheels := os.environ.get("FEDPRIV_DOCKER_WHEELS"):
        build |= {"additional_contexts": {"wheels": wheels}, "args": {"TORCH": ""}}
    return {"services": {"setup": {"build": build}}, **({"secrets": secrets} if secrets else {})}


def _pin(constraints: Path, wheels: Path) -> None:
    """Have the build take the wheels of a folder, of whatever version they are."""
    given = dict(wheel.name.split("-")[:2] for wheel in wheels.glob("*.whl"))
    lines = constraints.read_text().splitlines()
    names = [line.partition("==")[0] for line in lines]
    pins = [f"{name}=={given[name]}" if name in given else line for name, line in zip(names, lines, strict=True)]
    constraints.write_text("\n".join(pins) + "\n")


def hashes(run: Path) -> dict[str, str]:
    """The digests of what a run on a deployment shares with one inline."""
    parts = ("ledger.json", "checkpoint/*.safetensors", "observations/*", "reconstructions/**/*.png")
    files = sorted(path for part in parts for path in run.glob(part) if path.is_file())
    return {str(path.relative_to(run)): sha256(path.read_bytes()).hexdigest() for path in files}


def test_build(project: Project) -> str:
    began = time.monotonic()
    project.compose("build", "setup")
    seconds = time.monotonic() - began
    inspect = ["docker", "image", "inspect", "--format", "{{.Size}}", IMAGE]
    size = int(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
    assert size < LARGEST_IMAGE, size
    return f"{size / 1e9:.2f} GB in {seconds:.0f} s"


def test_owner(project: Project) -> str:
    done = project.compose("run", "--rm", "--no-deps", "setup", check=False, FEDPRIV_UID=str(project.user + 1))
    said = done.stdout + done.stderr
    assert f"set FEDPRIV_UID={project.user}" in said, said
    return "a folder of another user's names FEDPRIV_UID"


def test_three(project: Project) -> str:
    seconds = project.up()
    experiment = project.experiment("three.toml", 3, 2)
    done = project.deployed(experiment, "three")
    assert done.returncode == 0, done.stderr
    assert hashes(project.work / "three") == project.inline(experiment) != {}
    return f"healthy in {seconds:.0f} s; {len(project.inline(experiment))} files as inline"


def test_isolation(project: Project) -> str:
    reach = project.inside("supernode-0", REACH)
    assert reach.stdout.split() == ["superlink", "hidden", "403", "403", "True"], reach.stdout + reach.stderr
    register = project.inside("supernode-0", REGISTER)
    assert register.returncode != 0, register.stdout
    listing = project.inside("clientapp-0", "import os; print(os.listdir('/deployment'), os.listdir('/keys'))")
    assert listing.stdout.startswith("['seeds'] "), listing.stdout + listing.stderr
    hidden = project.inside("clientapp-0", "import socket; socket.create_connection(('gateway', 8000), 5)")
    other = project.inside("clientapp-0", "import socket; socket.create_connection(('supernode-1', 9094), 5)")
    assert hidden.returncode != 0 != other.returncode
    found = subprocess.run(
        [
            "docker",
            "run",
            "--rm",
            IMAGE,
            "sh",
            "-c",
            "ls /keys /deployment/seeds; find / -xdev -name '*.key' 2>/dev/null",
        ],
        capture_output=True,
        text=True,
    )
    assert "server.key" not in found.stdout, found.stdout
    return "clients reach neither the SuperLink nor each other; control requests are refused; no key in the image"


def test_kills(project: Project) -> str:
    experiment = project.experiment("kills.toml", 3, 6)
    return "; ".join(
        f"{part}: {_killed(project, experiment, part)}"
        for part in ("clientapp-1", "supernode-1", "serverapp", "superlink")
    )


def _killed(project: Project, experiment: str, part: str) -> str:
    """Kill a part in a run, start it again as the documentation says, and say how the run ended."""
    wanted, out, outcome = project.inline(experiment), f"killed-{part}", list[subprocess.CompletedProcess[str]]()
    runs = project.folder / "deployment" / "runs"
    earlier = set(runs.iterdir())
    thread = Thread(target=lambda: outcome.append(project.deployed(experiment, out)))
    thread.start()
    project.wait(lambda: _rounds(set(runs.iterdir()) - earlier) >= 2 or not thread.is_alive())
    project.compose("kill", part)
    time.sleep(3)
    project.compose("up", "--detach", "--no-build")
    thread.join()
    project.wait(project.is_healthy)
    if outcome[0].returncode == 0:
        verdict = " ".join(json.loads((project.work / out / "summary.json").read_text())["verdict"])
        return (
            "went on" if hashes(project.work / out) == wanted else f"went on, and says: {verdict.split('Left out')[1]}"
        )
    assert "docker compose up --detach" in outcome[0].stderr, outcome[0].stderr
    resumed = project.fedpriv("run", "--resume", f"/experiments/{out}")
    assert resumed.returncode == 0, resumed.stderr
    assert hashes(project.work / out) == wanted
    return "failed with the commands that go on, and was resumed to the same bytes"


def _rounds(runs: Iterable[Path]) -> int:
    files = [run / "metrics.jsonl" for run in runs]
    return max((len(path.read_text().splitlines()) for path in files if path.exists()), default=0)


def test_host(project: Project) -> str:
    before = {name: state["ID"] for name, state in project.containers().items()}
    project.up(FEDPRIV_HOST="fl.example.org")
    after = {name: state["ID"] for name, state in project.containers().items()}
    assert not {name for name in before if before[name] == after[name]}
    experiment = project.experiment("three.toml", 3, 2)
    assert project.deployed(experiment, "renamed").returncode == 0
    assert hashes(project.work / "renamed") == project.inline(experiment)
    project.settings["FEDPRIV_HOST"] = ""
    return "a changed name makes all containers anew, and the run is the same"


def test_eight(project: Project) -> str:
    project.compose("--profile", "*", "down", "--volumes")
    refused = project.compose("up", "--detach", "--no-build", check=False, COMPOSE_PROFILES="eight")
    assert refused.returncode != 0
    assert "set FEDPRIV_NODES=8" in project.compose("logs", "setup", COMPOSE_PROFILES="eight").stdout
    project.compose("--profile", "*", "down", "--volumes")
    seconds = project.up(COMPOSE_PROFILES="eight", FEDPRIV_NODES="8")
    experiment = project.experiment("eight.toml", 8, 2)
    for number in range(project.eight):
        done = project.deployed(experiment, f"eight-{number}")
        assert done.returncode == 0, done.stderr
        assert hashes(project.work / f"eight-{number}") == project.inline(experiment), done.stderr
    return f"healthy in {seconds:.0f} s; {project.eight} of {project.eight} as inline"


def test_down(project: Project) -> str:
    project.compose("--profile", "*", "down", "--volumes")
    project.up(COMPOSE_PROFILES="wiretap", FEDPRIV_NODES="3")
    project.compose("--profile", "*", "down", "--volumes", COMPOSE_PROFILES="three")
    left = ["docker", "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={project.name}"]
    assert not subprocess.run(left, capture_output=True, text=True, check=True).stdout
    return "no container of any profile is left"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eight", type=int, default=1, help="how often eight nodes are compared with inline")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts, after the build")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="docker-") as folder:
        project = Project(Path(folder), chosen.eight)
        try:
            print("build:", test_build(project), flush=True)
            for name in chosen.only:
                print(f"{name}:", PARTS[name](project), flush=True)
        except BaseException:
            print(project.compose("logs", "--timestamps", "--tail", "40", check=False).stdout)
            raise
        finally:
            project.compose("--profile", "*", "down", "--volumes", check=False)


PARTS: dict[str, Callable[[Project], str]] = {
    "owner": test_owner,
    "three": test_three,
    "isolation": test_isolation,
    "kills": test_kills,
    "host": test_host,
    "eight": test_eight,
    "down": test_down,
}


if __name__ == "__main__":
    main()
