"""Runs that are too long for every day: memory and file handles of many clients and of many rounds. ``make soak``.

The quick part of it, 200 clients inline, is in ``tests/integration/test_memory.py`` and runs with the others.
"""

from pathlib import Path

from tests.integration.small import experiment
from tests.memory import watched_run

GAUSSIAN = {"name": "gaussian", "sigma": 1.0}
MOST_GROWTH = 0.05


def test_200_clients_a_round_on_ray(tmp_path: Path) -> None:
    """All processes of Ray are counted: they are this process's children."""
    usage = watched_run(
        experiment(
            federation={"clients": 200, "rounds": 20},
            training={"batch_size": 2},
            mechanism=GAUSSIAN,
            engine={"name": "ray"},
        ),
        tmp_path / "run",
    )
    print(f"MiB by round: {[round(one) for one in usage.memory]}; handles: {usage.handles}")
    assert usage.growth(5) <= MOST_GROWTH
    assert usage.handles[-1] <= usage.handles[4]


def test_1000_rounds_of_lenet(tmp_path: Path) -> None:
    usage = watched_run(
        experiment(
            model={"name": "lenet"},
            federation={"clients": 4, "rounds": 1000},
            training={"learning_rate": 0.05},
            mechanism=GAUSSIAN,
        ),
        tmp_path / "run",
    )
    print(f"MiB every 20 rounds: {[round(one) for one in usage.memory]}; handles: {usage.handles}")
    assert usage.growth(1) <= MOST_GROWTH
    assert usage.handles[-1] <= usage.handles[0]
