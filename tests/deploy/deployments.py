"""Deployments for tests: the command line as a user types it, on ports that are free."""

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedpriv.data.sets.digits import Digits
from fedpriv.deploy import flower
from fedpriv.deploy.folder import DeploymentFolder, is_free
from tests.command_line import fedpriv

__all__ = ["SMALL", "fedpriv", "free_ports", "light", "one_line", "over", "wait_for"]

SMALL = """
name = "small"
seed = 3
noise = "reproducible"
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


def light(here: Path, text: str) -> str:
    """The experiment on the digits from a file in ``here``, which clients read without importing scikit-learn.

    Each message to a client starts a process, which would spend a quarter of its time on that.
    """
    digits = Digits.arrays()
    parts = {"x_train": digits.x_train, "y_train": digits.y_train, "x_test": digits.x_test, "y_test": digits.y_test}
    np.savez_compressed(here / "digits.npz", **parts)
    return f'{text}[data]\nname = "npz"\npath = "{here / "digits.npz"}"\n'


def wait_for(what: Callable[[], bool], seconds: float = 480) -> None:
    """Wait until something holds; a busy machine takes minutes for what a free one does in seconds."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def over(folder: DeploymentFolder, run: str) -> flower.RunStatus:
    """Wait for the end of a run; each question is a process of two CPU seconds."""
    deadline = time.monotonic() + 480
    while not (status := flower.run_status(folder, run)).is_over and time.monotonic() < deadline:
        time.sleep(3)
    return status


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
