"""Labels from the last layer's gradient: always right on clean single examples, a best guess otherwise."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attack_victims import (
    Biasless,
    Headless,
    OwnHead,
    digits,
    lenet,
    mlp,
    normalise,
    observe,
    observe_digits,
    parameters_of,
)
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.labels import OutputLayer, find_output_layer, infer_labels
from fedpriv.attacks.reconstruction.upload_model import prepare_victims
from fedpriv.models.convnets import ConvnetSettings, ResnetSettings
from fedpriv.models.machinery.build import build_model
from tests.cases import in_one_test

SHAPE = (1, 8, 8)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet uniform": lenet,
    "lenet default": lambda: lenet("default"),
    "mlp sigmoid": mlp,
    "mlp relu": lambda: mlp("relu", hidden=(64, 32)),
    "mlp tanh": lambda: mlp("tanh"),
    "softmax regression": lambda: mlp(hidden=()),
    "convnet": lambda: build_model(ConvnetSettings(), SHAPE, 10, 0),
    "resnet": lambda: build_model(ResnetSettings(), SHAPE, 10, 0),
    "own head": OwnHead,
    "own head tanh": lambda: OwnHead(activation=torch.tanh),
    "no bias relu": lambda: Biasless(torch.relu),
    "no bias tanh": lambda: Biasless(torch.tanh),
}


def trained(model: nn.Module, steps: int = 40) -> nn.Module:
    images, labels = digits()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        rows = slice(64 * (step % 20), 64 * (step % 20) + 64)
        optimiser.zero_grad()
        F.cross_entropy(model(normalise(images[rows])), labels[rows]).backward()
        optimiser.step()
    return model


def inferred(model: nn.Module, heard: list) -> list[Tensor | None]:
    network = Network(model)
    victims = prepare_victims(heard, network.names, network.device)
    layer = find_output_layer(network, victims[0].parameters, SHAPE, 10)
    assert layer is not None
    return [infer_labels(network, victim, layer, SHAPE, 10) for victim in victims]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_single_examples_are_always_right(name: str, training: bool) -> None:
    model = trained(MODELS[name]()) if training else MODELS[name]()
    heard, _, labels = observe_digits(model, 20, first=100)
    assert torch.equal(torch.stack(inferred(model, heard)), labels)


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_the_sign_of_an_update_does_not_invert_labels(algorithm: str) -> None:
    model = mlp()
    heard, _, labels = observe_digits(model, 10, algorithm=algorithm)
    if algorithm == "fedavg":
        for observation in heard:
            for value in observation.upload.values():
                value.mul_(-observation.settings.learning_rate)
    assert torch.equal(torch.stack(inferred(model, heard)), labels)


@in_one_test(
    ("name", "layer"),
    [
        ("lenet uniform", OutputLayer("output.bias", True)),
        ("mlp relu", OutputLayer("output.bias", True)),
        ("resnet", OutputLayer("output.bias", True)),
        ("own head", OutputLayer("offset", True)),
        ("no bias relu", OutputLayer("last.weight", False)),
        ("no bias tanh", OutputLayer("last.weight", False)),
    ],
)
def test_the_last_layer_is_found_by_what_it_does(name: str, layer: OutputLayer) -> None:
    model = MODELS[name]()
    assert find_output_layer(Network(model), parameters_of(model), SHAPE, 10) == layer


def test_no_last_layer() -> None:
    model = Headless()
    assert find_output_layer(Network(model), parameters_of(model), SHAPE, 10) is None


def test_a_hidden_layer_as_wide_as_the_classes_is_not_taken_for_the_last() -> None:
    model = mlp("relu", hidden=(10,))
    assert find_output_layer(Network(model), parameters_of(model), SHAPE, 10) == OutputLayer("output.bias", True)


@in_one_test("name", ["lenet uniform", "lenet default", "mlp sigmoid", "mlp relu"])
@pytest.mark.parametrize("batch", [(3, 1, 4), (7, 7, 2, 0), (5, 5, 5, 5), tuple(range(10))])
def test_batches_on_untrained_networks(name: str, batch: tuple[int, ...]) -> None:
    """Duplicates included. Random images stand in for the real ones: their softmax is nearly the same before training.

    Without a bias the features matter too, and those of random images are not those of digits: no such promise there.
    """
    images, labels = digits()
    rows = [int((labels == label).nonzero()[k + 5]) for k, label in enumerate(batch)]
    model = MODELS[name]()
    (found,) = inferred(model, [observe(model, images[rows], labels[rows])])
    assert found is not None
    assert found.tolist() == sorted(batch)


@in_one_test(
    "mechanism",
    [
        {"name": "gaussian", "sigma": 1e-3, "clip_norm": 0.1},
        {"name": "vmf", "kappa": 1e7},
        {"name": "vmf", "kappa": 1e7, "blocks": "layer"},
    ],
)
@in_one_test("batch", [(4,), (3, 1, 4, 4)])
def test_little_noise_and_rescaling_are_no_obstacle(mechanism: dict[str, object], batch: tuple[int, ...]) -> None:
    images, labels = digits()
    rows = [int((labels == label).nonzero()[k + 5]) for k, label in enumerate(batch)]
    model = mlp()
    (found,) = inferred(model, [observe(model, images[rows], labels[rows], mechanism=mechanism)])
    assert found is not None
    assert found.tolist() == sorted(batch)


@in_one_test("name", ["mlp sigmoid", "no bias relu"])
@in_one_test("count", [1, 3])
def test_pure_noise_gives_some_label(name: str, count: int) -> None:
    images, labels = digits()
    model = MODELS[name]()
    noisy = observe(model, images[:count], labels[:count], mechanism={"name": "gaussian", "sigma": 1e4})
    (found,) = inferred(model, [noisy])
    assert found is not None
    assert found.shape == (count,)
    assert bool(((found >= 0) & (found < 10)).all())


def test_unknown_scale_of_a_batch_leaves_labels_open() -> None:
    images, labels = digits()
    model = mlp()
    heard = [
        observe(model, images[:count], labels[:count], mechanism={"name": "vmf", "kappa": 5.0, "unit": "update"})
        for count in (1, 3)
    ]
    one, several = inferred(model, heard)
    assert one is not None
    assert several is None
