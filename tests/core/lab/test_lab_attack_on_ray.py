"""Attacks spread over Ray tasks find what they find in one process, and a task that dies takes only its own uploads."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from fedpriv.core.errors import InputError
from fedpriv.core.lab import attack_stage, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.records import Summary
from fedpriv.engines.tasks import RayResources, TaskEnded
from tests.integration.small import experiment

ATTACKED = {"attacks": ["iga", "closed_form"], "victims": 3, "iga": {"iterations": 20, "restarts": 2}}


class Heard(Silent):
    """Remembers how far attacks came."""

    def __init__(self) -> None:
        self.advances: list[tuple[str, int, int]] = []

    def attack_advanced(self, name: str, done: int, total: int, loss: float) -> None:
        self.advances.append((name, done, total))


def run(path: Path, tasks: int, progress: Silent | None = None, cpus: float = 1.0, **adversary: object) -> Summary:
    settings = experiment(
        adversary={**ATTACKED, **adversary},
        mechanism={"name": "vmf", "kappa": 300.0},
        training={"batch_size": 1},
        engine={"attack_tasks": tasks, "cpus_per_client": cpus},
    )
    return start_run(settings, path, "", progress or Silent())


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "reconstructions" / "scores.jsonl").read_text().splitlines()]


def test_a_task_that_dies_takes_only_its_own_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second_dies(
        function: Callable[[Any], Any], parts: Sequence[Any], _: RayResources, __: float
    ) -> Iterator[TaskEnded]:
        yield TaskEnded(1, error="WorkerCrashedError: out of memory")
        yield TaskEnded(0, function(parts[0]))

    monkeypatch.setattr(attack_stage, "run_tasks", second_dies)
    summary = run(tmp_path / "run", 2)
    assert summary.status == "completed"
    lost = [text for text in summary.warnings if "its Ray task failed: WorkerCrashedError: out of memory" in text]
    # Three uploads with and without noise: numbers 1, 3, 5 were the second task's, of each of two attacks.
    assert len(lost) == 6
    kept = {(line["attack"], line["upload"], line["client"]) for line in lines(tmp_path / "run")}
    assert len([one for one in kept if one[0] in ATTACKED["attacks"]]) == 6


def test_a_share_that_ray_lacks_is_named_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not started for this: tests/engines asks a real one for too much.
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    settings = experiment(adversary=ATTACKED, engine={"attack_tasks": 2, "cpus_per_client": 4096.0})
    with pytest.raises(InputError, match=r"engine.cpus_per_client = 4096: Ray offers"):
        start_run(settings, tmp_path / "run", "", Silent())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
