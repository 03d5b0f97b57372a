"""Robbing the Fed: exact images from one gradient of crafted parameters, and who may not do this."""

import pytest
import torch
import torch.nn.functional as F
from attack_victims import MEAN, STD, Biasless, digits, lenet, mlp, normalise, observe
from torch import Tensor, nn

from attacks.observation import Observation
from attacks.reconstruction import AttackRefused
from attacks.reconstruction.imprint import craft_parameters, find_imprint_layers, read_imprint
from attacks.threat import ThreatModel, threat_model
from fedpriv.config import AdversaryConfig
from fedpriv.gradients import Vector

SHAPE = (1, 8, 8)


def threat(name: str = "malicious-server", **changes: bool) -> ThreatModel:
    return threat_model(AdversaryConfig.model_validate({"threat_model": name, **changes}))


def crafted(hidden: tuple[int, ...] = (400, 32)) -> tuple[nn.Module, Vector]:
    """A network with parameters made from the last thousand digits, which no client holds.

    Digits have few different brightnesses. Those of the public ones are shifted a little, or the cut points would lie
    exactly on images, and rounding would decide which side they are on.
    """
    model = mlp("relu", hidden)
    shift = torch.rand(1000, 1, 1, 1, generator=torch.Generator().manual_seed(2)) / 50
    parameters = craft_parameters(model, normalise(digits()[0][-1000:] + shift), threat())
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(parameters[name])
    return model, parameters


def alone(images: Tensor, parameters: Vector) -> list[int]:
    """The numbers of the images that share their bin with no other, told from the truth.

    An image within rounding of a cut point counts as being in both bins, so not as alone.
    """
    cuts = -parameters["hidden1.bias"].double()
    measured = normalise(images).flatten(1).double().mean(dim=1)
    low, high = (torch.bucketize(measured + shift, cuts).tolist() for shift in (-1e-7, 1e-7))
    bins = [set(range(first, last + 1)) for first, last in zip(low, high, strict=True)]
    return [
        number
        for number, own in enumerate(bins)
        if len(own) == 1 and not any(own & other for k, other in enumerate(bins) if k != number)
    ]


@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize("hidden", [(400,), (400, 32), (400, 32, 16)])
def test_images_that_are_alone_in_their_bin_are_exact(size: int, hidden: tuple[int, ...]) -> None:
    model, parameters = crafted(hidden)
    images, labels = digits()
    found = read_imprint(observe(model, images[:size], labels[:size]), model, threat())
    errors = (images[:size, None] - found.images[None]).square().flatten(2).mean(dim=2)
    expected = alone(images[:size], parameters)
    assert len(expected) > size / 2
    exact = errors[expected].min(dim=1).values < 1e-8
    assert bool(exact.all())
    assert not found.complete or len(expected) == size


def test_clipping_does_not_hide_them_and_noise_does() -> None:
    model, _ = crafted()
    images, labels = digits()
    clipped = {"name": "gaussian", "sigma": 1e-9, "clip_norm": 0.01}
    found = read_imprint(observe(model, images[:8], labels[:8], mechanism=clipped), model, threat())
    errors = (images[:8, None] - found.images[None]).square().flatten(2).mean(dim=2)
    assert float(errors.min(dim=1).values.median()) < 1e-4
    noisy = {"name": "gaussian", "sigma": 1.0, "clip_norm": 0.01}
    found = read_imprint(observe(model, images[:8], labels[:8], mechanism=noisy), model, threat())
    assert len(found.images) == 0
    assert "0 of 8" in found.note


def test_a_mixture_is_not_called_complete() -> None:
    model, _ = crafted()
    images, labels = digits()
    twins = torch.cat([images[:1], images[:1].flip(3)])  # of the same brightness
    found = read_imprint(observe(model, twins, labels[[0, 1]]), model, threat())
    assert not found.complete
    assert "mixture" in found.note


@pytest.mark.parametrize(
    "name", ["honest-but-curious-server", "secure-aggregation", "network-plaintext", "network-tls"]
)
def test_a_passive_adversary_is_refused(name: str) -> None:
    model, _ = crafted()
    images, labels = digits()
    with pytest.raises(AttackRefused, match=r"imprint needs .*passive"):
        craft_parameters(model, normalise(images), threat(name))
    with pytest.raises(AttackRefused, match=r"imprint needs .*passive"):
        read_imprint(observe(model, images[:4], labels[:4]), model, threat(name))


def test_without_public_images_it_is_refused() -> None:
    with pytest.raises(AttackRefused, match="knows_public_data"):
        craft_parameters(mlp("relu", (40, 10)), normalise(digits()[0]), threat(knows_public_data=False))


class Renamed(nn.Module):
    """The same layers under other names, registered in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Linear(20, 10)
        self.a = nn.Linear(64, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.z(F.relu(self.a(x.reshape(len(x), -1))))


def test_layers_are_found_by_what_they_do() -> None:
    layers = find_imprint_layers(Renamed(), SHAPE)
    assert (layers.weight, layers.bias, layers.next_weight) == ("a.weight", "a.bias", "z.weight")


class Scaled(Renamed):
    """The first layer sees the image changed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lenet(), "first layer is a Linear layer"),
        (Scaled(), "first layer is a Linear layer"),
        (Biasless(torch.relu), "with bias"),
        (mlp("sigmoid"), "ReLU"),
    ],
)
def test_other_networks_are_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(AttackRefused, match=says):
        craft_parameters(model, normalise(digits()[0]), threat())


def test_uploads_that_are_no_gradient_of_crafted_parameters_are_refused() -> None:
    images, labels = digits()
    with pytest.raises(AttackRefused, match="not made for imprint"):
        model = mlp("relu", (400, 32))
        read_imprint(observe(model, images[:4], labels[:4]), model, threat())
    model, _ = crafted()
    heard = observe(model, images[:4], labels[:4], algorithm="fedavg", local_steps=3)
    with pytest.raises(AttackRefused, match="3 local step"):
        read_imprint(heard, model, threat())


def test_the_step_of_fedavg_is_undone() -> None:
    model, _ = crafted()
    images, labels = digits()
    gradient = observe(model, images[:4], labels[:4])
    changes = observe(model, images[:4], labels[:4], algorithm="fedavg", learning_rate=0.1)
    update = Observation(1, 0, gradient.parameters, {n: -0.1 * v for n, v in gradient.upload.items()}, changes.settings)
    one, other = (read_imprint(heard, model, threat()) for heard in (gradient, update))
    assert one.bins.tolist() == other.bins.tolist()
    torch.testing.assert_close(one.images, other.images, atol=1e-3, rtol=0)


def test_the_scale_is_the_public_one() -> None:
    assert (MEAN, STD) == (0.3, 0.35)
    model, _ = crafted()
    images, labels = digits()
    found = read_imprint(observe(model, images[:1], labels[:1]), model, threat())
    assert found.images.shape == (1, 1, 8, 8)
    torch.testing.assert_close(found.images[0], images[0], atol=1e-3, rtol=0)
