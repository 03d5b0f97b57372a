"""Evasion attacks, step by step: against foolbox and ART, inside ball and box, through the expectation over noise."""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.attacks.evasion.methods import EVASIONS, EvasionAttack, named_evasion, noiseless_name
from fedpriv.attacks.evasion.steps import Ball, EvasionTrial, PlainTarget, gradient
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import torch_stream
from fedpriv.robustness.build import even_smoothing
from fedpriv.robustness.noise import RobustnessNoise
from fedpriv.robustness.smoothed import SmoothedNetwork
from tests.cases import in_one_test
from tests.robustness.smoothed_networks import first_layer, seeded

SHAPE, CLASSES, STEPS = (2, 5, 6), 4, 7
NORMS = ("linf", "l2")
BALLS = tuple(product(NORMS, (0.03, 0.4)))


def network(kind: torch.dtype = torch.float32) -> nn.Module:
    """A convolution and a smooth bend: deterministic, in evaluation mode."""
    layers = [seeded(nn.Conv2d, 2, 3, 3, seed=1), nn.Tanh(), nn.Flatten(), seeded(nn.Linear, 36, CLASSES, seed=2)]
    return nn.Sequential(*layers).to(kind).eval()


def images(count: int = 9, kind: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Images with pixels at the ends of the box, and labels."""
    stream = torch_stream(4, "images")
    pixels = (1.4 * torch.rand(count, *SHAPE, generator=stream) - 0.2).clamp(0, 1)
    return pixels.to(kind), torch.arange(count) % CLASSES


def plain(model: nn.Module) -> PlainTarget:
    return PlainTarget(model, lambda pixels: pixels, CLASSES, math.prod(SHAPE))


def smoothed(model: nn.Module, sigma: float = 0.2) -> SmoothedNetwork:
    first = first_layer(RobustnessNoise(model, "input"), SHAPE, (0.3, 0.4), (0.5, 0.6))
    return SmoothedNetwork(even_smoothing(first, sigma).first, CLASSES, 3)


def trial(kind: type[EvasionAttack], ball: Ball, steps: int = STEPS, restarts: int = 3) -> EvasionTrial:
    return EvasionTrial("any", kind, ball, 0, steps, restarts, 1, 0.001, 0)


def ours(name: str, norm: str, size: float, model: nn.Module) -> Tensor:
    """An attack without a random start, which no two libraries share."""
    kind: type[EvasionAttack] = type("Fixed", (EVASIONS[name],), {"starts_anywhere": False})
    pixels, labels = images()
    stream = torch_stream(0, "start")
    return trial(kind, Ball(norm, size)).attacked(plain(model).loss(0, stream), pixels, labels, stream)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["fgsm", "ifgsm", "mim", "pgd"])
def test_art_gives_the_same_images(name: str, norm: str) -> None:
    evasion = pytest.importorskip("art.attacks.evasion", reason="ART is not installed: pip install fedpriv[oracles]")
    estimators = pytest.importorskip("art.estimators.classification")
    model, (pixels, labels) = network(), images()
    judge = estimators.PyTorchClassifier(
        model, nn.CrossEntropyLoss(reduction="sum"), SHAPE, CLASSES, clip_values=(0.0, 1.0), device_type="cpu"
    )
    made = {
        "fgsm": evasion.FastGradientMethod,
        "mim": partial(evasion.MomentumIterativeMethod, decay=1.0, max_iter=STEPS, verbose=False),
    }.get(name, partial(evasion.ProjectedGradientDescentPyTorch, max_iter=STEPS, verbose=False))
    far = {"fgsm": 1.0, "pgd": 2.5 / STEPS}.get(name, (1.0 if norm == "linf" else 2.5) / STEPS)
    for size in (0.03, 0.4):
        theirs = made(judge, norm=np.inf if norm == "linf" else 2, eps=size, eps_step=far * size, batch_size=9)
        found = theirs.generate(pixels.numpy(), labels.numpy())
        np.testing.assert_allclose(ours(name, norm, size, model).numpy(), found, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["fgsm", "ifgsm", "pgd"])
def test_foolbox_gives_the_same_images(name: str) -> None:
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed: pip install fedpriv[oracles]")
    model, (pixels, labels) = network(), images()
    judge = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    for size in (0.03, 0.4):
        theirs = {
            "fgsm": lambda: foolbox.attacks.LinfFastGradientAttack(),
            "ifgsm": lambda: foolbox.attacks.LinfBasicIterativeAttack(rel_stepsize=1 / STEPS, steps=STEPS),
            "pgd": lambda: foolbox.attacks.LinfPGD(rel_stepsize=2.5 / STEPS, steps=STEPS, random_start=False),
        }[name]()
        _, found, _ = theirs(judge, pixels, labels, epsilons=size)
        torch.testing.assert_close(ours(name, "linf", size, model), found, rtol=0, atol=1e-6)


@in_one_test(("norm", "size"), BALLS)
@in_one_test("name", list(EVASIONS))
def test_images_stay_in_ball_and_box_and_the_loss_grows(name: str, norm: str, size: float) -> None:
    pixels, labels = images()
    for target, draws in ((plain(network()), 0), (smoothed(network()), 3)):
        stream = torch_stream(1, "trial")
        ball = Ball(norm, size)  # type: ignore[arg-type]
        loss = target.loss(draws, stream)
        found = trial(EVASIONS[name], ball).strongest(loss, pixels, labels, stream)
        assert found.shape == pixels.shape and found.min() >= 0 and found.max() <= 1
        assert ball.distance(pixels, found).max() <= size + 1e-6
        with torch.no_grad():
            exact = target.loss(0, stream)
            assert (exact(found, labels) > exact(pixels, labels)).float().mean() > 0.8


@in_one_test(("norm", "size"), BALLS)
def test_a_flat_loss_moves_nothing(norm: str, size: float) -> None:
    pixels, labels = images()
    stream = torch_stream(1, "trial")
    for name in ("fgsm", "ifgsm", "mim"):
        for flat in (lambda x, y: 0 * x.sum(dim=(1, 2, 3)), lambda x, y: (x * math.nan).sum(dim=(1, 2, 3))):
            found = trial(EVASIONS[name], Ball(norm, size)).attacked(flat, pixels, labels, stream)  # type: ignore[arg-type]
            torch.testing.assert_close(found, pixels, rtol=0, atol=0)
    constant = nn.Parameter(torch.ones(len(pixels)))  # as with a network that turns its input into whole numbers
    with pytest.raises(InputError, match="no derivative in its input"):
        gradient(lambda x, y: constant, pixels, labels)


@pytest.mark.parametrize("norm", NORMS)
def test_random_starts_are_uniform_in_the_ball(norm: str) -> None:
    """The share of starts within half of the radius is 2^-d; the false alarm of the bound is below 1e-6."""
    origins = torch.full((20_000, 1, 1, 2), 0.5)
    ball = Ball(norm, 0.3)  # type: ignore[arg-type]
    starts = ball.anywhere(origins, torch_stream(2, "starts"))
    distances = ball.distance(origins, starts)
    assert distances.max() <= 0.3 + 1e-6 and distances.max() > 0.299
    share = float((distances < 0.15).float().mean())
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 20_000)
    assert (starts - origins).mean(dim=0).abs().max() < 5 * 0.3 / math.sqrt(20_000)


@pytest.mark.parametrize("draws", [1, 6])
def test_the_gradient_is_that_of_the_mean_probability(draws: int) -> None:
    """By hand: each draw its own forward pass of one image in float64, softmax, mean, logarithm, autograd."""
    target = smoothed(network(torch.float64))
    pixels, labels = images(5, torch.float64)
    found = gradient(target.loss(draws, torch_stream(7, "draws")), pixels, labels)
    layer = target.first.layer
    assert layer.deviations is not None
    noise = torch.randn(draws, 5, *SHAPE, generator=torch_stream(7, "draws"), dtype=torch.float64) * layer.deviations
    for at in range(5):
        leaf = pixels[at].clone().requires_grad_()
        inputs = target.first.normalise(leaf[None])
        logits = [layer.layer(inputs + each[at])[0] for each in noise]
        chances = [functional.softmax(each, dim=0)[labels[at]] for each in logits]
        (wanted,) = torch.autograd.grad(-torch.stack(chances).mean().log(), leaf)
        torch.testing.assert_close(found[at], wanted, rtol=1e-6, atol=1e-9)


def test_draws_are_new_in_every_step_and_repeat_with_the_stream() -> None:
    target, (pixels, labels) = smoothed(network()), images()
    stream = torch_stream(5, "draws")
    loss = target.loss(2, stream)
    first, second = gradient(loss, pixels, labels), gradient(loss, pixels, labels)
    assert not torch.equal(first, second)
    assert torch.equal(first, gradient(target.loss(2, torch_stream(5, "draws")), pixels, labels))


def test_without_draws_the_noise_is_left_out() -> None:
    model, (pixels, labels) = network(), images()
    target = smoothed(model)
    stream = torch_stream(5, "draws")
    before = stream.get_state()
    found = gradient(target.loss(0, stream), pixels, labels)
    bare = PlainTarget(model, target.first.normalise, CLASSES, math.prod(SHAPE))
    torch.testing.assert_close(found, gradient(bare.loss(0, stream), pixels, labels))
    assert torch.equal(before, stream.get_state())


def test_restarts_keep_the_highest_loss_of_each_image() -> None:
    pixels, labels = images(6)
    seen: list[Tensor] = []

    def loss(batch: Tensor, truths: Tensor) -> Tensor:
        seen.append(functional.cross_entropy(network()(batch), truths, reduction="none"))
        return seen[-1]

    found = trial(EVASIONS["pgd"], Ball("linf", 0.2), 2, 5).strongest(loss, pixels, labels, torch_stream(1, "starts"))
    assert [len(each) for each in seen] == [30, 30, 30]  # two steps, and the choice, of all restarts at once
    best = seen[-1].view(5, 6).amax(dim=0)
    torch.testing.assert_close(functional.cross_entropy(network()(found), labels, reduction="none"), best)


def test_a_plain_network_has_one_vote() -> None:
    pixels, _ = images()
    votes = plain(network()).votes(pixels, 50, "any", range(9))
    assert votes.shape == (9, CLASSES) and votes.dtype == torch.int64 and (votes.sum(dim=1) == 1).all()
    assert torch.equal(votes.argmax(dim=1), network()(pixels).argmax(dim=1))


def test_variants_have_names() -> None:
    assert named_evasion("pgd-noiseless") == (EVASIONS["pgd"], True)
    assert named_evasion("mim") == (EVASIONS["mim"], False)
    assert noiseless_name("pgd") == noiseless_name("pgd-noiseless") == "pgd-noiseless"
    with pytest.raises(InputError, match="there is no evasion attack 'pdg'; did you mean pgd"):
        named_evasion("pdg")
