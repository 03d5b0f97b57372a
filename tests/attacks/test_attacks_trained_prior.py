"""A prior that is trained: against the posterior's mean in closed form, and refused where it saw the victims."""

from pathlib import Path

import pytest
import torch
from attack_victims import mlp, observe

from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, run_attack
from fedpriv.attacks.reconstruction.priors import TrainedPrior, read_trained_prior, train_prior
from fedpriv.core.config import Experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.core.lab.preflight import attack_warnings
from fedpriv.core.world import build_world
from fedpriv.data.datasets import unit_scale

DARK, NOISE = 0.25, 0.4


def silent(done: int, loss: float) -> None:
    assert loss > 0


def flags(count: int, seed: int) -> torch.Tensor:
    """Images (N, 1, 8, 8) of one grey each, light or dark: no normal distribution is like them."""
    generator = torch.Generator().manual_seed(seed)
    light = torch.randint(2, (count, 1, 1, 1), generator=generator).float()
    return (DARK + light / 2).expand(-1, 1, 8, 8).contiguous()


@pytest.fixture(scope="module")
def prior() -> TrainedPrior:
    return train_prior(flags(400, 0), "flags", 100, 0, silent)


def test_it_denoises_as_the_posteriors_mean_does(prior: TrainedPrior) -> None:
    """Of two images that is a logistic function of the mean pixel. The Wiener filter only scales it."""
    images = flags(300, 1)
    noisy = images + NOISE * torch.randn(images.shape, generator=torch.Generator().manual_seed(2))
    deviation = torch.full((300,), NOISE)
    best = DARK + ((noisy.mean(dim=(1, 2, 3)) - 0.5) * 32 / NOISE**2).sigmoid()[:, None, None, None] / 2
    found = prior.denoised(noisy[:, None], deviation)[:, 0]
    least, error = (float((other - images).square().mean()) for other in (best, found))
    assert least < error < 0.9 * float(prior.network.error(deviation[:1])) ** 2


def test_its_energy_has_the_densitys_slope(prior: TrainedPrior) -> None:
    images = flags(5, 3)[:, None] * 0.8
    images.requires_grad_()
    noise = torch.full((5,), NOISE)
    (slope,) = torch.autograd.grad(prior.energy(images, noise).sum(), images)
    expected = (images.detach() - prior.denoised(images.detach(), noise)) / NOISE**2
    assert torch.allclose(slope, expected)


def test_a_file_holds_it(prior: TrainedPrior, tmp_path: Path) -> None:
    prior.write(tmp_path / "prior")
    read = read_trained_prior(tmp_path / "prior")
    assert read.words == prior.words == "prior trained on 400 images of flags"
    assert (read.saw(flags(7, 5)), read.saw(torch.full((1, 1, 8, 8), 0.6))) == (7, 0)
    noise = torch.full((3,), NOISE)
    assert torch.equal(*(each.denoised(flags(3, 4)[:, None], noise) for each in (read, prior)))
    (tmp_path / "other").write_bytes(b"no prior")
    with pytest.raises(InputError, match="other is no prior"):
        read_trained_prior(tmp_path / "other")


def test_attacks_use_it_and_say_so(prior: TrainedPrior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a denoiser that leaves one grey of an image, images read behind noise have one; other sizes are refused."""
    images, model = flags(3, 6), mlp()
    mechanism = {"name": "gaussian", "sigma": 0.01, "clip_norm": 1.0}
    heard = [observe(model, images[[row]], torch.tensor([row]), mechanism=mechanism, client=row) for row in range(3)]
    prior.write(tmp_path / "prior")
    path = str(tmp_path / "prior")
    monkeypatch.setattr(
        TrainedPrior, "denoised", lambda _, images, noise: images.mean(dim=(3, 4), keepdim=True).expand_as(images)
    )
    for config in (ClosedFormSettings(prior=path), IgaSettings(prior=path, denoiser=10.0, iterations=60, tv=0)):
        for found in run_attack(AttackJob(config.name, heard, model, config, 0, public_images=flags(400, 0))):
            assert found.images.std() < 0.02
            assert found.note.endswith("prior trained on 400 images of flags")
    train_prior(flags(40, 0)[..., :4, :4], "flags", 1, 0, silent).write(tmp_path / "small")
    with pytest.raises(AttackRefused, match=r"a prior of images \(1, 4, 4\), and these are \(1, 8, 8\)"):
        run_attack(AttackJob("iga", heard, model, IgaSettings(prior=str(tmp_path / "small")), 0))


def test_what_it_must_not_know_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "prior")
    adversary = {"attacks": ["iga"], "iga": {"prior": path}}
    world = build_world(validated(Experiment, {"adversary": adversary}, "here"))
    train_prior(unit_scale(world.dataset.x_test), "digits", 1, 0, silent).write(Path(path))
    attack_warnings(world, ["iga"])
    seen = torch.cat([world.dataset.x_test, world.dataset.x_train[:30]])
    train_prior(unit_scale(seen), "digits", 1, 0, silent).write(Path(path))
    with pytest.raises(InputError, match=r"adversary\.iga\.prior = .*: it was trained on 30 of the clients' images"):
        attack_warnings(world, ["iga"])
    with pytest.raises(InputError, match=r"iga\.prior needs what knows_public_data = false withholds"):
        validated(Experiment, {"adversary": adversary | {"knows_public_data": False}}, "here")
