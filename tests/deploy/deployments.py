"""Deployments for tests: the command line as a user types it, on ports that are free."""

import os
import random
import subprocess
import sys
from pathlib import Path

from fedpriv.deploy.folder import is_free

SMALL = """
name = "small"
seed = 3
[model]
name = "mlp"
hidden = [12]
[federation]
clients = 3
rounds = 2
[training]
batch_size = 4
learning_rate = 0.5
[mechanism]
name = "gaussian"
sigma = 1.0
[adversary]
attacks = []
[engine]
name = "inline"
device = "cpu"
"""


def fedpriv(*arguments: str, cwd: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command to its end; ``path`` replaces the search path for programs."""
    environment = {key: value for key, value in os.environ.items() if key != "FEDPRIV_DATA"}
    if path is not None:
        environment["PATH"] = path
    command = [sys.executable, "-m", "fedpriv.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=540)


def free_ports(count: int) -> int:
    """The first of ``count`` free ports in a row."""
    for _ in range(100):
        first = random.randrange(20_000, 32_000)
        if all(is_free(first + offset) for offset in range(count)):
            return first
    raise RuntimeError("no free ports")


def one_line(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """Check that a command failed with this exit code and one line that holds all parts."""
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("fedpriv: ")
    for part in parts:
        assert part in lines[0], lines[0]
