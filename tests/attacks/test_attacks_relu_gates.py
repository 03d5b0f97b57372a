"""Units as unknowns of their own: the network with decided gates is the network, and the upload tells the units."""

import torch
import torch.nn.functional as F
from attack_victims import MEAN, STD, digits, lenet, mlp, normalise, observe_digits, parameters_of
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network, kink_inputs
from fedpriv.attacks.reconstruction.first_layer.closed_form import read_starts
from fedpriv.attacks.reconstruction.posterior import Gated, Whitening, _coins_differ, can_be_gated, read_gated
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import Victim, prepare_victims
from tests.cases import in_one_test

NOISY = {"name": "gaussian", "sigma": 1e-2, "clip_norm": 1.0}


def hidden_inputs(model: nn.Module, images: Tensor) -> list[Tensor]:
    """What each ReLU of a chain of layers gets, layer by layer."""
    inputs, values = [], images
    for layer in model.modules():
        if isinstance(layer, nn.Flatten | nn.Linear | nn.ReLU):
            inputs += [values] if isinstance(layer, nn.ReLU) else []
            values = layer(values)
    return [one.detach() for one in inputs]


def test_what_kinks_get() -> None:
    model = mlp("relu", hidden=(32, 16))
    images = normalise(digits()[0][:5])
    found = kink_inputs(Network(model), parameters_of(model), images)
    wanted = hidden_inputs(model, images)
    assert len(found) == 2
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert kink_inputs(Network(lenet()), parameters_of(lenet()), images) == []


def test_with_the_units_as_they_are_the_gradient_is_the_networks_and_its_derivative_too() -> None:
    model = mlp("relu", hidden=(32, 16)).double()
    images = normalise(digits()[0][:4]).double().requires_grad_()
    labels = digits()[1][:4]
    gates = [(one > 0).double() for one in kink_inputs(Network(model), parameters_of(model), images.detach())]

    def length() -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(images), labels)
        gradient = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        total = torch.stack([one.square().sum() for one in gradient]).sum()
        return total, torch.autograd.grad(total, images)[0]

    wanted, pull = length()
    with Gated(gates) as gated:
        found, pull_gated = length()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(pull_gated, pull)
    assert [one.shape for one in gated.inputs] == [(4, 32), (4, 16)]


def test_how_coins_differ() -> None:
    generator = torch.Generator().manual_seed(3)
    one, other = (5 * torch.randn(100, generator=generator, dtype=torch.float64) for _ in range(2))
    coins = [torch.distributions.Bernoulli(logits=logits) for logits in (one, other)]
    torch.testing.assert_close(_coins_differ(one, other), torch.distributions.kl_divergence(*coins))


def prepared(model: nn.Module, **changes: object) -> tuple[Scene, list[Victim], Tensor, Tensor]:
    heard, truth, labels = observe_digits(model, 4, first=40, **changes)
    network = Network(model)
    victims = prepare_victims(heard, network.names, network.device)
    scene = Scene.of(network, heard[0].settings, torch.float32, digits()[0][600:])
    return scene, victims, (truth - MEAN) / STD, labels


def test_the_upload_tells_the_units() -> None:
    """Fewer units of the images that are found are wrong than of the closed form's: 26 of 1,024, and 43."""
    model = mlp("relu", hidden=(128, 128))
    scene, victims, truth, labels = prepared(model, mechanism=NOISY)
    whitening = Whitening(scene.prior, scene.shape)
    begin = whitening.coordinates(torch.stack([start.images for start in read_starts(scene, victims)]))
    ended = read_gated(scene, victims, labels, begin, 200, 0.05)

    def wrong(images: Tensor) -> int:
        pairs = zip(hidden_inputs(model, images.flatten(0, 1)), hidden_inputs(model, truth.flatten(0, 1)), strict=True)
        return sum(int(((one > 0) != (other > 0)).sum()) for one, other in pairs)

    assert wrong(whitening.images(ended)) < 0.75 * wrong(whitening.images(begin))


@in_one_test(
    ("changes", "wanted"),
    [
        ({"mechanism": NOISY}, True),
        ({"mechanism": {"name": "none"}}, False),
        ({"mechanism": NOISY, "algorithm": "fedavg", "local_steps": 2, "client_examples": 1}, False),
    ],
)
def test_where_units_can_be_unknowns(changes: dict[str, object], wanted: bool) -> None:
    scene, victims, _, _ = prepared(mlp("relu", hidden=(32,)), **changes)
    assert can_be_gated(scene, victims[0]) is wanted
