"""Start processes that outlive their command, and find them again by number and time of start."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedpriv.core.files import open_unlinked
from fedpriv.deploy.launcher import start_fork

# The time of start is computed from the machine's clock, which may be set a little in between.
_CLOCK_SECONDS = 2.0
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class StartedProcess:
    """One process that was started."""

    name: str  # how people call it
    pid: int  # its number
    created: float  # its time of start, in seconds since 1970


def start(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    launcher: Path | None = None,
) -> StartedProcess:
    """Start a process in a session of its own, which Ctrl-C does not reach; a launcher's fork, if one answers."""
    with (
        os.fdopen(open_unlinked(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as output,
        Path(os.devnull).open("rb") as nothing,
    ):
        files = [each.fileno() for each in (nothing, output, output)]
        pid = start_fork(launcher, command, environment, folder, files) if launcher else None
        if pid is None:
            pid = subprocess.Popen(
                list(command),
                stdin=nothing,
                stdout=output,
                stderr=output,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            ).pid
    try:
        created = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        created = 0.0  # it has ended already, which whoever looks at it next will see
    return StartedProcess(name, pid, created)


def is_alive(started: StartedProcess) -> bool:
    """Whether the process still runs; another one with its number does not count."""
    return _find(started) is not None


def stop(started: Sequence[StartedProcess]) -> tuple[str, ...]:
    """End the processes and their children, with force after ten seconds; returns the names of those that ran."""
    running = [(each.name, process) for each in started if (process := _find(each)) is not None]
    # Each once: a second signal would cut short how it ends, and most are the launcher's children.
    family = {member for _, process in running for member in (process, *_children(process))}
    for member in family:
        _send(member.terminate)
    _, stubborn = psutil.wait_procs(family, timeout=_PATIENCE_SECONDS)
    for member in stubborn:
        _send(member.kill)
    psutil.wait_procs(stubborn, timeout=_PATIENCE_SECONDS)
    return tuple(name for name, _ in running)


def _find(started: StartedProcess) -> psutil.Process | None:
    try:
        process = psutil.Process(started.pid)
        same = abs(process.create_time() - started.created) < _CLOCK_SECONDS
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return children


def _send(signal: Callable[[], None]) -> None:
    """Send a signal; who has ended meanwhile needs none."""
    with suppress(psutil.NoSuchProcess):
        signal()
