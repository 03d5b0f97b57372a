"""`fedpriv` as a user starts it, each time a process of its own; but forked from one that has imported everything.

Imports take seconds a process. That a fresh interpreter starts too is for the tests that start one.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fedpriv import cli

__all__ = ["fedpriv"]

# What commands import, and what they import when they need it.
IMPORTED = [
    "attacks.membership",
    "attacks.reconstruction",
    "datasets",
    "dp_accounting",
    "fedpriv.cli",
    "fedpriv.deploy",
    "fedpriv.display",
    "fedpriv.lab.audit",
    "fedpriv.listener",
    "fedpriv.report",
    "fedpriv.sweep_display",
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


def fedpriv(*arguments: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, without FEDPRIV_DATA and with these changes to the environment."""
    environment = {key: value for key, value in os.environ.items() if key != "FEDPRIV_DATA"} | changes
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        streams = (Path(folder) / "stdout", Path(folder) / "stderr")
        process = context.Process(target=_run, args=(arguments, cwd, environment, streams))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"fedpriv {' '.join(arguments)}: not done after {SECONDS} s")
        stdout, stderr = (stream.read_text() for stream in streams)
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, stdout, stderr)


def _run(arguments: tuple[str, ...], cwd: Path, environment: Mapping[str, str], streams: tuple[Path, Path]) -> None:
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    # The server that forks says nothing of what it could not import.
    assert not set(IMPORTED) - sys.modules.keys()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["fedpriv", *arguments]
    cli.main()
