"""Training with noise in the forward pass: what changes (uploads), and what does not (ledger, batches, everything)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.clients.training import local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.errors import RunInterruptedError
from fedpriv.core.lab import resume_run
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from fedpriv.server.evaluation import evaluate, evaluate_all
from fedpriv.server.tap import record_heard
from tests.integration.small import experiment, finished, left_behind

PRIVATE: dict[str, dict[str, object]] = {
    "mechanism": {"name": "gaussian", "sigma": 1.0},
    "training": {"sampling": "poisson", "batch_size": 16},
}


def without_section(settings: Experiment) -> Experiment:
    return settings.model_copy(update={"robustness": None})


@pytest.mark.parametrize("sections", [{}, PRIVATE], ids=["no mechanism", "gaussian"])
def test_a_section_that_says_none_changes_no_byte(sections: dict[str, dict[str, object]], tmp_path: Path) -> None:
    """noise = 0: the same uploads, also where noise is keyed by the settings."""
    bare, none = finished(tmp_path / "a", **sections), finished(tmp_path / "b", **sections, robustness={"noise": 0.0})
    left, right = left_behind(bare.path), left_behind(none.path)
    for name in ("config.toml", "summary.json"):
        del left[name], right[name]
    assert left == right
    assert b"noisy" not in (bare.path / "metrics.jsonl").read_bytes()
    assert "robustness" not in json.loads(without_section(none.experiment()).model_dump_json())


@pytest.mark.parametrize("place", ["hidden", "input"])
def test_ledger_and_batches_are_those_without_noise(place: str, tmp_path: Path) -> None:
    """The robustness noise is no part of what is proven about examples, and who is in a batch does not change."""
    bare = finished(tmp_path / "bare", **PRIVATE)
    noisy = finished(tmp_path / "noisy", **PRIVATE, robustness={"noise": 0.5, "place": place})
    assert (bare.path / "ledger.json").read_bytes() == (noisy.path / "ledger.json").read_bytes()
    assert (bare.path / "referee/partition.json").read_bytes() == (noisy.path / "referee/partition.json").read_bytes()
    plans = [build_world(folder.experiment()).plans for folder in (bare, noisy)]
    for left, right in zip(*plans, strict=True):
        for step in range(6):
            assert np.array_equal(left.batch(step), right.batch(step))
        assert (left.config, left.tensors) == (right.config, right.tensors)
    name = "checkpoint/server.safetensors"
    assert (bare.path / name).read_bytes() != (noisy.path / name).read_bytes()


def upload(world: World, round_number: int = 1, client: int = 0) -> torch.Tensor:
    sent = local_upload(world, client, world.initial, round_number)
    return torch.cat([value.flatten() for value in sent.parameters.values()])


def test_uploads_have_fresh_noise_for_each_client_and_step() -> None:
    """Gradients at the same parameters on the same examples differ by the noise alone."""
    once: dict[str, dict[str, object]] = {
        "data": {"train_examples": 64},
        "training": {"batch_size": 64},
        "federation": {"clients": 1},
    }
    world, bare = build_world(experiment(**once, robustness={"noise": 0.5})), build_world(experiment(**once))
    assert torch.equal(upload(world), upload(world))
    assert not torch.allclose(upload(world, 1), upload(world, 2), atol=1e-3)
    assert torch.allclose(upload(bare, 1), upload(bare, 2), atol=1e-6)  # all examples, in another order


def test_the_server_counts_one_draw_an_image_beside_the_noiseless_model() -> None:
    world = build_world(experiment(robustness={"noise": 0.5, "place": "input"}))
    first, again, other = (evaluate_all(world, world.initial, number).noisy_accuracy for number in (1, 1, 2))
    assert first == again and isinstance(other, float)
    assert world.forward_noise is not None
    world.model.eval()
    with world.forward_noise.drawing(1), torch.no_grad():
        images = world.network_input(world.dataset.x_test)
        assert not torch.equal(world.model(images), world.model(images))
    bare = build_world(experiment())
    assert evaluate_all(bare, bare.initial, 1).noisy_accuracy is None
    assert evaluate(world, world.initial) == evaluate(bare, bare.initial)


def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {**PRIVATE, "robustness": {"noise": 0.3}, "federation": {"rounds": 5}}
    whole = finished(tmp_path / "whole", **sections)

    def interrupted(world: World, folder: RunFolder, number: int, *arguments: Any) -> None:
        if number > 2:
            raise KeyboardInterrupt
        record_heard(world, folder, number, *arguments)

    with monkeypatch.context() as patched, pytest.raises(RunInterruptedError):
        patched.setattr("fedpriv.server.rounds.record_heard", interrupted)
        finished(tmp_path / "cut", **sections)
    resume_run(tmp_path / "cut", Silent())
    left, right = left_behind(tmp_path / "cut"), left_behind(whole.path)
    for found in (left, right):
        del found["command.txt"]
    assert {key: left[key] for key in ("metrics.jsonl", "ledger.json", "checkpoint/server.safetensors")} == {
        key: right[key] for key in ("metrics.jsonl", "ledger.json", "checkpoint/server.safetensors")
    }
    assert [record.noisy_accuracy for record in whole.rounds()].count(None) == 0
