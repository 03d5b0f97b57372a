"""Ask Flower's command line for JSON, and the SuperLink for its health; exit codes are never trusted, answers are."""

import json
import os
import re
import ssl
import subprocess
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from shutil import which
from typing import Any

import tomli_w

from fedpriv.core.errors import RunFailedError
from fedpriv.core.files import write_whole
from fedpriv.core.seeds import MEMORY, SEEDS
from fedpriv.deploy.certificates import end_of
from fedpriv.deploy.folder import DeploymentFolder, DeploymentRecord
from fedpriv.deploy.processes import is_alive

_CONNECTION = "fedpriv"
_PATIENCE_SECONDS = 60.0
# Flower draws a frame around some of its complaints, and colours others.
_ORNAMENT = re.compile(r"\x1b\[[0-9;]*m|[\u2500-\u257f]")


class NoAnswerError(RunFailedError):
    """Flower's command was still waiting for the SuperLink when its time was over."""


@dataclass(frozen=True)
class RunStatus:
    """What Flower says of a run."""

    run_id: str  # its number
    status: str  # such as `running` or `finished:completed`
    details: str  # why it failed, if it did

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return self.status.startswith("finished")

    @property
    def is_completed(self) -> bool:
        """Whether the server's part ended as it should."""
        return self.status == "finished:completed"


def program(name: str) -> str:
    """Return the path of one of Flower's programs: next to this Python, else on the search path."""
    own = Path(sysconfig.get_path("scripts")) / name
    path = str(own) if own.is_file() else which(name)
    if path is None:
        raise RunFailedError(f"{name} is missing from {own.parent} and from PATH; install Flower: pip install flwr")
    return path


def environment(folder: DeploymentFolder) -> dict[str, str]:
    """The environment of a deployment's processes: Flower's programs, no usage reports, own modules."""
    variables = dict(os.environ)
    path = [str(folder.programs), sysconfig.get_path("scripts"), variables.get("PATH", "")]
    modules = [str(Path.cwd()), variables.get("PYTHONPATH", "")]
    return {
        **variables,
        "PATH": os.pathsep.join(filter(None, path)),
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        "FLWR_HOME": str(folder.flower),
        "FLWR_TELEMETRY_ENABLED": variables.get("FLWR_TELEMETRY_ENABLED", "0"),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FEDPRIV_RUNS": str(folder.runs),
        SEEDS: str(folder.seeds),
        MEMORY: str(folder.clients),
    }


def write_connection(folder: DeploymentFolder, server: str, authority: Path | None) -> None:
    """Tell Flower's command line how to reach the SuperLink: checked against ``authority``, or in the clear."""
    trust: dict[str, Any] = {"insecure": True} if authority is None else {"root-certificates": str(authority)}
    connection = {"superlink": {"default": _CONNECTION, _CONNECTION: {"address": server, **trust}}}
    write_whole(folder.flower / "config.toml", tomli_w.dumps(connection).encode())


def connect(folder: DeploymentFolder, record: DeploymentRecord) -> None:
    """Tell Flower's command line how to reach this deployment's SuperLink."""
    write_connection(folder, record.server, None if record.insecure else folder.tls / "ca.pem")


def register(folder: DeploymentFolder, public_key: Path) -> str:
    """Let the SuperNode with this key take part; returns its number."""
    return str(_ask(folder, "supernode", "register", str(public_key))["node-id"])


def online_nodes(folder: DeploymentFolder) -> tuple[str, ...]:
    """The numbers of the SuperNodes that are connected."""
    nodes = _ask(folder, "supernode", "list")["nodes"]
    return tuple(str(node["node-id"]) for node in nodes if node["status"] == "online")


def submit(folder: DeploymentFolder, app: Path, settings: Mapping[str, str]) -> str:
    """Send an app to the SuperLink and start it; returns the run's number."""
    pairs = " ".join(f'{key}="{value}"' for key, value in settings.items())
    with ThreadPoolExecutor(max_workers=1) as thread:
        answer = thread.submit(_ask, folder, "run", str(app), _CONNECTION, "--run-config", pairs)
        try:
            return str(answer.result()["run-id"])
        except KeyboardInterrupt:
            # Too late to take it back: wait for its number, since a run that nobody follows must not go on.
            with suppress(RunFailedError):
                stop_run(folder, str(answer.result()["run-id"]))
            raise


def run_status(folder: DeploymentFolder, run_id: str) -> RunStatus:
    """What Flower says of one run."""
    return _status(_ask(folder, "ls", _CONNECTION, "--run-id", run_id)["runs"][0])


def list_runs(folder: DeploymentFolder) -> tuple[RunStatus, ...]:
    """What Flower says of all runs."""
    return tuple(_status(run) for run in _ask(folder, "ls", _CONNECTION)["runs"])


def stop_run(folder: DeploymentFolder, run_id: str) -> None:
    """Ask Flower to stop a run."""
    _ask(folder, "stop", run_id, _CONNECTION)


def _status(run: Mapping[str, Any]) -> RunStatus:
    details = str(run.get("status-details") or "")
    return RunStatus(str(run["run-id"]), str(run["status"]), "" if details == "N/A" else details)


def _ask(folder: DeploymentFolder, *arguments: str) -> dict[str, Any]:
    """Run ``flwr`` and return its answer."""
    question = f"flwr {' '.join(arguments[:2])}"
    launched = folder.programs / "flwr"
    command = [str(launched) if launched.is_file() else program("flwr"), *arguments, "--format", "json"]
    try:
        done = subprocess.run(
            command,
            env=environment(folder),
            cwd=folder.path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            # Ctrl-C in the terminal is for this process, which then decides what to ask.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{question}: no answer from the SuperLink within {_PATIENCE_SECONDS:g} s") from None
    answer = _json(done.stdout)
    if answer is None or not answer.get("success", False):
        said = str((answer or {}).get("error-message") or done.stderr or done.stdout)
        raise RunFailedError(f"{question}: {' '.join(_ORNAMENT.sub(' ', said).split()) or 'no answer'}")
    return answer


def _json(text: str) -> dict[str, Any] | None:
    """The JSON object in what was printed; remarks may come before it."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        answer, _ = json.JSONDecoder().raw_decode(text[start:])
    except json.JSONDecodeError:
        return None
    return answer if isinstance(answer, dict) else None


_SECONDS = 5.0


def answers(folder: DeploymentFolder, record: DeploymentRecord) -> bool:
    """Ask the SuperLink for its health; over TLS, its certificate is checked against the deployment's own authority."""
    import httpx  # here, because other commands need not wait for it

    scheme = "http" if record.insecure else "https"
    try:
        trust = False if record.insecure else ssl.create_default_context(cafile=str(folder.tls / "ca.pem"))
        # Not through a proxy: it is here, or on a machine that was named.
        reply = httpx.get(f"{scheme}://{record.server}/health", verify=trust, trust_env=False, timeout=_SECONDS)
    except (OSError, httpx.HTTPError):
        return False
    return reply.status_code == 200


def is_serving(folder: DeploymentFolder, record: DeploymentRecord) -> bool:
    """Whether there is a SuperLink to ask: by its process, or where that is in a container, by its answer."""
    return answers(folder, record) if record.is_contained else is_alive(record.process("superlink"))


def check_certificates(folder: DeploymentFolder, record: DeploymentRecord) -> None:
    """Say why nothing over TLS will work, before Flower says that the SuperLink is unavailable."""
    if record.insecure:
        return
    path = folder.tls / "ca.pem"
    again = "docker compose up --detach" if record.is_contained else "fedpriv deploy up"
    anew = f"they are made anew by: fedpriv deploy down, then {again}"
    try:
        end = end_of(path)
    except (OSError, ValueError):
        raise RunFailedError(f"the certificates are gone: {path} is missing or damaged; {anew}") from None
    if end < datetime.now(UTC):
        raise RunFailedError(f"the certificates in {folder.tls} were valid until {end:%Y-%m-%d}; {anew}")
