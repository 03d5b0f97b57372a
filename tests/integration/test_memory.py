"""No round leaves anything behind: 200 simulated clients, 12 rounds. ``tests/soak.py`` has the longer runs."""

from pathlib import Path

import pytest

from tests.integration.small import experiment
from tests.memory import watched_run


@pytest.mark.slow
def test_200_clients_a_round_inline(tmp_path: Path) -> None:
    usage = watched_run(
        experiment(
            federation={"clients": 200, "rounds": 9},
            training={"batch_size": 2},
            mechanism={"name": "gaussian", "sigma": 1.0},
        ),
        tmp_path / "run",
    )
    assert usage.growth(5) <= 0.05
    assert usage.handles[-1] <= usage.handles[4]
