"""IGA against a plain loop for one victim, and what it keeps of its iterates."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_victims import MEAN, STD, Headless, digits, errors, lenet, mlp, observe, observe_digits
from torch import Tensor, nn

from fedpriv.attacks import metrics
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, run_attack
from fedpriv.attacks.reconstruction.recipes import Best
from fedpriv.core.randomness import torch_stream


def plain_tv(x: Tensor) -> Tensor:
    return (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()


def plain_loss(model: nn.Module, observation: Observation, x: Tensor, y: Tensor, tv: float) -> Tensor:
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()), create_graph=True)
    one = torch.cat([gradient.flatten() for gradient in gradients])
    other = torch.cat([value.flatten() for value in observation.upload.values()])
    return 1 - torch.dot(one, other) / one.norm() / other.norm() + tv * plain_tv(x)


def plain_iga(
    model: nn.Module, observation: Observation, labels: Tensor, config: IgaSettings, seed: int, restart: int
) -> tuple[Tensor, float, list[float]]:
    """Inverting Gradients as one would write it for a single victim: Adam by hand, one restart."""
    generator = torch_stream(seed, "attack iga", observation.round, observation.client, restart)
    low, high = (0 - MEAN) / STD, (1 - MEAN) / STD
    x = torch.randn(len(labels), 1, 8, 8, generator=generator).double().clamp(low, high)
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    best, best_loss, losses = x, float("inf"), []
    for step in range(config.iterations + 1):
        x = x.detach().requires_grad_()
        weight = max(config.tv, config.tv_start * (1 - step / config.iterations) ** 2)
        loss = plain_loss(model, observation, x, labels, weight)
        losses.append(plain_loss(model, observation, x, labels, config.tv).item())
        if losses[-1] < best_loss:
            best, best_loss = x.detach(), losses[-1]
        sign = torch.autograd.grad(loss, x)[0].sign()
        rate = config.learning_rate * 0.1 ** sum(
            step >= int(part * config.iterations) for part in (3 / 8, 5 / 8, 7 / 8)
        )
        first, second = 0.9 * first + 0.1 * sign, 0.999 * second + 0.001 * sign.square()
        corrected = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
        x = (x.detach() - rate * corrected[0] / (corrected[1].sqrt() + 1e-8)).clamp(low, high)
    return best, best_loss, losses


@pytest.mark.parametrize(("make", "examples", "tv_start"), [(lenet, 1, 0.05), (mlp, 1, 0.0), (mlp, 2, 0.05)])
def test_same_numbers_as_a_plain_loop(make: Any, examples: int, tv_start: float) -> None:
    """Two victims with two restarts each in one batch against four plain loops, in float64."""
    model = make().double()
    images, truth = digits()
    config = IgaSettings(iterations=16, restarts=2, tv=1e-3, tv_start=tv_start)
    heard, labels = [], []
    for client in range(2):
        rows = list(range(10 * client, 10 * client + examples))
        heard.append(observe(model, images[rows], truth[rows], client=client))
        labels.append(truth[rows].sort().values)
    found = run_attack(AttackJob("iga", heard, model, config, seed=5))
    for client in range(2):
        for restart in range(2):
            best, loss, _ = plain_iga(model, heard[client], labels[client], config, 5, restart)
            attempt = found[client].attempts[restart]
            assert attempt.labels.tolist() == labels[client].tolist()
            assert attempt.loss == pytest.approx(loss, rel=1e-6)
            torch.testing.assert_close(attempt.images, (best * STD + MEAN).float(), atol=1e-5, rtol=0)


def test_the_kept_images_are_those_of_the_kept_loss() -> None:
    """Peers store loss(x_t) with x_{t+1}. Here steps are huge and the best iterate never is the last."""
    model = mlp().double()
    heard, _, labels = observe_digits(model, 6)
    config = IgaSettings(iterations=5, learning_rate=30.0, tv=1.0)
    last_was_best = 0
    for observation, label, result in zip(
        heard, labels, run_attack(AttackJob("iga", heard, model, config, 1)), strict=True
    ):
        x = ((result.images - MEAN) / STD).double()
        assert result.loss == pytest.approx(plain_loss(model, observation, x, label, config.tv).item(), rel=1e-4)
        _, _, losses = plain_iga(model, observation, label, config, 1, 0)
        assert result.loss == pytest.approx(min(losses), rel=1e-6)
        last_was_best += losses[-1] == min(losses)
    assert last_was_best == 0


def test_bookkeeping_row_by_row() -> None:
    images, logits = torch.zeros(3, 1, 1, 2, 2), torch.zeros(3, 1, 4)
    best = Best(images, logits)
    table = [[3.0, 1.0, torch.nan], [2.0, 5.0, torch.nan], [4.0, 0.5, 7.0]]
    for number, losses in enumerate(table):
        best.keep(torch.tensor(losses), images + number, logits - number)
    assert best.losses.tolist() == [2.0, 0.5, 7.0]
    assert best.variables[:, 0, 0, 0, 0].tolist() == [1, 2, 2]
    assert best.logits[:, 0, 0].tolist() == [-1, -2, -2]


def test_stays_in_the_box() -> None:
    model = mlp()
    heard, _, _ = observe_digits(model, 2)
    for result in run_attack(AttackJob("iga", heard, model, IgaSettings(iterations=5, learning_rate=50.0), 0)):
        assert float(result.images.min()) >= 0
        assert float(result.images.max()) <= 1


@pytest.mark.parametrize("make", [lenet, mlp, lambda: mlp("relu")])
def test_recovers_digits(make: Any) -> None:
    model = make()
    heard, truth, labels = observe_digits(model, 3, first=20)
    found = run_attack(AttackJob("iga", heard, model, IgaSettings(iterations=80, tv=1e-5, tv_start=0.0), 0))
    assert [result.labels.tolist() for result in found] == labels.tolist()
    similar = metrics.ssim(truth[:, 0], torch.cat([result.images for result in found]))
    assert float(similar.median()) > 0.8


@pytest.mark.slow
def test_recovers_digits_nearly_exactly_from_the_lenet() -> None:
    """With PyTorch's own initial weights: tests/attacks/test_attacks_known_answers.py."""
    model = lenet()
    heard, truth, _ = observe_digits(model, 3, first=50)
    found = run_attack(AttackJob("iga", heard, model, IgaSettings(iterations=400, tv=1e-6, tv_start=0.0), 0))
    similar = metrics.ssim(truth[:, 0], torch.cat([result.images for result in found]))
    assert float(similar.median()) > 0.95


def test_recovers_a_small_batch() -> None:
    images, truth = digits()
    rows = [0, 1, 2]
    model = mlp(hidden=(128,))
    (found,) = run_attack(
        AttackJob("iga", [observe(model, images[rows], truth[rows])], model, IgaSettings(iterations=300), 0)
    )
    assert found.labels.tolist() == [0, 1, 2]
    order = metrics.match(images[rows], found.images)
    assert float(metrics.ssim(images[rows], found.images[order]).min()) > 0.8


def test_labels_that_cannot_be_read_off_are_optimised() -> None:
    model = Headless()
    heard, truth, labels = observe_digits(model, 4)
    found = run_attack(AttackJob("iga", heard, model, IgaSettings(iterations=250, tv=1e-6, restarts=4), 0))
    assert all("optimised with the images" in result.note for result in found)
    assert [result.labels.tolist() for result in found] == labels.tolist()
    assert float(errors([result.images for result in found], truth).median()) < 1e-2


def test_layer_blocks_use_each_blocks_angle() -> None:
    """Through VMF per layer, the lengths of the blocks are lost; the objective is the mean of the blocks' angles."""
    model = mlp().double()
    mechanism = {"name": "vmf", "kappa": 1e7, "blocks": "layer"}
    heard, truth, labels = observe_digits(model, 3, mechanism=mechanism)
    config = IgaSettings(iterations=150, tv=0.0)
    found = run_attack(AttackJob("iga", heard, model, config, 0))
    assert float(errors([result.images for result in found], truth).median()) < 1e-2
    for observation, label, result in zip(heard, labels, found, strict=True):
        x = ((result.images - MEAN) / STD).double()
        gradients = torch.autograd.grad(F.cross_entropy(model(x), label), list(model.parameters()))
        angles = [
            1 - F.cosine_similarity(gradient.flatten(), value.flatten(), dim=0)
            for gradient, value in zip(gradients, observation.upload.values(), strict=True)
        ]
        assert result.loss == pytest.approx(torch.stack(angles).mean().item(), rel=1e-3)
