"""The convex head on what another private run's network computes: features, the sum of both figures, refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from fedpriv.core.errors import InputError
from fedpriv.core.progress import Silent
from fedpriv.core.report import load_view, render_page
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.models.machinery.convex import Objective, minimised
from fedpriv.service.audit import audit_answers
from fedpriv.service.opening import claim_of, open_endpoint, open_service
from fedpriv.service.records import Referee, made_service
from fedpriv.service.settings import ServiceConfig
from tests.integration.small import copied, finished
from tests.service.test_lab_service import BARE

GAUSSIAN = {"name": "gaussian", "target_epsilon": 8.0}
QUICK = {"regularisation": 0.05, "tolerance": 1e-6}


class _Noisy(nn.Module):
    """A network that is no fixed function of its image, and one that knows how often it was asked."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.hidden, self.last, self.counts, self.asked = nn.Linear(64, 5), nn.Linear(5, 10), counts, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x.flatten(1))
        if not self.training:
            self.asked += float(self.counts)
            hidden = hidden + (self.asked if self.counts else torch.randn_like(hidden))
        return self.last(hidden)


class _Mixing(nn.Module):
    """In evaluation mode, each image gets something of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(64, 5), nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x.flatten(1))
        return self.last(hidden if self.training else hidden - hidden.mean(dim=0) + 1)


def noisy(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return _Noisy(counts=False)


def counting(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return _Noisy(counts=True)


def mixing(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return _Mixing()


def convolved(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, classes, 8), nn.Flatten())


def config(run: object, method: str = "model", **keys: object) -> ServiceConfig:
    return ServiceConfig.model_validate(
        {"method": method, "features": f"run:{run}", "target_epsilon": 2.0, **QUICK, **keys}
    )


def trained(path: Path, **sections: dict[str, object]) -> RunFolder:
    return finished(path, **(BARE | {"mechanism": GAUSSIAN} | sections))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("asked") / "run", mechanism={"name": "none"})


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("learnt") / "private", federation={"clients": 3, "rounds": 2})


def by_hand(folder: RunFolder, images: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The hidden layer of the run's final network, from the checkpoint's numbers, in numpy."""
    numbers = load_file(folder.path / "checkpoint" / "server.safetensors")
    dataset = build_world(folder.experiment()).dataset
    (mean,), (std,) = dataset.mean, dataset.std
    x = (images.double().numpy().reshape(len(images), -1) / 255 - mean) / std
    hidden = np.tanh(x @ numbers["parameters/hidden1.weight"].T + numbers["parameters/hidden1.bias"])
    return hidden / np.linalg.norm(hidden, axis=1, keepdims=True)


def test_the_head_is_trained_on_the_hidden_layer_and_answers_without_the_other_run(
    run: RunFolder, private: RunFolder, tmp_path: Path
) -> None:
    folder, other = copied(run, tmp_path / "run"), copied(private, tmp_path / "other")
    world = build_world(run.experiment())
    images = world.dataset.x_test[:30]
    before = {path: path.read_bytes() for path in other.path.rglob("*") if path.is_file()}
    served = open_service(folder, config(other.path), Silent())
    assert {path: path.read_bytes() for path in other.path.rglob("*") if path.is_file()} == before
    shutil.rmtree(other.path)
    answers = served.ask(images)
    rows = np.sort(np.concatenate(world.partitions))
    trained_on = by_hand(private, world.dataset.x_train[torch.from_numpy(rows)])
    exact = minimised(Objective(trained_on, world.dataset.y_train.numpy()[rows], 10, 0.05), 1.0, 1e-6).weights
    weights = load_file(folder.path / "service" / "model.safetensors")["weights"]
    service = made_service(folder.path)
    # 120 normal numbers of this deviation: within a factor of 1.4 but once in 1e6.
    assert service.scale / 1.4 < float((weights - exact).std()) < 1.4 * service.scale
    logits = by_hand(private, images) @ weights.T
    assert answers.probabilities is not None
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose(answers.probabilities, shifted / shifted.sum(axis=1, keepdims=True), atol=1e-5)
    assert service.head is not None and (service.head.features, service.head.norm) == (12, 1.0)
    served.close()
    again = open_service(folder, config(other.path), Silent())
    np.testing.assert_array_equal(again.ask(images).labels, answers.labels)
    assert again.asked == 30 and again.ask(world.dataset.x_test[30:33]).labels.shape == (3,)


def test_both_figures_are_added(run: RunFolder, private: RunFolder, tmp_path: Path) -> None:
    worst = private.final_ledger().worst
    assert worst.epsilon is not None and worst.epsilon > 1
    # Head and features may be of one and the same run.
    for name, asked, method, keys in (
        ("one", run, "model", {}),
        ("two", run, "logits", {"distribution": "laplace", "delta": 0}),
        ("three", private, "label", {"delta": 1e-6}),
    ):
        folder = copied(asked, tmp_path / name)
        wanted = config(folder.path if asked is private else private.path, method, answers=5, **keys)
        open_service(folder, wanted, Silent()).close()
        service = made_service(folder.path)
        found, alone = service.guarantee, folder.read(Referee)
        assert found.epsilon == pytest.approx(2.0 + worst.epsilon, rel=1e-6)
        assert found.delta == keys.get("delta", 1e-5) + worst.delta
        assert found.pure_epsilon is None and service.learnt is not None
        assert found.participations == (1 if method == "model" else 5) + worst.participations
        assert worst.theorem["epsilon"] in found.theorem["epsilon"] and "Dwork et al. 2006" in found.theorem["epsilon"]
        assert worst.adjacency.startswith("replace-one: one example") and "replace-one: one" in found.adjacency
        assert any("of it is of the run whose network gives the features" in note for note in found.notes)
        assert set(worst.notes) <= set(service.learnt.guarantee.notes)
        assert alone is not None and alone.epsilon == pytest.approx(2.0, rel=1e-6)
        assert (service.learnt.guarantee.epsilon, service.learnt.run) == (worst.epsilon, wanted.policy.learnt)
    page = render_page(load_view(tmp_path / "two"))
    assert "before its last layer" in page and "that epsilon 2 covers together" in page


def test_probes_count_the_other_run_too(run: RunFolder, private: RunFolder, tmp_path: Path) -> None:
    section = {"service": config(private.path, answers=5).told()}
    folder = trained(tmp_path / "run", mechanism={"name": "none"}, **section)
    world = build_world(folder.experiment())
    claim = claim_of(open_endpoint(folder, world, "model"), world, folder.final_ledger())
    worst = private.final_ledger().worst
    assert claim is not None and claim.epsilon is not None and worst.epsilon is not None
    assert claim.epsilon == pytest.approx(2.0 + worst.epsilon, rel=1e-6)


def test_an_audit_does_not_refute_it_and_moves_no_network(run: RunFolder, private: RunFolder, tmp_path: Path) -> None:
    """Wrong with probability 0.001."""
    folder = copied(run, tmp_path / "run")
    open_service(folder, config(private.path, "logits", answers=5), Silent()).close()
    found = audit_answers(folder, 3, Silent())
    assert found.proven and 0.05 < found.moved <= 1 and found.above == 0 and not found.refutes
    assert found.claimed is not None and found.claimed < 2


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"mechanism": {"name": "none"}}, "its ledger proves nothing .*; name a run whose training is private"),
        ({"mechanism": GAUSSIAN | {"unit": "update"}}, r"another change of the data \(replace-one-update"),
        ({"data": {"partition": "overlapping", "examples_per_client": 50}}, "hold copies of examples"),
        ({"data": {"train_examples": 300}}, "its data are others"),
        ({"data": {"groups": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]}}, "its data are others"),
        ({"robustness": {"noise": 0.3}}, "noise in its forward pass"),
        ({"model": {"name": f"{__name__}:noisy"}}, "noise in the forward pass, or something that it keeps"),
        ({"model": {"name": f"{__name__}:counting"}}, "noise in the forward pass, or something that it keeps"),
        ({"model": {"name": f"{__name__}:convolved"}}, "has no linear layer that gives the logits"),
    ],
)
def test_runs_whose_ledger_or_network_does_not_fit_are_refused(
    run: RunFolder, tmp_path: Path, sections: dict[str, dict[str, object]], said: str
) -> None:
    other = trained(tmp_path / "other", **sections)
    folder = copied(run, tmp_path / "run")
    with pytest.raises(InputError, match=f"service.features = 'run:{other.path}': .*{said}"):
        open_service(folder, config(other.path), Silent())
    assert not (folder.path / "service" / "service.json").exists()


def test_what_is_no_finished_run_is_refused(run: RunFolder, private: RunFolder, tmp_path: Path) -> None:
    folder, other = copied(run, tmp_path / "run"), copied(private, tmp_path / "other")
    with pytest.raises(InputError, match=r"'run:nowhere': nowhere is not the folder of a run"):
        open_service(folder, config("nowhere"), Silent())
    ledger = other.path / "ledger.json"
    told = ledger.read_text()
    # What Poisson batches under zero-out would have; their accounting takes seconds.
    ledger.write_text(told.replace("replace-one: one example of this client", "zero-out: one example of this client"))
    with pytest.raises(
        InputError, match=r"another change of the data \(zero-out.* with mechanism.unit = 'example' and"
    ):
        open_service(folder, config(other.path), Silent())
    ledger.write_text(told)
    (other.path / "summary.json").unlink()
    with pytest.raises(InputError, match=r"has no summary\.json: finish the run with"):
        open_service(folder, config(other.path), Silent())
    with pytest.raises(InputError, match="add up to 1 or more"):
        open_service(folder, config(private.path, delta=0.9999999), Silent())
    with pytest.raises(ValueError, match="are for the one convex head of all data"):
        config(private.path, "votes", shards=5)
    with pytest.raises(ValueError, match="features"):
        ServiceConfig.model_validate({"method": "model", "features": "run:", "noise": 1.0})


def test_a_network_that_mixes_a_batch_sees_one_image_at_a_time(run: RunFolder, tmp_path: Path) -> None:
    """Else one example would move the features of all others, of which nothing is proven."""
    other, folder = trained(tmp_path / "other", model={"name": f"{__name__}:mixing"}), copied(run, tmp_path / "run")
    served = open_service(folder, config(other.path), Silent())
    images = build_world(run.experiment()).dataset.x_test[:4]
    alone = np.concatenate([served.oracle.scores(image) for image in images.split(1)])
    np.testing.assert_allclose(served.oracle.scores(images), alone, rtol=1e-9)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _exchange(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [_cut, _exchange, Path.unlink])
def test_a_damaged_network_is_one_line(
    run: RunFolder, private: RunFolder, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = copied(run, tmp_path / "run")
    open_service(folder, config(private.path), Silent()).close()
    damage(folder.path / "service" / "features.safetensors")
    with pytest.raises(InputError, match=r"features\.safetensors is damaged: ") as error:
        open_service(folder, None, Silent())
    assert "\n" not in str(error.value)


def test_another_network_has_other_noise(run: RunFolder, private: RunFolder, tmp_path: Path) -> None:
    """Of two heads with one noise the difference would be exact."""
    other, released = copied(private, tmp_path / "other"), []
    longer = trained(tmp_path / "longer", federation={"clients": 3, "rounds": 1})
    for name, source in (("one", private), ("two", longer)):
        shutil.rmtree(other.path)
        copied(source, other.path)
        folder = copied(run, tmp_path / name)
        served = open_service(folder, config(other.path, noise=100.0, target_epsilon=None), Silent())
        served.close()
        released.append(load_file(folder.path / "service" / "model.safetensors")["weights"].ravel())
    # Correlation of 120 independent numbers: beyond 0.5 but once in 1e8.
    assert abs(np.corrcoef(*released)[0, 1]) < 0.5


def test_settings_of_before_write_the_files_of_before(run: RunFolder, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    wanted = {"method": "model", "noise": 1.0, "features": "pooled:4", **QUICK}
    open_service(folder, ServiceConfig.model_validate(wanted), Silent()).close()
    place = folder.path / "service"
    assert set(json.loads((place / "service.json").read_text())) == {
        *("method", "title", "settings", "answers", "scale", "delta", "model", "source", "classes", "shape", "head"),
        *("models", "guarantee"),
    }
    assert set(json.loads((place / "referee.json").read_text())) == {
        *("accuracy", "answered", "tested", "gradient_norm", "curves"),
    }
    assert not (place / "features.safetensors").exists()
