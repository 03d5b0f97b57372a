"""Labels that noise leaves open, against likelihoods computed one image at a time from autograd's gradients."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_victims import digits, errors, lenet, mlp, observe, observe_digits
from torch import Tensor, nn

from fedpriv.attacks.methods.map import MapSettings
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, run_attack
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.posterior import (
    BEHIND,
    LABEL_DRAWS,
    SEED,
    TRIED,
    Whitening,
    likely_labels,
    open_labels,
)
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import Victim, prepare_victims
from fedpriv.models.machinery.build import build_model
from fedpriv.models.perceptrons import MlpSettings

PUBLIC = digits()[0][600:]
CLASSES = 40  # of the network with more labels than are tried


def many_classes() -> nn.Module:
    return build_model(MlpSettings(hidden=(16,)), (1, 8, 8), CLASSES, 1)


MECHANISMS: dict[str, dict[str, Any]] = {
    "gaussian 0.02": {"name": "gaussian", "sigma": 0.02, "clip_norm": 1.0},
    "gaussian 0.2": {"name": "gaussian", "sigma": 0.2, "clip_norm": 1.0},
    "laplace": {"name": "laplace", "scale": 0.03, "clip_norm": 20.0},
    "vmf 1e4": {"name": "vmf", "kappa": 1e4},
    "vmf 100": {"name": "vmf", "kappa": 100.0},
    "nothing heard": {"name": "vmf", "kappa": 0.0},
}


def prepared(model: nn.Module, heard: list[Observation]) -> tuple[Scene, list[Victim]]:
    network = Network(model)
    victims = prepare_victims(heard, network.names, network.device)
    return Scene.of(network, heard[0].settings, torch.float64, PUBLIC), victims


def minus_log_likelihood(mechanism: dict[str, Any], heard: Tensor, gradient: Tensor) -> float:
    """But for what does not depend on the gradient."""
    if mechanism["name"] == "vmf":
        return float(-mechanism["kappa"] * (heard @ gradient) / gradient.norm())
    if mechanism["name"] == "laplace":
        clipped = gradient * min(1.0, mechanism["clip_norm"] / float(gradient.abs().sum()))
        return float((heard - clipped).abs().sum() / (mechanism["scale"] * mechanism["clip_norm"]))
    clipped = gradient * min(1.0, mechanism["clip_norm"] / float(gradient.norm()))
    deviation = mechanism["sigma"] * mechanism["clip_norm"]
    return float((heard - clipped).square().sum() / (2 * deviation**2))


def compared(model: nn.Module, mechanism: dict[str, Any], heard: Observation, images: Tensor, classes: int) -> Tensor:
    """(classes, draws) by plain autograd."""
    upload = torch.cat([heard.upload[name].flatten() for name, _ in model.named_parameters()])
    found = torch.zeros(classes, len(images), dtype=torch.float64)
    for label in range(classes):
        for number, image in enumerate(images):
            loss = F.cross_entropy(model(image), torch.tensor([label]))
            parts = torch.autograd.grad(loss, list(model.parameters()))
            gradient = torch.cat([part.flatten() for part in parts])
            found[label, number] = minus_log_likelihood(mechanism, upload, gradient)
    return found


@pytest.mark.parametrize(
    ("mechanism", "make"),
    [
        pytest.param(MECHANISMS[name], make, id=f"{kind}-{name}")
        for row, name in enumerate(MECHANISMS)
        for column, (kind, make) in enumerate(
            {"lenet": lenet, "mlp": lambda: mlp("relu"), "40 classes": many_classes}.items()
        )
        if (row + column) % 2 == 0
    ],
)
def test_the_labels_that_are_likely_at_some_image_of_the_prior(make: Any, mechanism: dict[str, Any]) -> None:
    model = make().double()
    classes = CLASSES if make is many_classes else 10
    heard, _, _ = observe_digits(model, 2, mechanism=mechanism, classes=classes)
    scene, victims = prepared(model, heard)
    draws = torch.randn(LABEL_DRAWS, 1, 1, 8, 8, generator=torch.Generator().manual_seed(SEED)).double()
    draws[0] = 0
    images = Whitening(scene.prior, scene.shape).images(draws)
    every = [torch.tensor([label]) for label in range(classes)]
    for victim, observation in zip(victims, heard, strict=True):
        losses = compared(model, mechanism, observation, images, classes)
        near = (losses - losses.amin(dim=0)).amin(dim=1) <= BEHIND
        wanted = [label for label in losses.mean(dim=1).argsort(stable=True).tolist() if near[label]][:TRIED]
        found = [int(label) for label in likely_labels(scene, victim, every)]
        if mechanism.get("kappa") == 0.0:
            assert len(found) == TRIED  # all are alike
        else:
            assert found == wanted


@pytest.mark.parametrize("mechanism", list(MECHANISMS.values())[:4], ids=list(MECHANISMS)[:4])
@pytest.mark.parametrize("make", [lenet, lambda: mlp("relu"), lambda: mlp("sigmoid")])
def test_the_true_label_is_kept(make: Any, mechanism: dict[str, Any]) -> None:
    """Of 12 victims of fixed draws, all: the true label is more than BEHIND from the best one in none."""
    model = make().double()
    heard, _, labels = observe_digits(model, 12, mechanism=mechanism)
    scene, victims = prepared(model, heard)
    opened = open_labels(scene, victims)
    for victim, choices, truth in zip(victims, opened, labels, strict=True):
        open_ones = [choice for choice in choices if choice is not None]
        assert int(truth) in [int(label) for label in likely_labels(scene, victim, open_ones)]


def test_one_label_is_taken_without_comparing() -> None:
    heard, _, _ = observe_digits(lenet().double(), 1, mechanism=MECHANISMS["gaussian 0.2"])
    scene, victims = prepared(lenet().double(), heard)
    (only,) = likely_labels(scene, victims[0], [torch.tensor([7])])
    assert int(only) == 7
    assert likely_labels(scene, victims[0], []) == []


def test_labels_of_a_batch_and_without_noise_are_read() -> None:
    model = lenet().double()
    images, truth = digits()
    clean, _, labels = observe_digits(model, 1)
    batch = observe(model, images[:3], truth[:3], mechanism=MECHANISMS["gaussian 0.02"])
    for heard, wanted in ((clean[0], labels[0].tolist()), (batch, truth[:3].tolist())):
        scene, victims = prepared(model, [heard])
        (((choice,)),) = open_labels(scene, victims)
        assert choice is not None
        assert sorted(choice.tolist()) == sorted(wanted)


def test_nothing_heard_still_gives_an_image() -> None:
    """Forty labels are open, ten are searched with; the image is the guess."""
    model = many_classes()
    heard, truth, _ = observe_digits(model, 2, mechanism=MECHANISMS["nothing heard"], classes=CLASSES)
    found = run_attack(AttackJob("map", heard, model, MapSettings(iterations=20), 0, public_images=PUBLIC))
    reached = errors([result.images for result in found], truth)
    guess = (PUBLIC.mean(dim=0) - truth[:, 0]).square().mean(dim=(1, 2, 3))
    assert bool((reached <= 1.05 * guess).all())
    assert all(result.loss is not None and math.isfinite(result.loss) for result in found)
