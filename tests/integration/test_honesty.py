"""What a run says about privacy holds in its bad endings too; models that leak past the mechanism are refused."""

import json
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.lab import run as lab_run
from fedpriv.core.lab.attack_stage import Leakage
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from tests.integration.small import MISBEHAVIOURS, experiment, misbehaving

VMF = {"name": "vmf", "kappa": 40.0}
GAUSSIAN = {"name": "gaussian", "sigma": 1.0}


def ledger(folder: Path) -> dict[str, object]:
    return json.loads((folder / "ledger.json").read_text())["worst"]


def test_a_round_that_fails_is_accounted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients did upload before the run failed for want of the fourth."""
    monkeypatch.setattr(lab_run, "client_app", misbehaving(MISBEHAVIOURS["raises"][0], {3}))
    settings = experiment(mechanism=VMF, federation={"min_clients": 4})
    with pytest.raises(RunFailedError):
        start_run(settings, tmp_path / "run", "", Silent())
    assert ledger(tmp_path / "run")["participations"] == 1
    assert ledger(tmp_path / "run")["pure_epsilon"] == 80.0


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut(path: Path, keep: int | None) -> None:
    """Keep so many bytes of a file, or of all but so many if that is negative; None: remove it."""
    content = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(content[:keep])


# The ledger rests on asked.jsonl: without a checkpoint metrics.jsonl still says that there were rounds.
LOST = [
    {name: keep, **other}
    for name in ("metrics.jsonl", "asked.jsonl")
    for keep in (None, 0, 90, -5)
    for other in ({}, {"checkpoint/server.safetensors": None})
    if name == "asked.jsonl" or not other
]


@pytest.mark.parametrize("lost", LOST, ids=str)
def test_a_folder_that_lost_rounds_is_not_resumed(lost: dict[str, int | None], tmp_path: Path) -> None:
    """It stays as it is: its ledger counts all rounds, and one that is written now would not."""
    start_run(experiment(mechanism=VMF), tmp_path / "run", "", Silent())
    for name, keep in lost.items():
        cut(tmp_path / "run" / name, keep)
    before = files(tmp_path / "run")
    with pytest.raises(InputError, match="damaged"):
        resume_run(tmp_path / "run", Silent())
    assert files(tmp_path / "run") == before


def test_no_ledger_is_written_of_a_folder_that_loses_rounds_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> Leakage:
        cut(tmp_path / "run" / "asked.jsonl", 0)
        raise RunFailedError("the attack failed")

    monkeypatch.setattr(lab_run, "attack_observations", lose)
    with pytest.raises(InputError, match="damaged"):
        start_run(experiment(mechanism=VMF, adversary={"attacks": ["dlg"]}), tmp_path / "run", "", Silent())
    assert not (tmp_path / "run" / "ledger.json").exists()


def test_a_checkpoint_of_another_model_is_not_resumed(tmp_path: Path) -> None:
    start_run(experiment(), tmp_path / "run", "", Silent())
    settings = experiment(model={"hidden": [5]})
    RunFolder.open(tmp_path / "run").write_text("config.toml", settings.to_toml())
    before = files(tmp_path / "run")
    with pytest.raises(InputError, match="does not fit"):
        resume_run(tmp_path / "run", Silent())
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize("damage", ["lost", "cut", "swapped"])
def test_a_damaged_observation_is_named_and_the_others_are_attacked(damage: str, tmp_path: Path) -> None:
    attacked = {"attacks": ["iga"], "victims": 3, "iga": {"iterations": 3}}
    whole = start_run(experiment(adversary=attacked), tmp_path / "run", "", Silent())
    path = tmp_path / "run" / "observations" / "0001-0001.safetensors"
    if damage == "lost":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        for ending in (".safetensors", ".json"):
            path.with_suffix(ending).write_bytes(path.with_name("0001-0002").with_suffix(ending).read_bytes())
    (tmp_path / "run" / "reconstructions" / "scores.jsonl").unlink()
    summary = resume_run(tmp_path / "run", Silent())
    assert any("round 1, client 1 is left out" in text for text in summary.warnings)
    assert any("1 observed upload could not be attacked" in text for text in summary.verdict)
    assert (whole.attacks[0].victims, summary.attacks[0].victims) == (12, 8)


def test_without_any_sound_observation_nothing_is_claimed(tmp_path: Path) -> None:
    attacked = {"attacks": ["iga"], "victims": 2, "iga": {"iterations": 3}}
    start_run(experiment(adversary=attacked), tmp_path / "run", "", Silent())
    for path in (tmp_path / "run" / "observations").glob("*.json"):
        path.write_text("{}")
    (tmp_path / "run" / "reconstructions" / "scores.jsonl").unlink()
    summary = resume_run(tmp_path / "run", Silent())
    assert "No upload could be attacked" in summary.verdict[0]
    assert summary.attacks == ()


def test_an_observation_too_many_is_named_and_left_out(tmp_path: Path) -> None:
    attacked = {"attacks": ["iga"], "victims": 1, "iga": {"iterations": 3}}
    start_run(experiment(adversary=attacked), tmp_path / "run", "", Silent())
    source = tmp_path / "run" / "observations" / "0001-0000.safetensors"
    for ending in (".safetensors", ".json"):
        source.with_name("0001-0003").with_suffix(ending).write_bytes(source.with_suffix(ending).read_bytes())
    summary = resume_run(tmp_path / "run", Silent())
    assert any("0001-0003.safetensors is left out" in text for text in summary.warnings)
    assert summary.attacks[0].victims == 4


class Remembering(nn.Module):
    """Keeps the mean of the images that it saw in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        if self.training:
            self.seen.copy_(flat.detach().mean(0))
        return self.layer(flat)


class Mixing(Remembering):
    """Subtracts the mean of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return self.layer(flat - flat.mean(0))


class Raising(Remembering):
    """Works while it is evaluated only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise KeyError("a\nkey")
        return self.layer(x.flatten(1))


class Leaving(Raising):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise SystemExit("no licence")
        return super().forward(x)


def raising(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Raising()


def leaving(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Leaving()


def remembering(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Remembering()


def mixing(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Mixing()


class Reordering(nn.Module):
    """Its outputs are each example's own, but a layer sees the examples in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.layer = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.body(x.flatten(1).flip(0))).flip(0))


class Dropping(Reordering):
    """Drops at random by a function, which no list of layers shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.dropout(torch.tanh(self.body(x.flatten(1))), 0.5, self.training)
        return self.layer(inner)


class Mixup(Reordering):
    """Mixes each image with another one, only while it is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        if self.training:
            x = 0.5 * x + 0.5 * x[torch.randperm(len(x))]
        return self.layer(torch.tanh(self.body(x)))


class Queueing(Reordering):
    """Mixes each batch with the one before it, which it keeps in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        if self.training:
            self.queue.append(x.mean(0))
        return self.layer(torch.tanh(self.body(x - self.queue[-2] if len(self.queue) > 1 else x)))


class Locked(Reordering):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def mixup(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Mixup()


def queueing(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Queueing()


def locked(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Locked()


def reordering(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Reordering()


def dropping(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Dropping()


def test_a_sound_model_that_drops_at_random_is_not_refused() -> None:
    model = {"name": "tests.integration.test_honesty:dropping"}
    build_world(experiment(model=model, mechanism=VMF))


@pytest.mark.parametrize(
    "mechanism", [VMF, GAUSSIAN, {**GAUSSIAN, "unit": "update"}], ids=["vmf", "gaussian", "update"]
)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("remembering", r"layer \(the model\) \(Remembering\) changes seen while it runs, and no noise protects"),
        ("mixing", "depends on the others"),
        ("mixup", r"layer body \(Linear\) for one example depends on the others"),
        ("queueing", r"layer body \(Linear\) changes from pass to pass .* Queueing keeps something of earlier passes"),
        ("locked", "Locked cannot be copied, .*: TypeError: cannot pickle"),
        ("reordering", r"layer body \(Linear\) for one example depends on the others"),
        ("raising", r"cannot be trained on examples of shape \(1, 8, 8\): KeyError"),
        ("leaving", "cannot be trained on examples .*: SystemExit: no licence"),
    ],
)
def test_models_that_leak_past_the_mechanism_are_refused(name: str, words: str, mechanism: dict[str, object]) -> None:
    model = {"name": f"tests.integration.test_honesty:{name}"}
    with pytest.raises(InputError, match=words):
        build_world(experiment(model=model, mechanism=mechanism))
    build_world(experiment(model=model))


def test_empty_poisson_batches_are_no_victims(tmp_path: Path) -> None:
    settings = experiment(
        training={"sampling": "poisson", "batch_size": 1},
        federation={"clients": 8},
        adversary={"attacks": ["iga"], "victims": 8, "iga": {"iterations": 3}},
    )
    summary = start_run(settings, tmp_path / "run", "", Silent())
    assert any("held no example" in text for text in summary.warnings)
    truths = len(list((tmp_path / "run" / "reconstructions").glob("*-original*.png")))
    assert f"of {truths} images" in summary.verdict[0]


def test_frozen_parameters_are_known_to_the_adversary(tmp_path: Path) -> None:
    settings = experiment(
        model={"name": "tests.integration.test_honesty:frozen"},
        training={"batch_size": 1},
        adversary={"attacks": ["dlg", "iga"], "victims": 1, "iga": {"iterations": 3}, "dlg": {"iterations": 3}},
    )
    summary = start_run(settings, tmp_path / "run", "", Silent())
    assert summary.warnings == ()
    assert {result.attack for result in summary.attacks} >= {"dlg", "iga"}


def frozen(shape: tuple[int, int, int], classes: int) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, classes))
    model[1].requires_grad_(False)
    return model
