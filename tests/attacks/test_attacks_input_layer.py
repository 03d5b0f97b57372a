"""The first layer is found by what it does, and only where the image enters through it alone."""

from collections.abc import Callable

import pytest
import torch
from attack_networks import Twice
from attack_victims import Biasless, Headless, OwnHead, lenet, mlp, parameters_of
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.first_layer.batch import InputLayer, find_input_layer
from tests.cases import in_one_test

SHAPE = (1, 8, 8)


class Around(nn.Module):
    """The image goes around the first layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 12)
        self.last = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.last(torch.tanh(self.first(x))) + x[:, :10]


class Bent(nn.Module):
    """What the first layer multiplies is not the image but a function of it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(64, 12)
        self.last = nn.Linear(12, 10)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.function(x.flatten(1)))))


class Square(nn.Module):
    """As many outputs as pixels, a bias of that size that is added late, and one that is added at once."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.rand(64))
        self.early = nn.Parameter(torch.rand(64))
        self.first = nn.Linear(64, 64, bias=False)
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.flatten(1)) + self.early) + self.late)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 12)
        self.norm = nn.BatchNorm1d(12)
        self.last = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x.flatten(1)))))


def first(bias: bool = True) -> InputLayer:
    return InputLayer("first.weight", "first.bias" if bias else None, transposed=False)


FOUND: dict[str, tuple[Callable[[], nn.Module], InputLayer]] = {
    "mlp": (mlp, InputLayer("hidden1.weight", "hidden1.bias", transposed=False)),
    "relu": (lambda: mlp("relu", (32, 16)), InputLayer("hidden1.weight", "hidden1.bias", transposed=False)),
    "softmax regression": (lambda: mlp(hidden=()), InputLayer("output.weight", "output.bias", transposed=False)),
    "no bias": (lambda: Biasless(torch.relu), first(bias=False)),
    "own, transposed": (OwnHead, InputLayer("body", None, transposed=True)),
    "no output layer": (Headless, first()),
    "square": (Square, InputLayer("first.weight", "early", transposed=False)),
}
NONE: dict[str, Callable[[], nn.Module]] = {
    "convolution": lenet,
    "around": Around,
    "relu of the image": lambda: Bent(torch.relu),
    "absolute value": lambda: Bent(torch.abs),
    "sigmoid of the image": lambda: Bent(torch.sigmoid),
    "image has no effect": lambda: nn.Sequential(nn.Flatten(), _zero(nn.Linear(64, 10))),
}


def _zero(layer: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        layer.weight.zero_()
    return layer


@in_one_test("name", FOUND)
def test_found(name: str) -> None:
    make, layer = FOUND[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make()
    assert find_input_layer(Network(model), parameters_of(model), SHAPE) == layer


@in_one_test("name", NONE)
def test_there_is_none(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = NONE[name]()
    assert find_input_layer(Network(model), parameters_of(model), SHAPE) is None


def test_a_layer_that_is_used_twice_is_none() -> None:
    """Its gradient is a sum of two products, of which only one has the image in it."""
    model = Twice()
    assert find_input_layer(Network(model), parameters_of(model), (1, 12, 12)) is None


def test_bias_behind_batchnorm_has_no_effect_and_is_not_taken_for_one() -> None:
    model = Normalised()
    layer = find_input_layer(Network(model), parameters_of(model), SHAPE)
    assert layer is not None
    assert layer.weight == "first.weight"


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_come_the_same_way_round(transposed: bool) -> None:
    weight, bias = torch.rand(3, 4), torch.rand(3)
    layer = InputLayer("w", "b", transposed)
    found = layer.gradients({"w": weight.mT if transposed else weight, "b": bias})
    assert torch.equal(found[0], weight)
    assert found[1] is bias
    assert InputLayer("w", None, transposed).gradients({"w": weight})[1] is None
