"""`fedpriv` as a user starts it, each time a process of its own; but forked from one that has imported everything.

Imports take seconds a process. That a fresh interpreter starts too is for the tests that start one.
"""

import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpriv import cli

__all__ = ["fedpriv", "spent"]

# What commands import, and what they import when they need it.
IMPORTED = [
    "fedpriv.attacks.membership",
    "fedpriv.attacks.reconstruction",
    "datasets",
    "dp_accounting",
    "fedpriv.cli.app",
    "fedpriv.deploy",
    "fedpriv.cli.display",
    "fedpriv.lab.audit",
    "fedpriv.listener",
    "fedpriv.report",
    "fedpriv.cli.sweep_display",
    "flwr_datasets.partitioner",
    "lpips",
    "scipy.signal",
    "sklearn.datasets",
    "sklearn.model_selection",
    "sklearn.neural_network",
    "torch._dynamo",
    "torchmetrics.functional.image",
]
SECONDS = 540
# CPU seconds of each command: they are children of the process that forks, and the system does not count them as ours.
_SPENT: list[float] = []


def spent() -> float:
    """Return the CPU seconds of all commands so far."""
    return sum(_SPENT)


def fedpriv(
    *arguments: str, cwd: Path, stdout: Path | None = None, file_size: int = -1, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end.

    Args:
        arguments: of the command.
        cwd: where it runs.
        stdout: where its output goes, which is then not returned.
        file_size: bytes from which on the kernel refuses to let any of its files grow; -1: none.
        changes: to the environment, which has no FEDPRIV_DATA.
    """
    environment = {key: value for key, value in os.environ.items() if key != "FEDPRIV_DATA"} | changes
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        streams = (Path(folder) / "stdout", Path(folder) / "stderr")
        outputs = (stdout or streams[0], streams[1])
        times = Path(folder) / "times"
        process = context.Process(target=_timed, args=(times, arguments, cwd, environment, outputs, file_size))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"fedpriv {' '.join(arguments)}: not done after {SECONDS} s")
        _SPENT.append(float(times.read_text()) if times.exists() else 0.0)
        said = [stream.read_text() if stream.exists() else "" for stream in streams]
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, *said)


def _timed(times: Path, *command: Any) -> None:
    file = os.open(times, os.O_WRONLY | os.O_CREAT)
    try:
        _run(*command)
    finally:
        os.write(file, str(sum(os.times()[:4])).encode())


def _run(
    arguments: tuple[str, ...], cwd: Path, environment: Mapping[str, str], streams: tuple[Path, Path], file_size: int
) -> None:
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    # The server that forks says nothing of what it could not import.
    assert not set(IMPORTED) - sys.modules.keys()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if file_size >= 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    sys.argv = ["fedpriv", *arguments]
    cli.main()
