"""What several rooms' tests share."""

import os
from pathlib import Path

import pytest

# Ray runs its workers at nice 15: on a busy machine a test on Ray would wait for all the others.
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets that FEDPRIV_DATA names; tests that need it are skipped without."""
    folder = os.environ.get("FEDPRIV_DATA")
    if not folder:
        pytest.skip("FEDPRIV_DATA is not set: it names a folder with the data sets")
    return Path(folder)
