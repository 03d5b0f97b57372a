"""Warnings before an attack, one setting at a time."""

import re

import pytest
import torch
from attack_victims import lenet, mlp, settings
from torch import nn

from fedpriv.attacks.reconstruction import AttackRefused, preflight
from tests.cases import in_one_test


def network(*middle: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), *middle, nn.Linear(20, 10))


@in_one_test(
    ("model", "changes", "attacks", "says"),
    [
        (network(nn.BatchNorm1d(20), nn.Sigmoid()), {}, ("iga",), "BatchNorm"),
        (
            network(nn.BatchNorm1d(20, track_running_stats=False), nn.Sigmoid()).eval(),
            {},
            ("iga",),
            "as the client does in training",
        ),
        (network(nn.ReLU()), {}, ("dlg", "iga"), "ReLU"),
        (lenet(), {"batch_size": 2, "clients": 6}, ("iga",), "12 examples behind one upload"),
        (network(nn.LeakyReLU()), {}, ("dlg",), "LeakyReLU"),
        (lenet(), {"batch_size": 11}, ("iga",), "11 examples behind one upload are more than the 10 classes"),
        (lenet(), {"algorithm": "fedavg", "local_steps": 4}, ("iga",), "4 local steps"),
        (lenet(), {"algorithm": "fedavg", "optimizer": "adam"}, ("iga",), "the signs"),
        (lenet(), {"algorithm": "fedavg", "local_steps": 2, "momentum": 0.5}, ("dlg",), "2 local steps"),
    ],
)
def test_warns(model: nn.Module, changes: dict[str, object], attacks: tuple[str, ...], says: str) -> None:
    lines = preflight(model, settings(**changes), attacks)
    assert len(lines) == 1
    assert says in lines[0]


@in_one_test(
    ("model", "says"),
    [
        (nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(64, 10)), "0 (Embedding) takes whole"),
        (nn.EmbeddingBag(50, 10), "the model (EmbeddingBag) takes whole numbers"),
    ],
)
def test_refuses_networks_of_tokens(model: nn.Module, says: str) -> None:
    with pytest.raises(AttackRefused, match=re.escape(says)):
        preflight(model, settings(), ("iga",))


class Placed(nn.Module):
    """Its tables are of places and of codes, not of what the image is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.codes = nn.Embedding(8, 8), nn.Embedding(5, 8)
        self.last = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[:, 0] + self.places(torch.arange(8))
        near = self.codes(torch.cdist(h.detach(), self.codes.weight).argmin(dim=2))
        return self.last((torch.tanh(h) + near).flatten(1))


@in_one_test(
    ("model", "changes", "attacks"),
    [
        (lenet(), {}, ("dlg", "iga")),
        (mlp("relu"), {}, ("iga",)),
        (Placed(), {}, ("iga",)),
        (lenet(), {"batch_size": None}, ("dlg", "iga")),
        (lenet(), {"batch_size": 10}, ("dlg", "iga")),
        (lenet(), {"optimizer": "adam", "momentum": 0.9}, ("dlg", "iga")),
        (network(nn.ReLU(), nn.Dropout(0.5)), {"batch_size": 100}, ()),
    ],
)
def test_is_silent_otherwise(model: nn.Module, changes: dict[str, object], attacks: tuple[str, ...]) -> None:
    assert preflight(model, settings(**changes), attacks) == ()


def test_gradients_that_say_nothing() -> None:
    constant = network(nn.Sigmoid())
    with torch.no_grad():
        constant[-1].weight.zero_()  # logits are constant and so is the first layer's gradient, which is zero
        constant[1].weight.zero_()
    (line,) = preflight(constant, settings(), ("iga",))
    assert "does not depend on the image" in line
    frozen = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        frozen[1].bias.fill_(0.0)
    assert preflight(frozen, settings(), ("iga",)) == ()


class Cut(nn.Module):
    """Its output does not lead back to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer((x > 0).to(x).flatten(1))


def test_an_input_that_is_cut_off() -> None:
    (line,) = preflight(Cut(), settings(), ("iga",))
    assert "does not depend on the image" in line


def test_leaves_the_network_alone() -> None:
    model = network(nn.BatchNorm1d(20), nn.Sigmoid(), nn.Dropout(0.5)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    preflight(model, settings(), ("dlg", "iga"))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
