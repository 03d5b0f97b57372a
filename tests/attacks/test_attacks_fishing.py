"""Class fishing: single records by the count of the last layer, exact where the network has room, and who may do it."""

from collections.abc import Callable

import pytest
import torch
from attack_victims import Patches, digits, lenet, mlp, normalise, observe
from torch import Tensor, nn

from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.crafted import FishingSettings
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, Reconstruction, fishing, run_attack
from fedpriv.attacks.reconstruction.dummy_gradients import network
from fedpriv.attacks.threat import ThreatModel, threat_model
from fedpriv.core.config import AdversaryConfig
from fedpriv.gradients import Vector
from fedpriv.models.convnets import ConvnetSettings
from fedpriv.models.machinery.build import build_model
from fedpriv.models.perceptrons import MlpSettings
from tests.cases import in_one_test

SHAPE = (1, 8, 8)
PUBLIC = slice(-1000, None)
CLOSED = ClosedFormSettings()


def threat(name: str = "malicious-server", **changes: bool) -> ThreatModel:
    return threat_model(AdversaryConfig.model_validate({"threat_model": name, **changes}))


def convnet() -> nn.Module:
    return build_model(ConvnetSettings(), SHAPE, 10, 1)


def crafted(model: nn.Module, config: FishingSettings) -> Vector:
    made = config.craft(model, normalise(digits()[0][PUBLIC]), threat())
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(made[name])
    return made


def fished(
    model: nn.Module, images: Tensor, labels: Tensor, config: FishingSettings, **changes: object
) -> Reconstruction:
    crafted(model, config)
    heard = observe(model, images, labels, **changes)  # type: ignore[arg-type]
    (found,) = run_attack(AttackJob("fishing", [heard], model, config, 0, public_images=digits()[0][PUBLIC]))
    return found


def batch(labels: list[int]) -> tuple[Tensor, Tensor]:
    """Digits of these classes, no two of them the same."""
    images, known = digits()
    places = [(known == label).nonzero().flatten()[number].item() for number, label in enumerate(labels)]
    return images[places], torch.tensor(labels)


def wide() -> nn.Module:
    """With more features than pixels."""
    return mlp("relu", (96,))


@pytest.mark.parametrize("network", [wide, convnet])
def test_a_lone_record_is_certified_and_of_a_class_of_several_the_mean_is_shown(
    network: Callable[[], nn.Module],
) -> None:
    """Class 9 is the silent one, class 3 is there twice; what is certified is right, by the originals."""
    images, labels = batch([0, 3, 3, 5, 7, 9])
    found = fished(network(), images, labels, FishingSettings(iterations=60))
    assert found.labels.tolist() == [0, 3, 5, 7, -1, -1]
    errors = (found.images[:4] - torch.stack([images[0], images[1:3].mean(dim=0), *images[3:5]])).square()
    errors = errors.flatten(1).mean(dim=1)
    assert float(errors[[0, 2, 3]].max()) < 1 / 256**2  # what the certificate says
    assert float(errors[1]) < 0.01  # of pooled features the mean is not quite that of the images
    assert "3 of 6 records stand apart in their class, proven by the count; 3 images certified; 1 average" in found.note


def test_an_mlp_shows_the_target_as_a_quotient() -> None:
    images, labels = batch([0, 4, 4, 8])
    found = fished(mlp("relu", (80, 32)), images, labels, FishingSettings(target=8, iterations=5))
    assert found.labels.tolist() == [0, 4, 8, -1]
    assert float((found.images[2] - images[3]).square().mean()) < 1e-10
    assert "1 images certified" in found.note


def test_rows_of_two_classes_are_read_by_bins() -> None:
    """Records of the target that are alone between two cut points: those that plain arithmetic names, to rounding."""
    images, labels = digits()[0][:24], torch.arange(24) % 2
    model = build_model(MlpSettings(hidden=(40, 16)), SHAPE, 2, 1)
    found = fished(model, images, labels, FishingSettings(target=1, iterations=5), classes=2)
    first = model.get_submodule("hidden1")
    heights = (normalise(images).flatten(1) @ first.weight[0])[labels == 1]
    bins = (heights[:, None] > -first.bias).sum(dim=1).tolist()
    places = (labels == 1).nonzero().flatten().tolist()
    alone = [place for place, number in zip(places, bins, strict=True) if bins.count(number) == 1]
    assert found.labels.tolist() == [1] * len(alone) + [-1] * (24 - len(alone)) and len(alone) > 5
    errors = torch.cdist(found.images[: len(alone)].flatten(1), images[alone].flatten(1)).min(dim=1)
    assert sorted(errors.indices.tolist()) == list(range(len(alone)))
    assert float(errors.values.max()) < 1e-3
    assert f"{len(alone)} of 24 records stand apart in their bin, proven by the count" in found.note


@pytest.mark.parametrize("bound", ["small", "loose"])
def test_a_vision_transformer_shows_the_target_by_its_table_of_positions(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the bound of its rounding errors is too loose, the gradients of all layers certify the image.

    Rounding decides whether they do at once, or after a search that starts there.
    """
    if bound == "loose":
        monkeypatch.setattr(fishing, "SAME", 0.0)
    images, labels = batch([0, 4, 4, 8])
    found = fished(Patches(), images, labels, FishingSettings(target=8, iterations=5))
    assert found.labels.tolist() == [0, 4, 8, -1]
    assert float((found.images[2] - images[3]).square().mean()) < 1 / 256**2
    assert "1 images certified" in found.note


def test_closed_form_reads_the_image_of_a_vision_transformer_that_nobody_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And refuses where noise leaves equations that are not solved, and batches, whose errors add up.

    One gradient is compared: no faster route to many of them is tried, which would take far longer than the attack.
    """
    monkeypatch.setattr(network, "SMALL", 0)
    monkeypatch.setattr(network, "_obstacle", None)
    images, labels = batch([8, 4])
    (found,) = run_attack(AttackJob("closed_form", [observe(Patches(), images[:1], labels[:1])], Patches(), CLOSED, 0))
    assert float((found.images - images[:1]).square().mean()) < 1e-8
    assert found.labels.tolist() == [8]
    few = Patches(15)  # channels, one fewer than patches
    (found,) = run_attack(AttackJob("closed_form", [observe(few, images[:1], labels[:1])], few, CLOSED, 0))
    assert float((found.images - images[:1]).square().mean()) < 0.01 and "1 of 16 sums of patches" in found.note
    noise = {"name": "gaussian", "sigma": 1e-3}
    for model, rows, mechanism in ((Patches(), 1, noise), (few, 1, noise), (Patches(), 2, {"name": "none"})):
        heard = observe(model, images[:rows], labels[:rows], mechanism=mechanism)
        with pytest.raises(AttackRefused, match="multiplies the image itself"):
            run_attack(AttackJob("closed_form", [heard], model, CLOSED, 0))


def test_two_records_of_a_class_are_never_certified() -> None:
    """Their mean would look like one record; the count says that it is none."""
    images, labels = batch([6, 6, 6, 2, 2])
    found = fished(wide(), images, labels, FishingSettings(iterations=5))
    assert found.labels.tolist() == [2, 6, -1, -1, -1]
    assert "0 of 5" in found.note and "0 images certified; 2 averages" in found.note


def test_noise_takes_the_certificate() -> None:
    images, labels = batch([0, 3, 5])
    little = {"name": "gaussian", "sigma": 1e-6}
    found = fished(wide(), images, labels, FishingSettings(iterations=60), mechanism=little)
    assert "no certificate" in found.note
    assert float((found.images - images).square().mean()) < 0.5 * float(images.var())
    much = {"name": "gaussian", "sigma": 10.0}
    found = fished(wide(), images, labels, FishingSettings(iterations=5), mechanism=much)
    assert found.labels.tolist() == [-1, -1, -1]


def test_the_layers_before_the_last_are_kept_where_that_is_said_or_they_have_no_room() -> None:
    for model, body in ((convnet(), "kept"), (lenet(), "auto"), (mlp("relu", (80, 32)), "auto")):
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        made = crafted(model, FishingSettings(body=body))
        changed = {name for name, value in before.items() if not torch.equal(value, made[name])}
        assert changed == set(list(before)[-2:])


def test_most_records_have_their_whole_gradient_in_the_last_layer() -> None:
    """Plain autograd on one record of another class than the target's: nothing before the last layer moves."""
    model = lenet()
    crafted(model, FishingSettings(target=2))
    images, labels = batch([2, 5])
    sizes = []
    for image, label in zip(normalise(images), labels, strict=True):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(image[None]), label[None]).backward()
        sizes.append(float(next(model.parameters()).grad.norm()))
    assert sizes[1] < 1e-6 * sizes[0]


@in_one_test("name", ["honest-but-curious-server", "secure-aggregation", "network-plaintext", "network-tls"])
def test_a_passive_adversary_is_refused(name: str) -> None:
    with pytest.raises(AttackRefused, match=r"fishing needs .*passive"):
        FishingSettings().craft(lenet(), normalise(digits()[0]), threat(name))


def test_what_it_cannot_read_is_refused() -> None:
    images, labels = batch([1, 2])
    model = lenet()
    with pytest.raises(AttackRefused, match=r"fishing.target = 10: the data have 10 classes"):
        crafted(model, FishingSettings(target=10))
    heard = observe(model, images, labels)
    with pytest.raises(AttackRefused, match="not made for fishing"):
        run_attack(AttackJob("fishing", [heard], model, FishingSettings(), 0))
    for part, says in (("weight", "which is frozen"), ("bias", "ends in a Linear layer with bias")):
        frozen = lenet()
        frozen.get_parameter(f"output.{part}").requires_grad_(False)
        with pytest.raises(AttackRefused, match=says):
            crafted(frozen, FishingSettings())
