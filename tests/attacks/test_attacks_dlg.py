"""DLG on real digits: images, and the labels of the very restart that is offered."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_victims import MEAN, STD, OwnHead, digits, errors, lenet, mlp, observe, observe_digits
from torch import nn

from fedpriv.attacks.methods.dlg import DlgSettings
from fedpriv.attacks.reconstruction import AttackJob, run_attack

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(mlp, marks=pytest.mark.essential),
        pytest.param(lambda: mlp("tanh"), marks=SLOW),
        lambda: OwnHead(activation=torch.sigmoid),
    ],
)
def test_recovers_digits_and_their_labels(make: Any) -> None:
    """Peers report the label of an unrelated random template: right images with wrong labels."""
    model = make()
    heard, truth, labels = observe_digits(model, 4, first=30)
    found = run_attack(AttackJob("dlg", heard, model, DlgSettings(iterations=80, restarts=3), 0))
    assert [result.labels.tolist() for result in found] == labels.tolist()
    assert float(errors([result.images for result in found], truth).max()) < 1e-3
    for result, original, label in zip(found, truth, labels, strict=True):
        for attempt in result.attempts:
            if float(errors([attempt.images], original[None])) < 1e-3:
                assert attempt.labels.tolist() == label.tolist()


@pytest.mark.parametrize("init", ["uniform", pytest.param("default", marks=pytest.mark.slow)])
def test_recovers_digits_on_the_sigmoid_lenet(init: str) -> None:
    model = lenet(init)
    heard, truth, labels = observe_digits(model, 1)
    found = run_attack(AttackJob("dlg", heard, model, DlgSettings(iterations=150, restarts=2), 0))
    assert float(errors([result.images for result in found], truth).max()) < 1e-3
    assert [result.labels.tolist() for result in found] == labels.tolist()


@pytest.mark.slow
def test_most_restarts_succeed_on_the_sigmoid_lenet() -> None:
    model = lenet()
    heard, truth, labels = observe_digits(model, 2, first=200)
    found = run_attack(AttackJob("dlg", heard, model, DlgSettings(), 0))
    every = [float(errors([a.images], truth[k][None])) for k, result in enumerate(found) for a in result.attempts]
    assert sum(error < 1e-3 for error in every) > len(every) / 2
    assert float(errors([result.images for result in found], truth).max()) < 1e-4
    assert [result.labels.tolist() for result in found] == labels.tolist()


def test_the_reported_loss_is_the_squared_distance_at_the_reported_images() -> None:
    model = mlp().double()
    heard, _, _ = observe_digits(model, 2)
    found = run_attack(AttackJob("dlg", heard, model, DlgSettings(iterations=150, restarts=2), 0))
    for observation, result in zip(heard, found, strict=True):
        x = ((result.images - MEAN) / STD).double()  # clamped, but at the solution nothing is outside the range
        gradients = torch.autograd.grad(F.cross_entropy(model(x), result.labels), list(model.parameters()))
        apart = [
            (one - other).square().sum() for one, other in zip(gradients, observation.upload.values(), strict=True)
        ]
        scale = sum(value.square().sum() for value in observation.upload.values())
        assert result.loss is not None
        assert result.loss < 1e-6 * float(scale)
        assert float(sum(apart)) < 1e-4 * float(scale)


@pytest.mark.parametrize(
    "mechanism",
    [
        {"name": "gaussian", "sigma": 1e-7, "clip_norm": 0.05},
        {"name": "vmf", "kappa": 1e7},
        {"name": "vmf", "kappa": 1e7, "blocks": "layer"},
        {"name": "vmf", "kappa": 1e7, "unit": "update", "clip_norm": 0.01},
    ],
)
def test_knows_what_the_mechanism_does_to_the_length(mechanism: dict[str, object]) -> None:
    """Clipping and normalisation alone protect nothing from an attacker who is told of them."""
    model = mlp()
    heard, truth, labels = observe_digits(model, 2, mechanism=mechanism)
    found = run_attack(AttackJob("dlg", heard, model, DlgSettings(iterations=100, restarts=1), 0))
    assert float(errors([result.images for result in found], truth).median()) < 0.02
    assert [result.labels.tolist() for result in found] == labels.tolist()


def test_a_small_batch() -> None:
    """Two examples: their order and labels are free, so both must be found in one order or the other."""
    images, truth = digits()
    rows = [3, 8]
    model: nn.Module = mlp()
    heard = [observe(model, images[rows], truth[rows])]
    (found,) = run_attack(AttackJob("dlg", heard, model, DlgSettings(iterations=300, restarts=8), 0))
    assert found.images.shape == (2, 1, 8, 8)
    assert len(found.attempts) == 8
    order = found.labels.argsort()
    assert found.labels[order].tolist() == sorted(truth[rows].tolist())
    assert float((found.images[order] - images[rows]).square().mean()) < 0.02
