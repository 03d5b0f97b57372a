"""Freed memory is kept for the next evaluation."""

import platform
import subprocess
import sys

import pytest

# Page faults of ten rounds in which 12 blocks of 4 MiB are asked for, written to and freed; then as it is kept.
FAULTS = """
import resource, torch
from fedpriv.core.threads import keep_freed_memory
def blocks():
    some = [torch.ones(2**20) for _ in range(12)]
def faults():
    blocks()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults())
keep_freed_memory()
print(*(faults() for _ in range(5)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what they like")
def test_blocks_that_are_asked_for_again_cost_no_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    many, *kept = map(int, done.stdout.split())
    if many < 1000:
        pytest.skip("this system maps large pages: there is nothing to save")
    # A system that is short of memory takes pages away meanwhile; memory that is not kept costs the faults each time.
    assert min(kept) < many / 10
