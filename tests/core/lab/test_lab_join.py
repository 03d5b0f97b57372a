"""A client's uploads of several rounds attacked together: where its examples are the same, and only there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedpriv.core.lab import attack_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.records import Summary
from tests.integration.small import experiment


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three images for three clients, and public ones."""
    images = (load_digits().images * 15.9).astype(np.uint8)
    path = tmp_path / "digits.npz"
    labels = load_digits().target
    names = [str(number) for number in range(10)]
    public = {"x_test": images[800:1000], "y_test": labels[800:1000], "class_names": names}
    np.savez(path, x_train=images[:3], y_train=labels[:3], **public)
    return path


def run(path: Path, data: Path, batch_size: int = 1, clients: int = 3, **adversary: object) -> Summary:
    settings = experiment(
        data={"name": "npz", "path": str(data)},
        federation={"clients": clients, "rounds": 6},
        model={"hidden": [64]},
        training={"batch_size": batch_size, "learning_rate": 0.01},
        mechanism={"name": "gaussian", "sigma": 0.01, "clip_norm": 1.0},
        adversary={"attacks": ["closed_form"], "rounds": [1, 2, 3, 4, 5, 6], "victims": 3, **adversary},
    )
    return start_run(settings, path, "", Silent())


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "reconstructions" / "scores.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def errors(folder: Path, label: str = "closed_form", kind: str = "protected") -> dict[tuple[int, int], float]:
    every = lines(folder)
    return {
        (line["round"], line["client"]): line["mse"]
        for line in every
        if line["attack"] == label and line["upload"] == kind
    }


def test_together_uploads_say_more_than_each(tmp_path: Path, data: Path) -> None:
    """Six rounds of each client are one victim, and better than the median of its rounds."""
    run(tmp_path / "apart", data)
    summary = run(tmp_path / "together", data, join_uploads=True)
    apart, together = errors(tmp_path / "apart"), errors(tmp_path / "together")
    assert sorted(apart) == [(number, client) for number in range(1, 7) for client in range(3)]
    assert sorted(together) == [(1, client) for client in range(3)]
    for client in range(3):
        median = sorted(value for (_, owner), value in apart.items() if owner == client)[3]
        assert together[1, client] < median
    assert all((row.victims, row.missing) == (3, 0) for row in summary.attacks if row.attack == "closed_form")
    notes = {line["note"] for line in lines(tmp_path / "together") if line["attack"] == "closed_form"}
    assert notes == {"6 uploads of the same examples were attacked together (round 1, 2, 3, 4, 5, 6)"}


def test_an_earlier_run_can_be_attacked_so(tmp_path: Path, data: Path) -> None:
    """Under a name that says so, beside the run's own results."""
    run(tmp_path / "run", data)
    attack_run(tmp_path / "run", ("closed_form",), (), ("adversary.join_uploads=true",), None, "again", Silent())
    assert sorted(errors(tmp_path / "run", "closed_form,joined")) == [(1, client) for client in range(3)]
    assert len(errors(tmp_path / "run")) == 18


def test_other_batches_in_other_rounds_are_left_apart_with_the_reason(tmp_path: Path, data: Path) -> None:
    summary = run(tmp_path / "run", data, clients=1, join_uploads=True)
    assert len(errors(tmp_path / "run")) == 6
    (told,) = [text for text in summary.warnings if "join_uploads" in text]
    assert "client 0 uses 1 of its 3 examples in a round, and others in the next" in told


def test_nothing_to_join_is_told(tmp_path: Path, data: Path) -> None:
    summary = run(tmp_path / "run", data, join_uploads=True, rounds=[2])
    assert any("no client was observed more than once" in text for text in summary.warnings)
    assert len(errors(tmp_path / "run")) == 3


def test_rounds_of_other_batches_are_stacked_for_the_closed_form(tmp_path: Path, data: Path) -> None:
    """Three images in batches of two: one victim with all three; gradient matching takes each round by itself."""
    federation = {"clients": 1, "rounds": 6}
    settings = experiment(
        data={"name": "npz", "path": str(data)},
        federation=federation,
        model={"hidden": [64]},
        training={"batch_size": 2, "learning_rate": 0.01},
        mechanism={"name": "none"},
        adversary={
            "attacks": ["closed_form", "iga"],
            "rounds": [1, 2, 3, 4, 5, 6],
            "victims": 1,
            "join_uploads": True,
            "iga": {"iterations": 1},
        },
    )
    summary = start_run(settings, tmp_path / "run", "", Silent())
    every = lines(tmp_path / "run")
    stacked = [line for line in every if line["attack"] == "closed_form"]
    assert sorted((line["round"], line["image"]) for line in stacked) == [(1, 0), (1, 1), (1, 2)]
    assert max(line["mse"] for line in stacked) < 1e-8
    assert all(line["label_correct"] for line in stacked)
    assert len([line for line in every if line["attack"] == "iga"]) == 12
    assert summary.status == "completed"
