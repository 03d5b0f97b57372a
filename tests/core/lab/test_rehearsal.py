"""What is tried before a run: one step of a client and one of each attack, on random images."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.campaign import AttackOutcome, Campaign
from fedpriv.attacks.reconstruction import AttackJob
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.lab import check_experiment, preflight, start_run
from fedpriv.core.lab.preflight import rehearse
from fedpriv.core.progress import Silent
from fedpriv.core.world import build_world
from tests.integration.small import experiment
from tests.integration.test_every_mechanism import MECHANISMS

Shape = tuple[int, int, int]


class _Network(nn.Module):
    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(math.prod(shape), 6), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.hidden(x.flatten(1))))


class _Untrainable(_Network):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("no more than one image\nat a time")
        return super().forward(x)


class _Leaver(_Network):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise SystemExit("licence expired")
        return super().forward(x)


class _OnceOnly(_Network):
    """Torch can differentiate the margins once."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        margins = F.multi_margin_loss(logits, torch.zeros(len(x), dtype=torch.long), reduction="none")
        return logits * (1 + margins[:, None])


def softmaxed() -> nn.Module:
    return nn.Sequential(_Network((1, 8, 8), 10), nn.Softmax(dim=-1))


def untrainable(shape: Shape, classes: int) -> nn.Module:
    return _Untrainable(shape, classes)


def leaver(shape: Shape, classes: int) -> nn.Module:
    return _Leaver(shape, classes)


def once_only(shape: Shape, classes: int) -> nn.Module:
    return _OnceOnly(shape, classes)


def headless(shape: Shape, classes: int) -> nn.Module:
    network = _Network(shape, classes)
    nn.init.zeros_(network.last.weight)
    return network


def normalised(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(shape[0]), _Network(shape, classes))


def own(name: str) -> dict[str, object]:
    return {"name": f"tests.core.lab.test_rehearsal:{name}"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [("untrainable", "ValueError: no more than one image at a time"), ("leaver", "SystemExit: licence expired")],
)
def test_a_network_that_cannot_be_trained_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    settings = experiment(model=own(name))
    with pytest.raises(InputError, match=rf"cannot be trained: {reason}$"):
        start_run(settings, tmp_path / "run", "", Silent())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("attack", ["dlg", "idlg", "iga", "map", "custom"])
def test_an_attack_that_cannot_pass_the_network_is_warned_of(attack: str) -> None:
    """Its error is its own refusal; the run and the other attacks go on."""
    warnings = check_experiment(experiment(model=own("once_only"), adversary={"attacks": [attack]}))
    assert any(text.startswith(f"attack {attack} refuses an upload of random images: ") for text in warnings)


def test_a_search_that_time_ends_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is told to end after has passed when it ends: that it found nothing by then says nothing but this."""
    given: list[float | None] = []

    def search(job: AttackJob) -> Campaign:
        given.append(job.seconds)
        return Campaign((AttackOutcome(None, "nothing was found"),))

    settings = experiment(model=own("once_only"), adversary={"attacks": ["closed_form"]})
    monkeypatch.setattr(preflight, "attack_each", search)
    assert any("nothing was found" in text for text in check_experiment(settings))
    monkeypatch.setattr(preflight, "_SECONDS", 0.0)
    warnings = check_experiment(settings)
    assert not any("nothing was found" in text for text in warnings)
    assert [text for text in warnings if "did not end" in text] == [
        "attack closed_form was tried on random images for 0 s, and did not end: it may refuse the uploads"
    ]
    assert given[0] and given[1] == 0
    assert any("nothing was found" in text for text in check_experiment(experiment(adversary={"attacks": ["iga"]})))


def test_the_same_network_is_trained_without_such_attacks() -> None:
    check_experiment(experiment(model=own("once_only"), adversary={"attacks": []}))


def test_an_attack_that_refuses_such_a_network_is_a_warning(tmp_path: Path) -> None:
    settings = experiment(model={"name": "lenet"}, adversary={"attacks": ["closed_form", "iga"]})
    (warning,) = check_experiment(settings)
    assert warning.startswith("attack closed_form refuses an upload of random images: closed_form needs a network")


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, True),
        ({"adversary": {"attacks": ["iga"], "rounds": [1, 2]}}, True),
        ({"adversary": {"attacks": ["iga"], "rounds": [2]}}, False),
        ({"adversary": {"attacks": []}}, False),
        ({"federation": {"algorithm": "fedavg"}, "training": {"local_epochs": 2}}, False),
        ({"model": own("once_only")}, False),
    ],
    ids=str,
)
def test_a_first_upload_that_holds_little_is_warned_of(changes: dict[str, dict[str, object]], warned: bool) -> None:
    """With a head of zeros 70 of 460 numbers have a gradient, whatever the data is."""
    settings = {"model": own("headless"), "adversary": {"attacks": ["iga"]}, **changes}
    told = [text for text in check_experiment(experiment(**settings)) if "in a first upload are zero" in text]
    assert [text.startswith("all but 70 of the 460 numbers") for text in told] == [True] * warned


def test_attacks_on_texts_need_no_public_ones(tmp_path: Path) -> None:
    rows = "".join(f"the film number {number} is good,{number % 2}\n" for number in range(20))
    (tmp_path / "own.csv").write_text("text,label\n" + rows)
    text = {"text": "text", "label": "label", "tokenizer": "byte", "length": 8}
    changes: dict[str, Any] = {
        "data": {"name": "text", "path": str(tmp_path / "own.csv"), "text": text},
        "model": {"name": "gpt", "width": 16, "depth": 1, "heads": 2},
        "federation": {"clients": 1},
        "training": {"batch_size": 1},
        "adversary": {"attacks": ["tag", "lamp", "lookup", "text_map"]},
    }
    assert rehearse(build_world(Experiment.model_validate(changes))) == ()
    changes["adversary"]["knows_public_data"] = False
    assert rehearse(build_world(Experiment.model_validate(changes))) == ()


@pytest.mark.parametrize(
    "name",
    ["none", "gaussian by layer", "laplace", "hgm, public", "vmf, blocks of 256", "vmf, update"],
)
def test_what_works_passes(name: str) -> None:
    """What an attack is told of each mechanism; how its noise was found is no part of that."""
    settings = experiment(
        mechanism=MECHANISMS.get(name, {"name": "none"}),
        adversary={"attacks": ["dlg", "idlg", "iga", "closed_form", "map", "custom"]},
    )
    rehearse(build_world(settings))


@pytest.mark.parametrize(
    "changes",
    [
        {"adversary": {"attacks": ["iga"], "threat_model": "network-tls"}},
        {"adversary": {"attacks": ["iga"], "knows_batch_size": False}},
        {"adversary": {"attacks": ["iga"]}, "federation": {"secure_aggregation": True}},
        {"adversary": {"attacks": ["iga"]}, "federation": {"algorithm": "fedavg"}, "engine": {"precision": "bfloat16"}},
        {"adversary": {"attacks": ["iga"]}, "training": {"batch_size": 8, "sampling": "poisson"}},
        {"adversary": {"attacks": ["iga", "dlg"]}, "model": own("normalised")},
    ],
    ids=str,
)
def test_every_listener_and_engine_passes(
    changes: dict[str, dict[str, object]], caplog: pytest.LogCaptureFixture
) -> None:
    rehearse(build_world(experiment(**changes)))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {"batch_size": 5000}}, "5000"),
        ({"model": own("normalised"), "mechanism": {"name": "gaussian", "sigma": 1.0}}, "mixes the examples"),
        ({"data": {"name": "npz", "path": "nowhere.npz"}}, "nowhere.npz"),
    ],
)
def test_what_a_run_refuses_is_found(changes: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_experiment(experiment(**changes))


def test_a_network_that_ends_in_a_softmax_is_warned_of() -> None:
    """And one that takes no sizes is called without them."""
    said = check_experiment(experiment(model=own("softmaxed"), adversary={"attacks": []}))
    assert any("its outputs are positive and add up to 1" in line for line in said)
