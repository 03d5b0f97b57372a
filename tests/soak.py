"""Runs that are too long for every day: memory and file handles of many clients and of many rounds. ``make soak``.

The quick part of it, 200 clients inline, is in ``tests/integration/test_memory.py`` and runs with the others.
"""

from pathlib import Path

import ray
from ray._private.internal_api import node_stats

from fedpriv.core.lab import start_run
from fedpriv.core.records import RoundRecord
from tests.integration.small import experiment
from tests.memory import MIB, Usage, watched_run

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


class Stored(Usage):
    """Also the MiB that Ray's object store holds, at each look."""

    def round_finished(self, record: RoundRecord, rounds: int) -> None:
        looks = len(self.memory)
        super().round_finished(record, rounds)
        if len(self.memory) > looks:
            self.stored.append(stored_mib())

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[float] = []


def stored_mib() -> float:
    """What this machine's object store holds; without collecting what Ray has not freed yet."""
    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"])
    return float(stats.store_stats.object_store_bytes_used / MIB)


def test_1000_rounds_on_ray(tmp_path: Path) -> None:
    """Parameters and answers of more than 100 kB, which go through the object store."""
    usage = Stored()
    settings = experiment(
        model={"hidden": [1024]},
        federation={"clients": 4, "rounds": 1000},
        training={"batch_size": 2},
        mechanism=GAUSSIAN,
        engine={"name": "ray"},
    )
    assert start_run(settings, tmp_path / "run", "", usage).status == "completed"
    print(f"MiB every 20 rounds: {[round(one) for one in usage.memory]}; stored: {[round(x, 1) for x in usage.stored]}")
    assert usage.growth(5) <= MOST_GROWTH
    assert usage.handles[-1] <= usage.handles[4]
    assert max(usage.stored[10:]) <= 2 * max(usage.stored[:10])


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
