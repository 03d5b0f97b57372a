"""Features of the last layer, against those that the network itself computes, and the images found from them."""

from typing import Any

import pytest
import torch
from attack_victims import Biasless, Patches, digits, mlp, normalise, observe
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedpriv.attacks.methods.custom import CustomSettings
from fedpriv.attacks.methods.iga import IgaFastSettings, IgaModernSettings, IgaSettings
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, features, recipes, run_attack
from fedpriv.attacks.reconstruction.activations import Features
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.features import read_feature_starts, read_features
from fedpriv.attacks.reconstruction.scene import Scene, limited_to
from fedpriv.attacks.reconstruction.upload_model import Victim, prepare_victims
from fedpriv.models.convnets import ConvnetSettings
from fedpriv.models.machinery.build import build_model

DISTINCT = [0, 1, 2, 3]  # the labels of these digits are their numbers


def convnet() -> nn.Module:
    return build_model(ConvnetSettings(), (1, 8, 8), 10, 1)


def prepared(model: nn.Module, rows: list[int], pictures: Tensor | None = None, **changes: Any) -> tuple[Scene, Victim]:
    images, labels = digits()
    images = images if pictures is None else pictures
    heard = observe(model, images[rows], labels[rows], **changes)
    network = Network(model)
    (victim,) = prepare_victims([heard], network.names, network.device)
    return Scene.of(network, heard.settings, torch.float32, images[800:]), victim


def read(model: nn.Module, rows: list[int], **changes: Any) -> Features:
    return read_features(*prepared(model, rows, **changes))


def own_features(model: nn.Module, images: Tensor) -> Tensor:
    """What the last layer gets, by a hook."""
    kept: list[Tensor] = []
    handle = model.output.register_forward_pre_hook(lambda layer, inputs: kept.append(inputs[0].detach()))
    model(normalise(images))
    handle.remove()
    return kept[0].double()


@pytest.mark.parametrize("rows", [[5, 6, 7, 8, 9, 0, 1, 2], [0, 10, 3]])
def test_features_and_labels_are_the_networks_own(rows: list[int]) -> None:
    """Distinct labels, nearly as many examples as classes, and two examples of one class (rows 0 and 10)."""
    model = convnet()
    images, labels = digits()
    found = read(model, rows)
    truth = own_features(model, images[rows])
    apart = torch.cdist(found.values, truth)
    mine, theirs = linear_sum_assignment(apart.numpy())
    assert float((apart[mine, theirs] / truth.norm(dim=1)[theirs]).max()) < 0.02
    assert found.labels.tolist() == labels[rows][theirs].tolist()
    assert found.misfit < 1e-8


def test_clipping_and_a_little_noise_leave_them() -> None:
    model = convnet()
    mechanism = {"name": "gaussian", "sigma": 1e-5, "clip_norm": 1.0}
    images, labels = digits()
    found = read(model, DISTINCT, mechanism=mechanism)
    truth = own_features(model, images[DISTINCT])
    cosines = torch.nn.functional.cosine_similarity(found.values[:, None], truth[None], dim=2)
    assert found.labels.tolist() == labels[DISTINCT][cosines.argmax(dim=1)].tolist()


@pytest.mark.parametrize("config", [IgaSettings(start="features", iterations=1), IgaFastSettings(iterations=1)])
def test_images_are_found_one_by_one(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far nearer than the mean public image, each with its label, which is read once."""
    monkeypatch.delattr(recipes, "read_labels")
    model = convnet()
    images, labels = digits()
    heard = observe(model, images[DISTINCT], labels[DISTINCT])
    (found,) = run_attack(AttackJob(config.name, [heard], model, config, 0, public_images=images[800:]))
    apart = torch.cdist(found.images.flatten(1), images[DISTINCT].flatten(1)).square() / 64
    mine, theirs = linear_sum_assignment(apart.numpy())
    guess = (images[800:].mean(dim=0) - images[DISTINCT]).square().mean()
    assert float(apart[mine, theirs].mean()) < float(guess) / 5
    assert found.labels.tolist() == labels[DISTINCT][theirs].tolist()


def test_without_time_left_images_are_the_public_mean() -> None:
    """Noise would be farther from any image."""
    with limited_to(0.0):
        scene, victim = prepared(convnet(), DISTINCT)
        (start,) = read_feature_starts(scene, [victim])
    assert not start.images.any()
    assert start.labels is not None and start.labels.tolist() == DISTINCT


@pytest.mark.parametrize("side", [features.SIDE, 4])
def test_a_batch_of_a_vision_transformer_is_found_by_its_table_of_positions(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer's features tell what an image is made of, not where: with them it was worse than the guess.

    Digits of 8 pixels a side are found as they are, and enlarged images as those of 4 pixels.
    """
    monkeypatch.setattr(features, "SIDE", side)
    images, labels = digits()
    if side < 8:
        small = torch.rand(len(images), 1, side, side, generator=torch.Generator().manual_seed(0))
        images = torch.nn.functional.interpolate(small, (8, 8), mode="bilinear")
    rows = [0, 1]
    scene, victim = prepared(Patches(), rows, images)
    (found,) = read_feature_starts(scene, [victim], 60)
    apart = torch.cdist(scene.to_unit_scale(found.images).flatten(1), images[rows].flatten(1)).square() / 64
    mine, theirs = linear_sum_assignment(apart.numpy())
    guess = (images[800:].mean(dim=0) - images[rows]).square().mean()
    assert float(apart[mine, theirs].mean()) < float(guess) * 0.6
    assert found.labels is not None and found.labels.tolist() == labels[rows][theirs].tolist()


def test_what_cannot_be_told_apart_is_refused() -> None:
    images, labels = digits()
    rows = list(range(12))
    with pytest.raises(AttackRefused, match="at most one fewer than there are classes"):
        read(convnet(), rows)
    with pytest.raises(AttackRefused, match="ends in a Linear layer with bias"):
        read(Biasless(torch.tanh), DISTINCT)
    model = mlp("relu", (32,))
    config = CustomSettings(start="features", iterations=1)
    noisy = observe(
        model, images[DISTINCT], labels[DISTINCT], mechanism={"name": "gaussian", "sigma": 9.0, "clip_norm": 1.0}
    )
    with pytest.raises(AttackRefused, match="stand apart in the last layer's gradient"):
        run_attack(AttackJob("custom", [noisy], model, config, 0))


def test_the_fast_attack_starts_elsewhere_without_features() -> None:
    """As its parent does, and says so."""
    model, config = mlp("relu", (32,)), {"iterations": 2, "opponents_start": 0.1}
    images, labels = digits()
    heard = observe(model, images[:10], labels[:10])
    fast, plain = (
        run_attack(AttackJob(kind.name, [heard], model, kind(warm_up=0, **config), 0))[0]
        for kind in (IgaFastSettings, IgaModernSettings)
    )
    assert "started without features: " in fast.note and "started" not in plain.note
    assert fast.images.shape == plain.images.shape and fast.images.isfinite().all()
