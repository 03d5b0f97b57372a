"""Deployments for tests: the command line as a user types it, on ports that are free."""

import random
import subprocess

from fedpriv.deploy.folder import is_free
from tests.command_line import fedpriv

__all__ = ["SMALL", "fedpriv", "free_ports", "one_line"]

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
