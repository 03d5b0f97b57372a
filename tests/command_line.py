"""`fedpriv` as a user starts it, each time a process of its own; but forked from one that has imported everything.

Imports take seconds a process. That a fresh interpreter starts too is for the tests that start one.
"""

import gc
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedpriv.core import cli

__all__ = ["Started", "fedpriv", "flower", "never_synced", "python", "spent"]

# What commands import, and what they import when they need it.
IMPORTED = [
    "fedpriv.attacks.membership",
    "fedpriv.attacks.reconstruction",
    "datasets",
    "dp_accounting",
    "fedpriv.core.cli.app",
    "fedpriv.deploy",
    "fedpriv.core.cli.display",
    "fedpriv.attacks.membership.audit",
    "fedpriv.deploy.relay",
    "fedpriv.core.report",
    "fedpriv.sweep.display",
    "flwr_datasets.partitioner",
    "lpips",
    "scipy.ndimage",
    "scipy.signal",
    "sklearn.datasets",
    "sklearn.model_selection",
    "sklearn.neural_network",
    "torch._dynamo",
    "torchmetrics.functional.text.rouge",
    "tests.warm",
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
    return Started(*arguments, cwd=cwd, stdout=stdout, file_size=file_size, **changes).ended()


def python(script: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, as ``python SCRIPT`` does it there; ``changes`` to the environment."""
    return Started(script, cwd=cwd, main=_run_script, **changes).ended()


def flower(*arguments: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run Flower's own command ``flwr``."""
    return Started(*arguments, cwd=cwd, main=_run_flower, **changes).ended()


def never_synced() -> None:
    """Let files be written without waiting for the disk: tests end processes, and never pull the plug."""
    os.fsync = lambda descriptor: None


class Started:
    """A command that runs; the arguments are those of :func:`fedpriv`, and what it is that runs."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        stdout: Path | None = None,
        file_size: int = -1,
        main: Callable[[], None] = cli.main,
        **changes: str,
    ) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "FEDPRIV_DATA"} | changes
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._arguments, self._folder = arguments, tempfile.TemporaryDirectory()
        self._streams, self._times = (self._path("stdout"), self._path("stderr")), self._path("times")
        outputs = (stdout or self._streams[0], self._streams[1])
        command = (self._times, main, arguments, cwd, environment, outputs, file_size)
        self._process = context.Process(target=_timed, args=command)
        self._process.start()

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def is_over(self) -> bool:
        return not self._process.is_alive()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def ended(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end. The code is negative where a signal ended it."""
        with self._folder:
            self._process.join(SECONDS)
            if not self.is_over():
                self._process.kill()
                raise TimeoutError(f"fedpriv {' '.join(self._arguments)}: not done after {SECONDS} s")
            _SPENT.append(float(_text(self._times) or 0.0))  # nothing: it was killed
            said = [_text(stream) for stream in self._streams]
        return subprocess.CompletedProcess(self._arguments, self._process.exitcode or 0, *said)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _timed(times: Path, *command: Any) -> None:
    file = os.open(times, os.O_WRONLY | os.O_CREAT)
    try:
        _run(*command)
    finally:
        os.write(file, str(sum(os.times()[:4])).encode())


def _run_flower() -> None:
    from flwr.cli.app import app

    app()


def _run_script() -> None:
    _, script = sys.argv
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a text, as Python puts it there
    runpy.run_path(script, run_name="__main__")


def _run(
    main: Callable[[], None],
    arguments: tuple[str, ...],
    cwd: Path,
    environment: Mapping[str, str],
    streams: tuple[Path, Path],
    file_size: int,
) -> None:
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    never_synced()
    gc.freeze()  # to look through all that is imported would copy its memory
    # The server that forks says nothing of what it could not import.
    assert not set(IMPORTED) - sys.modules.keys()
    # A shell that runs the tests in the background has them ignore Ctrl-C, and a child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if file_size >= 0:
        sys.dont_write_bytecode = True  # Python keeps what it could write of a module, and fails to read it later
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    sys.argv = ["fedpriv", *arguments]
    main()
