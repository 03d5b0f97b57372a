"""MAP: what it keeps, labels under noise, the same numbers alone and together, and no worse than the other attacks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_victims import MEAN, STD, digits, errors, lenet, mlp, observe, observe_digits

from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.methods.map import MapSettings
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, run_attack
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.matching import Matcher
from fedpriv.attacks.reconstruction.posterior import misfit
from fedpriv.attacks.reconstruction.priors import fit_prior
from fedpriv.attacks.reconstruction.scene import ENDED
from fedpriv.attacks.reconstruction.upload_model import prepare_victims

SHORT = MapSettings(iterations=20)
LONG = MapSettings(iterations=90)
NOISY = {
    "gaussian": {"name": "gaussian", "sigma": 1e-3, "clip_norm": 1.0},
    "layer": {"name": "gaussian", "sigma": 1e-3, "clip_norm": 1.0, "clipping": "layer"},
    "laplace": {"name": "laplace", "scale": 1e-4, "clip_norm": 10.0},
    "vmf": {"name": "vmf", "kappa": 3e5},
    "vmf by layer": {"name": "vmf", "kappa": 3e4, "blocks": "layer"},
    "vmf in pieces": {"name": "vmf", "kappa": 3e3, "blocks": "size:64"},
}


def public() -> torch.Tensor:
    """Digits that are never attacked here."""
    return digits()[0][600:]


@pytest.mark.parametrize(
    ("make", "mechanism"),
    [
        (lenet, "vmf in pieces"),
        *((lambda: mlp("relu"), name) for name in ("gaussian", "vmf by layer")),
    ],
)
def test_same_numbers_together_as_alone_and_twice(make: Any, mechanism: str) -> None:
    model = make().double()
    heard, _, _ = observe_digits(model, 2, mechanism=NOISY[mechanism])
    config = MapSettings(iterations=10, restarts=2)
    together = run_attack(AttackJob("map", heard, model, config, 3, public_images=public()))
    again = run_attack(AttackJob("map", heard, model, config, 3, public_images=public()))
    for observation, one, other in zip(heard, together, again, strict=True):
        (alone,) = run_attack(AttackJob("map", [observation], model, config, 3, public_images=public()))
        assert torch.equal(one.images, other.images)
        assert one.losses == other.losses
        assert one.losses == pytest.approx(alone.losses, rel=1e-7)
        torch.testing.assert_close(one.images, alone.images, atol=1e-5, rtol=0)


def test_the_loss_is_that_of_the_kept_images() -> None:
    """The images are within the box, so that what is returned is what was optimised."""
    model = lenet().double()
    heard, _, _ = observe_digits(model, 4, mechanism={"name": "gaussian", "sigma": 0.1, "clip_norm": 1.0})
    images = (public() * 0.5 + 0.25).double()
    found = run_attack(AttackJob("map", heard, model, SHORT, 3, public_images=images))
    network = Network(model)
    prior = fit_prior((images - MEAN) / STD)
    x = torch.stack([(result.images.double() - MEAN) / STD for result in found])
    inside = [bool(((result.images > 0) & (result.images < 1)).all()) for result in found]
    chosen = torch.stack([result.labels for result in found])
    misfits = Matcher(network, prepare_victims(heard, network.names, network.device), misfit)(
        x, F.one_hot(chosen, 10).double()
    )
    wanted = misfits + prior.energy(x).sum(dim=1) / 2
    assert any(inside)
    for result, value, usable in zip(found, wanted.tolist(), inside, strict=True):
        assert not usable or result.loss == pytest.approx(value, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize(
    ("make", "mechanism"),
    [
        *((lenet, name) for name in ("layer", "vmf")),
        *((lambda: mlp("relu"), name) for name in ("gaussian", "vmf by layer")),
        *((lambda: mlp("sigmoid"), name) for name in ("laplace", "vmf in pieces")),
    ],
)
def test_much_closer_than_the_guess(make: Any, mechanism: str) -> None:
    model = make()
    heard, truth, labels = observe_digits(model, 3, first=20, mechanism=NOISY[mechanism])
    found = run_attack(AttackJob("map", heard, model, MapSettings(iterations=60), 0, public_images=public()))
    assert [result.labels.tolist() for result in found] == labels.tolist()
    guess = (public().mean(dim=0) - truth[:, 0]).square().mean(dim=(1, 2, 3))
    assert float(errors([result.images for result in found], truth).median()) < 0.5 * float(guess.median())


@pytest.mark.parametrize(("make", "mechanism"), [(lenet, "vmf"), (lambda: mlp("relu"), "gaussian")])
def test_when_time_is_up_the_best_so_far_is_kept(make: Any, mechanism: str) -> None:
    """Of ten million steps none but the first of each part is made."""
    model = make()
    heard, _, _ = observe_digits(model, 1, mechanism=NOISY[mechanism])
    config = MapSettings(iterations=10**7)
    (outcome,) = attack_each(AttackJob("map", heard, model, config, 0, seconds=1e-9)).outcomes
    assert outcome.result is not None and ENDED in outcome.result.note


def test_an_upload_of_noise_alone_gives_the_prior() -> None:
    """kappa = 0: no signal. The attack answers with the public mean."""
    model = mlp("relu")
    heard, _, _ = observe_digits(model, 2, mechanism={"name": "vmf", "kappa": 0.0})
    mean = fit_prior((public() - MEAN) / STD).mean * STD + MEAN
    for result in run_attack(AttackJob("map", heard, model, SHORT, 0, public_images=public())):
        torch.testing.assert_close(result.images.flatten(), mean.clamp(0, 1), atol=0.02, rtol=0)


def test_labels_that_noise_hides_are_tried_one_by_one() -> None:
    """The last bias's smallest entry is wrong for some victims; the whole upload says more."""
    model = mlp("relu", hidden=(256,))
    mechanism = {"name": "gaussian", "sigma": 0.15, "clip_norm": 1.0}
    heard, _, labels = observe_digits(model, 12, mechanism=mechanism)
    bias = list(heard[0].upload)[-1]
    read = torch.stack([observation.upload[bias].argmin().reshape(1) for observation in heard])
    found = run_attack(AttackJob("map", heard, model, MapSettings(iterations=60), 0, public_images=public()))
    right = int((torch.stack([result.labels for result in found]) == labels).sum())
    assert int((read == labels).sum()) < right


def test_a_batch() -> None:
    images, truth = digits()
    rows = [0, 1, 2]
    model = mlp("sigmoid", hidden=(128,))
    heard = observe(model, images[rows], truth[rows], mechanism={"name": "gaussian", "sigma": 1e-4, "clip_norm": 1.0})
    (found,) = run_attack(AttackJob("map", [heard], model, LONG, 0, public_images=public()))
    assert sorted(found.labels.tolist()) == [0, 1, 2]
    guess = (public().mean(dim=0) - images[rows]).square().mean(dim=(1, 2, 3))
    order = found.labels.argsort()
    reached = (found.images[order] - images[rows]).square().mean(dim=(1, 2, 3))
    assert float(reached.median()) < 0.5 * float(guess.median())


def test_noise_behind_adam_is_refused() -> None:
    model = mlp("relu")
    heard, _, _ = observe_digits(
        model, 1, mechanism=NOISY["gaussian"], algorithm="fedavg", optimizer="adam", local_steps=2
    )
    with pytest.raises(AttackRefused, match="Adam"):
        run_attack(AttackJob("map", heard, model, SHORT, 0))


@pytest.mark.parametrize("mechanism", ["gaussian", "vmf"])
def test_behind_kinks_all_layers_are_read(mechanism: str) -> None:
    """On images of 8 x 8 pixels the second layer tells as much as the first, of which alone the closed form is."""
    model = mlp("relu", hidden=(128, 128))
    noise = {"gaussian": {"name": "gaussian", "sigma": 5e-3, "clip_norm": 1.0}, "vmf": {"name": "vmf", "kappa": 3e4}}
    heard, truth, labels = observe_digits(model, 6, first=20, mechanism=noise[mechanism])
    found = run_attack(AttackJob("map", heard, model, LONG, 0, public_images=public()))
    read = run_attack(AttackJob("closed_form", heard, model, ClosedFormSettings(), 0, public_images=public()))
    assert [result.labels.tolist() for result in found] == labels.tolist()
    ours, theirs = (errors([one.images for one in results], truth) for results in (found, read))
    # Geometric means of six victims' ratios behind four draws of Gaussian noise: 0.27, 0.30, 0.40, 0.45.
    assert float((ours / theirs).log().mean().exp()) < 0.6


@pytest.mark.parametrize(
    ("mechanism", "local_steps"),
    [({"name": "none"}, 1), ({"name": "gaussian", "sigma": 1e-6, "clip_norm": 1.0}, 1), ({"name": "none"}, 2)],
    ids=["no noise", "hardly any", "two steps"],
)
def test_behind_kinks_the_closed_form_is_kept_where_nothing_is_better(
    mechanism: dict[str, Any], local_steps: int
) -> None:
    """Without noise it is exact; after two local steps the units cannot be told apart."""
    model = mlp("relu", hidden=(128, 128))
    fedavg = {"algorithm": "fedavg", "local_steps": local_steps, "client_examples": 1} if local_steps > 1 else {}
    heard, _, _ = observe_digits(model, 3, first=20, mechanism=mechanism, **fedavg)
    found = run_attack(AttackJob("map", heard, model, SHORT, 0, public_images=public()))
    read = run_attack(AttackJob("closed_form", heard, model, ClosedFormSettings(), 0, public_images=public()))
    for one, other in zip(found, read, strict=True):
        torch.testing.assert_close(one.images, other.images, atol=1e-4, rtol=0)


def paired_margin(one: torch.Tensor, other: torch.Tensor) -> float:
    """How much larger the mean of one sample of errors is than that of another, less three standard errors."""
    difference = one - other
    return float(difference.mean() - 3 * difference.std() / len(difference) ** 0.5)


def smooth() -> Any:
    return lenet("default")


def kinked() -> Any:
    return mlp("relu", hidden=(64, 64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "mechanism"),
    [
        (kinked, {"name": "gaussian", "sigma": 1e-2, "clip_norm": 1.0}),  # blocks: the test below
        (smooth, {"name": "gaussian", "sigma": 0.1, "clip_norm": 1.0}),
    ],
)
def test_no_worse_than_the_other_attacks_and_the_guess(make: Any, mechanism: dict[str, Any]) -> None:
    """Paired over 6 victims; three standard errors, so that equal attacks fail once in 700 comparisons."""
    model = make()
    heard, truth, _ = observe_digits(model, 6, first=100, mechanism=mechanism)

    def run(name: str, config: Any) -> torch.Tensor:
        found = run_attack(AttackJob(name, heard, model, config, 0, public_images=public()))
        return errors([result.images for result in found], truth)

    ours = run("map", MapSettings(iterations=100))
    assert paired_margin(ours, run("iga", IgaSettings(iterations=100))) <= 0
    assert paired_margin(ours, (public().mean(dim=0) - truth[:, 0]).square().mean(dim=(1, 2, 3))) <= 0
    if "hidden1.weight" in heard[0].upload:
        assert paired_margin(ours, run("closed_form", ClosedFormSettings())) <= 0


def test_what_little_blocks_say_is_read_with_every_label() -> None:
    """The closed form is hardly better than a guess; what it shows makes wrong labels the most probable ones, too.

    With those labels alone `map` ended at 0.73 of the guess's error and had 6 labels of 8; now 0.54, and 8.
    """
    model = mlp("relu", hidden=(64,))
    heard, truth, labels = observe_digits(
        model, 8, first=100, mechanism={"name": "vmf", "kappa": 2.0, "blocks": "size:16"}
    )
    found = run_attack(AttackJob("map", heard, model, MapSettings(iterations=60), 0, public_images=public()))
    closed = run_attack(AttackJob("closed_form", heard, model, ClosedFormSettings(), 0, public_images=public()))
    guess = (public().mean(dim=0) - truth[:, 0]).square().mean()
    assert errors([result.images for result in closed], truth).mean() > 0.9 * guess
    assert errors([result.images for result in found], truth).mean() < 0.64 * guess
    assert sum(int(result.labels) == int(label) for result, label in zip(found, labels, strict=True)) >= 7


@pytest.mark.parametrize("blocks", ["whole", "layer", "size:16"])
def test_a_gradient_that_is_not_finite_leaves_an_image(blocks: str) -> None:
    """Here the upload is what cannot be compared with; nothing is learnt, and that is said."""
    model = mlp("relu")
    heard, _, _ = observe_digits(model, 2, mechanism={"name": "vmf", "kappa": 3e4, "blocks": blocks})
    broken = {key: torch.full_like(value, torch.nan) for key, value in heard[0].upload.items()}
    config = MapSettings(iterations=3)
    found = run_attack(
        AttackJob("map", [replace(heard[0], upload=broken), heard[1]], model, config, 0, public_images=public())
    )
    assert found[0].loss is None
    assert "no finite loss" in found[0].note
    assert found[1].loss is not None
    assert all(bool(torch.isfinite(one.images).all()) for one in found)


def test_the_sign_is_told_by_all_layers() -> None:
    """The first bias's gradient, by which the closed form tells an image from its negative, drowns in noise.

    Here it is turned around, which that noise makes likely enough, and no public images tell which is which. Of 24 such
    uploads, of which these are the first, 16 closed forms are negatives; from the closed forms alone `map` ended with 5
    negatives and 4 wrong labels.
    """
    model = mlp("relu", hidden=(256,))
    heard, truth, labels = observe_digits(model, 6, mechanism={"name": "gaussian", "sigma": 0.02, "clip_norm": 1.0})
    bias = list(heard[0].upload)[1]
    turned = [replace(one, upload={**one.upload, bias: -one.upload[bias]}) for one in heard]
    closed = run_attack(AttackJob("closed_form", turned, model, ClosedFormSettings(), 0))
    found = run_attack(AttackJob("map", turned, model, MapSettings(iterations=150), 0))
    mean = digits()[0].mean(dim=0)

    def negatives(images: list[torch.Tensor]) -> int:
        pairs = zip(images, truth, strict=True)
        return sum(float(((image - mean) * (original - mean)).sum()) < 0 for image, original in pairs)

    assert negatives([result.images for result in closed]) >= 3
    assert negatives([result.images for result in found]) <= 1
    assert [result.labels.tolist() for result in found] == labels.tolist()
