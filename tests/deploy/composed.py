"""A compose file without Docker: its services as plain processes, with hosts mapped to the loopback, paths to folders.

Commands, environment, health checks, mounts and the order of starting are read from the file, so that what is tested is
what it says.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from deployments import free_ports

from fedpriv.deploy.folder import is_free
from fedpriv.deploy.processes import StartedProcess, is_alive, start, stop

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SECONDS = 240.0


def settings() -> dict[str, str]:
    """The variables that .env sets."""
    lines = [line for line in (ROOT / ".env").read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """The value with ${NAME:-default} replaced, as compose does it."""
    if isinstance(value, dict):
        return {key: interpolated(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each, variables) for each in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: variables.get(found[1]) or found[2] or "", value)
    return value


def services(profile: str, **variables: str) -> dict[str, dict[str, Any]]:
    """The services of a profile."""
    content = interpolated(yaml.safe_load(COMPOSE.read_text()), {**settings(), **variables})
    return {name: each for name, each in content["services"].items() if profile in each["profiles"]}


def image_environment() -> dict[str, str]:
    """What the last stage of the Dockerfile sets, but for the search path."""
    last = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").split("\nFROM ")[-1]
    lines = [line.removeprefix("ENV ") for line in last.splitlines() if line.startswith("ENV ")]
    pairs = dict(word.split("=", 1) for line in lines for word in line.split())
    return {name: value for name, value in pairs.items() if name != "PATH"}


def words(command: str | list[str]) -> list[str]:
    """A command as its words, as compose reads it."""
    return shlex.split(command) if isinstance(command, str) else [str(word) for word in command]


class Composed:
    """The services of one profile, as processes in a folder; with fewer SuperNodes, where the settings say so."""

    def __init__(self, folder: Path, profile: str, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        names = [name for name in services(profile) if int((re.findall(r"-(\d)", name) or ["0"])[0]) < nodes]
        first = free_ports(2 * len(names))
        self.port = first
        # No profile is named, which would have to have as many SuperNodes.
        settled = services(profile, FEDPRIV_PORT=str(first), FEDPRIV_NODES=str(nodes), COMPOSE_PROFILES=",")
        self.services = {name: settled[name] for name in names}
        # Two ports a service at most: its own API, and its health.
        self._ports: dict[tuple[str, str], int] = {}
        self._free = iter(range(first + 1, first + 2 * len(names)))
        for name, each in self.services.items():
            for published in each.get("ports", ()):
                self._ports[name, published.split(":")[-1]] = first
        self.started: dict[str, StartedProcess] = {}
        self._healthy: set[str] = set()

    def up(self) -> None:
        """Start all services, each when what it depends on is as the file wants it."""
        waiting = dict(self.services)
        while waiting:
            ready = next(name for name, each in waiting.items() if not set(each.get("depends_on", ())) & set(waiting))
            service = waiting.pop(ready)
            for other, wanted in service.get("depends_on", {}).items():
                self._wait(other, wanted["condition"])
            self._start(ready, service)
        for name, each in self.services.items():
            if "healthcheck" in each:
                self._wait(name, "service_healthy")

    def down(self) -> None:
        """End all processes."""
        stop(list(self.started.values()))

    def log(self, name: str) -> str:
        """What a service printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _port(self, service: str, port: str) -> int:
        if (service, port) not in self._ports:
            self._ports[service, port] = next(self._free)
        return self._ports[service, port]

    def _mounts(self, name: str, service: Mapping[str, Any]) -> dict[str, Path]:
        """The folder for each mounted path; each service has a /tmp of its own."""
        found = {"/tmp": self.folder / "tmp" / name, "/volumes": self.folder / "volumes"}
        for mount in service.get("volumes", ()):
            if isinstance(mount, dict):
                found[mount["target"]] = self.folder / mount["source"]
            else:
                source, target, *_ = mount.split(":")
                found[target] = self.folder / "volumes" / source
        for path in found.values():
            path.mkdir(parents=True, exist_ok=True)
        return found

    def _mapped(self, text: str, name: str, service: Mapping[str, Any]) -> str:
        """Text with hosts, ports and paths as they are here."""
        mounts = self._mounts(name, service)
        longest_first = "|".join(re.escape(target) for target in sorted(mounts, reverse=True))
        text = re.sub(rf"(?<![\w./-])({longest_first})(?=[/\"']|$)", lambda found: str(mounts[found[1]]), text)
        for host in self.services:
            text = re.sub(
                rf"(?<![\w./-]){host}:(\d+)", lambda found, host=host: f"127.0.0.1:{self._port(host, found[1])}", text
            )
        return re.sub(
            r"(localhost|127\.0\.0\.1):(\d{4})\b", lambda found: f"{found[1]}:{self._port(name, found[2])}", text
        )

    def command(self, name: str, text: str | list[str]) -> list[str]:
        """A command as it is here."""
        service = self.services[name]
        found = [self._mapped(word, name, service) for word in words(text)]
        for flag, place in (("--port", 1), ("--host", 1)):
            if flag in found and name != "setup" and not name.endswith("-setup"):
                at = found.index(flag) + place
                found[at] = "127.0.0.1" if flag == "--host" else str(self._port(name, found[at]))
        return [sys.executable, *found[1:]] if found[0] == "python" else found

    def _environment(self, name: str) -> dict[str, str]:
        service = self.services[name]
        own = {**image_environment(), **service.get("environment", {})}
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        threads = {key: value for key, value in os.environ.items() if key == "OMP_NUM_THREADS"}  # of whoever tests
        return {"PATH": path, **threads, **{key: self._mapped(value, name, service) for key, value in own.items()}}

    def _start(self, name: str, service: Mapping[str, Any]) -> None:
        if name == "admit":  # a command of Flower's for each
            for key in (self.folder / "volumes" / "admission").glob("supernode-*.pub"):
                if int(key.stem.removeprefix("supernode-")) >= self.nodes:
                    key.unlink()
        command, environment = self.command(name, service["command"]), self._environment(name)
        where = self.folder / "tmp" / name
        self.started[name] = start(name, command, environment, where, self.folder / f"{name}.log")

    def _wait(self, name: str, condition: str) -> None:
        deadline = time.monotonic() + _SECONDS
        while not self._is(name, condition):
            assert time.monotonic() < deadline, f"{name} is not {condition}: {self.log(name)}"
            time.sleep(0.5)

    def _is(self, name: str, condition: str) -> bool:
        alive = is_alive(self.started[name])
        if condition == "service_completed_successfully":
            assert alive or "fedpriv: " not in self.log(name), self.log(name)
            return not alive
        assert alive, f"{name} has ended: {self.log(name)}"
        return condition == "service_started" or name in self._healthy or self._is_healthy(name)

    def _is_healthy(self, name: str) -> bool:
        kind, *test = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        command = self.command(name, test)
        (port,) = re.findall(r"(?:localhost|127\.0\.0\.1):(\d+)", " ".join(command))
        if is_free(int(port)):  # a look is a process
            return False
        done = subprocess.run(command, env=self._environment(name), capture_output=True, timeout=60)
        self._healthy |= {name} if done.returncode == 0 else set()
        return done.returncode == 0
