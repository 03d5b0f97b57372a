"""A client's process that dies on Ray: it is asked once more, in a fresh process, and the others never notice."""

import html
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from fedpriv.lab import start_run
from fedpriv.progress import Silent
from fedpriv.report import write_report
from fedpriv.runs import RunFolder
from fedpriv.world import build_world
from tests.integration.small import experiment

DEATHS, THRESHOLD, MOST = "FEDPRIV_TEST_DEATHS", "FEDPRIV_TEST_THRESHOLD", "FEDPRIV_TEST_MOST"
DRIVER = "FEDPRIV_TEST_DRIVER"  # where a run tries the model beforehand
CHECKPOINT = Path("checkpoint") / "server.safetensors"
SETTINGS = experiment(model={"name": "tests.integration.test_ray_deaths:mortal"})


class Mortal(nn.Module):
    """Kills its process on one client's batch of the first round, so many times; each death is a byte in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        mortal = THRESHOLD in os.environ and os.environ[DRIVER] != str(os.getpid())
        if self.training and mortal and float(flat.sum()) > float(os.environ[THRESHOLD]):
            deaths = Path(os.environ[DEATHS])
            if deaths.stat().st_size < int(os.environ[MOST]):
                with deaths.open("ab") as file:
                    file.write(b"x")
                os.kill(os.getpid(), signal.SIGKILL)
        out: torch.Tensor = self.layer(flat)
        return out


def mortal(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Mortal()


def victim_and_threshold() -> tuple[int, float]:
    """The client whose batch is the brightest of the first round, and what only that batch is above."""
    world = build_world(SETTINGS)
    sums = [float(world.examples(plan.client, plan.batch(0))[0].sum()) for plan in world.plans]
    second, first = sorted(sums)[-2:]
    return sums.index(first), (first + second) / 2


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_killed_worker_is_replaced(deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, threshold = victim_and_threshold()
    (tmp_path / "deaths").touch()
    told = {DEATHS: tmp_path / "deaths", THRESHOLD: threshold, MOST: deaths, DRIVER: os.getpid()}
    for key, value in told.items():
        monkeypatch.setenv(key, str(value))
    settings = SETTINGS.model_copy(update={"engine": SETTINGS.engine.model_copy(update={"name": "ray"})})
    assert start_run(settings, tmp_path / "run", "", Silent()).status == "completed"
    assert (tmp_path / "deaths").stat().st_size == deaths
    first, *others = RunFolder.open(tmp_path / "run").rounds()[1:]
    assert all(record.used == (0, 1, 2, 3) for record in others)
    if deaths == 1:
        monkeypatch.delenv(THRESHOLD)
        start_run(SETTINGS, tmp_path / "inline", "", Silent())
        assert first.used == (0, 1, 2, 3)
        assert (tmp_path / "run" / CHECKPOINT).read_bytes() == (tmp_path / "inline" / CHECKPOINT).read_bytes()
    else:
        (failure,) = first.failures
        assert failure.client == victim
        assert re.search("Actor(Died|Unavailable)Error", failure.reason)
        assert failure.reason in html.unescape(write_report(tmp_path / "run").read_text())
