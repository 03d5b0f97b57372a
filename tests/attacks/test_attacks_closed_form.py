"""Closed form through the table of attacks: exact images, what it needs, and refusals that stop nobody else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attack_victims import (
    digits,
    errors,
    example_gradients,
    lenet,
    mlp,
    observe,
    observe_digits,
    parameters_of,
    settings,
)
from torch import nn

from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.metrics import match
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, run_attack
from fedpriv.core.config import DataConfig
from fedpriv.core.errors import InputError
from fedpriv.data.datasets import load_dataset
from fedpriv.models.machinery.build import build_model
from fedpriv.models.perceptrons import MlpSettings

CONFIG = ClosedFormSettings()


@pytest.mark.parametrize(
    ("count", "hidden", "activation"),
    [
        pytest.param(40, (256,), "relu", marks=pytest.mark.slow),
        (20, (256,), "sigmoid"),
        pytest.param(10, (1024, 1024), "relu", marks=pytest.mark.slow),
    ],
)
def test_cifar_images_are_exact(count: int, hidden: tuple[int, ...], activation: str) -> None:
    """Against the images themselves; one image with an error would fail it."""
    try:
        dataset = load_dataset(DataConfig(name="cifar10"), 0)
    except InputError as error:
        pytest.skip(str(error))
    config = MlpSettings(hidden=hidden, activation=activation)
    model = build_model(config, dataset.shape, dataset.classes, 0)
    images, labels = dataset.x_train[:count], dataset.y_train[:count]
    rows = example_gradients(model, dataset.normalise(images), labels)
    public = settings(shape=dataset.shape, mean=dataset.mean, std=dataset.std)
    heard = [
        Observation(1, k, parameters_of(model), {name: value[k] for name, value in rows.items()}, public)
        for k in range(count)
    ]
    found = run_attack(AttackJob("closed_form", heard, model, CONFIG, 0))
    truth = (images.float() / 255)[:, None]
    assert float(errors([one.images for one in found], truth).max()) < 1e-10
    assert [int(one.labels) for one in found] == labels.tolist()
    assert all(one.loss is not None and one.loss < 1e-5 for one in found)


@pytest.mark.parametrize(
    ("mechanism", "algorithm"),
    [
        ({"name": "none"}, "fedavg"),
        ({"name": "gaussian", "sigma": 1e-7, "clip_norm": 0.05}, "fedsgd"),
        ({"name": "gaussian", "sigma": 1e-7, "clip_norm": 0.05, "clipping": "layer"}, "fedavg"),
        ({"name": "laplace", "scale": 1e-7, "clip_norm": 1.0}, "fedsgd"),
        ({"name": "vmf", "kappa": 1e7}, "fedsgd"),
        ({"name": "vmf", "kappa": 1e7, "blocks": "layer"}, "fedavg"),
        ({"name": "vmf", "kappa": 1e7, "unit": "update"}, "fedsgd"),
    ],
)
def test_scaling_and_a_little_noise_are_no_obstacle(mechanism: dict[str, Any], algorithm: str) -> None:
    model = mlp("sigmoid", (64,))
    heard, truth, labels = observe_digits(model, 6, mechanism=mechanism)
    if algorithm == "fedavg":
        heard = [observe_update(one) for one in heard]
    found = run_attack(AttackJob("closed_form", heard, model, CONFIG, 0, public_images=digits()[0][800:]))
    assert float(errors([one.images for one in found], truth).max()) < 0.01
    assert [one.labels.tolist() for one in found] == labels.tolist()


def observe_update(heard: Observation) -> Observation:
    """The same as the change of parameters that one step of SGD makes: downhill."""
    rate = heard.settings.learning_rate
    upload = {name: -rate * value for name, value in heard.upload.items()}
    return replace(heard, upload=upload, settings=replace(heard.settings, algorithm="fedavg"))


@pytest.mark.parametrize("count", [2, 4])
def test_a_batch_behind_relu(count: int) -> None:
    """Every image of the batch, with its own label."""
    images, labels = digits()
    model = mlp("relu", (400, 32))
    rows = list(range(20, 20 + count))
    (found,) = run_attack(AttackJob("closed_form", [observe(model, images[rows], labels[rows])], model, CONFIG, 0))
    order = match(images[rows], found.images)
    assert float((found.images[order] - images[rows]).square().mean()) < 1e-7
    assert found.labels[order].tolist() == labels[rows].tolist()


def test_what_a_victim_yields_does_not_depend_on_the_others() -> None:
    model = mlp().double()
    noise = {"name": "gaussian", "sigma": 1e-3, "clip_norm": 1.0}
    noisy, _, _ = observe_digits(model, 2, mechanism=noise)
    clean, _, _ = observe_digits(model, 2, first=5)
    together = run_attack(AttackJob("closed_form", [noisy[0], *clean, noisy[1]], model, CONFIG, 0))
    for one, heard in zip(together, [noisy[0], *clean, noisy[1]], strict=True):
        (alone,) = run_attack(AttackJob("closed_form", [heard], model, CONFIG, 3))  # nothing starts at random
        torch.testing.assert_close(one.images, alone.images, atol=1e-6, rtol=0)
        assert one.labels.tolist() == alone.labels.tolist()
        assert one.loss == pytest.approx(alone.loss, rel=1e-6, abs=1e-12)


REFUSALS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any], str]] = {
    "no Linear first layer": (lenet, 1, {}, "first layer multiplies the image itself"),
    "more examples than outputs": (lambda: mlp("sigmoid", (6,)), 8, {}, "of 6 outputs has the full rank 6"),
    "a batch below the noise": (
        lambda: mlp("relu", (400,)), 2, {"mechanism": {"name": "gaussian", "sigma": 3.0, "clip_norm": 1.0}},
        "no image of the batch stands above the noise",
    ),
    "a batch clipped by layers": (
        lambda: mlp("relu", (400,)), 2,
        {"mechanism": {"name": "gaussian", "sigma": 0.1, "clip_norm": 1.0, "clipping": "layer"}},
        "on one scale with its weight",
    ),
    "blocks of a size": (
        mlp, 1, {"mechanism": {"name": "vmf", "kappa": 9.0, "blocks": "size:100"}}, "blocks of a size"
    ),
    "Adam": (mlp, 1, {"algorithm": "fedavg", "optimizer": "adam"}, "Adam's steps are none"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_line_and_of_that_victim_only(name: str) -> None:
    """Another victim of the same network is still attacked, where the network allows any."""
    make, count, changes, words = REFUSALS[name]
    model = make()
    images, labels = digits()
    bad = observe(model, images[:count], labels[:count], client=0, **changes)
    good = observe(model, images[[9]], labels[[9]], client=1)
    result = attack_each(AttackJob("closed_form", [bad, good], model, CONFIG, 0))
    assert words in result.failures[0]
    assert "\n" not in result.failures[0]
    if name == "no Linear first layer":
        assert set(result.failures) == {0, 1}
    else:
        assert set(result.failures) == {0}
        assert float(errors([result.found[1].images], images[[9]][None])) < 1e-10


def test_where_biases_alone_are_trained_the_weight_that_is_missing_is_named() -> None:
    """As BitFit trains them."""
    model = mlp()
    ((heard,), _, _) = observe_digits(model, 1)
    biases = {name for name, value in model.named_parameters() if value.ndim == 1}
    for name, value in model.named_parameters():
        value.requires_grad_(name in biases)
    parameters, upload = ({name: each[name] for name in biases} for each in (heard.parameters, heard.upload))
    bare = replace(heard, parameters=parameters, upload=upload)
    (reason,) = attack_each(AttackJob("closed_form", [bare], model, CONFIG, 0)).failures.values()
    assert reason.startswith("closed_form reads images in the gradient of ")
    assert reason.endswith("weight, which is frozen: clients do not upload it")


def test_it_takes_no_settings_of_other_attacks() -> None:
    model = mlp()
    with pytest.raises(InputError, match="closed_form takes ClosedFormSettings; given IgaSettings"):
        run_attack(AttackJob("closed_form", observe_digits(model, 1)[0], model, IgaSettings(), 0))
