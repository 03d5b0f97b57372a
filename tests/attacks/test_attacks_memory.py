"""Freed memory is kept for the next evaluation."""

import platform
import subprocess
import sys

import pytest

# Page faults of ten rounds in which 12 blocks of 4 MiB are asked for, written to and freed.
FAULTS = """
import resource, torch
from fedpriv.attacks.reconstruction.matching import keep_freed_memory
if {kept}:
    keep_freed_memory()
def blocks():
    some = [torch.ones(2**20) for _ in range(12)]
blocks()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    blocks()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kept: bool) -> int:
    command = [sys.executable, "-c", FAULTS.format(kept=kept)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what they like")
def test_blocks_that_are_asked_for_again_cost_no_page_faults() -> None:
    many = faults(kept=False)
    if many < 1000:
        pytest.skip("this system maps large pages: there is nothing to save")
    # A system that is short of memory takes pages away meanwhile; memory that is not kept costs the faults each time.
    assert any(faults(kept=True) < many / 10 for _ in range(5))
