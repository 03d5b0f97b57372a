"""Figures from the literature, on CIFAR-10's test images: an attack that misses them is not the attack it claims to be.

Seeds are fixed, so that each test gives the same numbers on one machine; on another they differ by rounding. Measured
figures, and so the margins, stand beside the bounds. Needs the folder that FEDPRIV_DATA names.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attack_victims import parameters_of
from torch import Tensor, nn

from fedpriv.attacks import metrics
from fedpriv.attacks.methods.dlg import DlgSettings, IdlgSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.attacks.reconstruction import AttackJob, run_attack
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.labels import find_output_layer, infer_labels
from fedpriv.attacks.reconstruction.upload_model import prepare_victims
from fedpriv.core.config import DataConfig
from fedpriv.data.datasets import Dataset, load_dataset
from fedpriv.models.convnets import LenetSettings
from fedpriv.models.machinery.build import build_model

pytestmark = pytest.mark.slow

RATE, IMAGES, STEPS = 0.01, 4, 4


@pytest.fixture(scope="module")
def cifar(shared_data: Path) -> Dataset:
    return load_dataset(DataConfig(name="cifar10", root=str(shared_data), download=False), seed=0)


def network(data: Dataset, init: str) -> nn.Module:
    return build_model(LenetSettings(init=init), data.shape, data.classes, seed=0)


def public(data: Dataset, **changes: object) -> PublicSettings:
    usual: dict[str, object] = {
        "model": {"name": "lenet"}, "shape": data.shape, "classes": data.classes, "mean": data.mean, "std": data.std,
        "algorithm": "fedsgd", "batch_size": 1, "local_steps": 1, "learning_rate": RATE, "optimizer": "sgd",
        "momentum": 0.0, "client_examples": 1, "mechanism": {"name": "none"},
    }  # fmt: skip
    return PublicSettings(**{**usual, **changes})  # type: ignore[arg-type]


def single(model: nn.Module, data: Dataset, count: int) -> tuple[list[Observation], Tensor]:
    """The gradients of single test images, one client each, and the images (count, C, H, W) on the [0, 1] scale."""
    heard = []
    for number in range(count):
        x, y = data.normalise(data.x_test[[number]]), data.y_test[[number]]
        gradient = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        upload = dict(zip(parameters_of(model), gradient, strict=True))
        heard.append(Observation(1, number, parameters_of(model), upload, public(data)))
    return heard, data.x_test[:count].float() / 255


def trained(model: nn.Module, data: Dataset, client: int, batch: int, rate: float) -> tuple[Observation, Tensor]:
    """A client that takes four local steps on its four images: the update, and the images."""
    rows = list(range(IMAGES * client, IMAGES * (client + 1)))
    return trained_on(model, data, client, rows, batch, rate)


def trained_on(
    model: nn.Module, data: Dataset, client: int, rows: list[int], batch: int, rate: float
) -> tuple[Observation, Tensor]:
    """The same with test images of these numbers."""
    x, y = data.normalise(data.x_test[rows]), data.y_test[rows]
    before = parameters_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(STEPS):
        these = [(step * batch + place) % IMAGES for place in range(batch)]
        optimizer.zero_grad()
        F.cross_entropy(model(x[these]), y[these]).backward()
        optimizer.step()
    update = {name: value - before[name] for name, value in parameters_of(model).items()}
    model.load_state_dict(before)
    settings = public(
        data, algorithm="fedavg", batch_size=batch, local_steps=STEPS, client_examples=IMAGES, learning_rate=rate
    )
    return Observation(1, client, before, update, settings), data.x_test[rows].float() / 255


def test_inverting_gradients_on_the_untrained_lenet(cifar: Dataset) -> None:
    """The paper has 18.0 +- 3.3 dB (Geiping et al. 2020, table 1). Measured: 18.6, 19.3 after 800; all labels."""
    model = network(cifar, "default")
    heard, truth = single(model, cifar, 6)
    found = run_attack(AttackJob("iga", heard, model, IgaSettings(iterations=500, restarts=1, tv=1e-4), 0))
    assert float(metrics.psnr(truth, torch.cat([one.images for one in found])).mean()) >= 18.0
    assert [one.labels.tolist() for one in found] == cifar.y_test[:6, None].tolist()


def test_deep_leakage_on_the_lenet_with_uniform_weights(cifar: Dataset) -> None:
    """Zhu et al. 2019. Measured after 250 iterations: 16 of 16 below 5e-3, the largest 4.3e-3, all labels."""
    model = network(cifar, "uniform")
    heard, truth = single(model, cifar, 2)
    found = run_attack(AttackJob("dlg", heard, model, DlgSettings(iterations=200, restarts=3), 0))
    errors = metrics.mse(truth, torch.cat([one.images for one in found]))
    assert int((errors < 5e-3).sum()) == 2
    assert [one.labels.tolist() for one in found] == cifar.y_test[:2, None].tolist()


def test_federated_averaging_with_four_images_and_four_steps(cifar: Dataset) -> None:
    """Unrolled, untrained LeNet, labels unknown, one epoch of four images, one at a time."""
    model = network(cifar, "default")
    heard, truth = trained(model, cifar, 0, 1, 0.01)
    assert heard.labels is None
    (found,) = run_attack(AttackJob("idlg", [heard], model, IdlgSettings(iterations=25, restarts=1), 0))
    scores = metrics.psnr(truth, found.images[metrics.match(truth, found.images)])
    assert float(scores.median()) >= 25.0


@pytest.mark.parametrize(("batch", "rate"), [(1, 0.01), (4, 0.1)])
def test_labels_of_local_training_on_other_draws(cifar: Dataset, batch: int, rate: float) -> None:
    """Two networks, two draws of four images each: the multiset of labels; of steps on single images, in order.

    A step moves the logits by more than 1, so that a label of an early step hardly shows in the sum.
    """
    for seed in range(2):
        model = build_model(LenetSettings(init="default"), cifar.shape, cifar.classes, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randint(len(cifar.x_test), (2, IMAGES), generator=generator).tolist()
        heard = [trained_on(model, cifar, client, rows, batch, rate)[0] for client, rows in enumerate(draws)]
        network = Network(model)
        victims = prepare_victims(heard, network.names, network.device)
        layer = find_output_layer(network, victims[0].parameters, cifar.shape, cifar.classes)
        assert layer is not None
        found = [infer_labels(network, victim, layer, cifar.shape, cifar.classes) for victim in victims]
        for rows, labels in zip(draws, found, strict=True):
            assert labels is not None
            truth = cifar.y_test[rows].tolist()
            assert sorted(labels.tolist()) == sorted(truth)
            if batch == 1:
                assert labels.tolist() == truth
