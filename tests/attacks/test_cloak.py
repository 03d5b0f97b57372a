"""Learnt noise on questions: its law by sampling, its loss by differences, its bits in closed form, suppression."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedpriv.accounting.gaussian import gaussian_delta
from fedpriv.attacks.endpoint.probes.cloak import Cloak, Learning, cloak_loss, learn_noise, suppress, uniform_noise
from fedpriv.core.randomness import torch_stream
from tests.attacks.endpoint_scenes import SHAPE, hidden, public


def some_cloak(clamped: bool = False) -> Cloak:
    """Deviations from 0.1 to 2, shifts, and every fifth feature suppressed."""
    rng = np.random.default_rng(1)
    shift = torch.from_numpy(rng.uniform(-0.5, 0.5, SHAPE))
    sigma = torch.from_numpy(np.geomspace(0.1, 2, math.prod(SHAPE)).reshape(SHAPE))
    kept = torch.arange(math.prod(SHAPE)).view(SHAPE) % 5 != 0
    return Cloak(shift, sigma, kept, torch.from_numpy(rng.random(SHAPE)), clamped)


def test_noise_has_the_mean_and_variance_that_it_says() -> None:
    """Every kept feature, two tests each at 1e-8: a false alarm has a probability below 3e-7."""
    cloak, draws = some_cloak(), 20_000
    image = public(1, 2, 2).images[0]
    sent = cloak.hide(image.expand(draws, *SHAPE), torch_stream(1, "test"))
    noise = ((sent - image - cloak.shift) / cloak.sigma)[:, cloak.kept].numpy()
    assert np.abs(noise.mean(axis=0)).max() * math.sqrt(draws) < stats.norm.isf(1e-8 / 2)
    low, high = stats.chi2.ppf([0.5e-8, 1 - 0.5e-8], draws - 1)
    squares = noise.var(axis=0, ddof=1) * (draws - 1)
    assert low < squares.min() and squares.max() < high
    between = np.abs(np.triu(np.corrcoef(noise.T), 1)).max()
    assert between * math.sqrt(draws) < stats.norm.isf(1e-10)  # 66 pairs: features get noise of their own


def test_suppressed_features_are_the_same_constant_in_all_images() -> None:
    cloak = some_cloak()
    sent = cloak.hide(public(50, 3, 2).images, torch_stream(2, "test"))[:, ~cloak.kept]
    assert bool((sent == cloak.constants[~cloak.kept]).all()) and sent.shape[1] == 4
    kept = cloak.hide(public(50, 3, 2).images, torch_stream(2, "test"))[:, cloak.kept]
    assert bool((kept.std(dim=0) > 0).all())


def test_clamped_images_are_such_as_endpoints_take() -> None:
    plain, clamped = (some_cloak(on).hide(public(50, 3, 2).images, torch_stream(2, "test")) for on in (False, True))
    assert float(plain.min()) < 0 and float(plain.max()) > 1
    assert torch.equal(clamped, plain.clamp(0, 1))


@pytest.mark.parametrize("which", ["shift", "sigma"])
def test_the_losss_gradient_is_that_of_differences(which: str) -> None:
    """In float64, the same noise on both sides; central differences of 1e-6 err by about 1e-9."""
    network, data = hidden(3, seed=4), public(20, 5, 3)
    cloak = replace(some_cloak(), kept=torch.ones(SHAPE, dtype=torch.bool))

    def loss(values: Tensor) -> Tensor:
        changed = replace(cloak, shift=values) if which == "shift" else replace(cloak, sigma=values)
        return cloak_loss(network, changed, 3.0, data.images, data.labels, torch_stream(3, "test"))

    at = getattr(cloak, which).clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(at), at)
    for place in range(math.prod(SHAPE)):
        step = torch.zeros(math.prod(SHAPE), dtype=torch.float64)
        step[place] = 1e-6
        with torch.no_grad():
            slope = (loss(at + step.view(SHAPE)) - loss(at - step.view(SHAPE))) / 2e-6
        assert float(found.flatten()[place]) == pytest.approx(float(slope), abs=2e-8)


def test_the_loss_is_what_is_written_on_paper() -> None:
    """A model that does not look: the cross entropy is log K, and the power of the noise is added by hand."""
    cloak, data = some_cloak(), public(10, 6, 4)

    def blind(images: Tensor) -> Tensor:
        return torch.zeros(len(images), 4, dtype=torch.float64)

    found = cloak_loss(blind, cloak, 2.0, data.images, data.labels, torch_stream(1, "test"))
    power = np.mean(np.geomspace(0.1, 2, 16) ** 2)
    assert float(found) == pytest.approx(2 * math.log(4) - math.log(power), abs=1e-12)


def test_deviations_stay_in_their_range() -> None:
    learning = Learning(1.0, least=0.01, most=1.2)
    rho = torch.tensor([-1e9, -3.0, 0.0, 3.0, 1e9], dtype=torch.float64)
    expected = [0.01, 0.01 + 1.19 * (1 + math.tanh(-3)) / 2, 0.605, 0.01 + 1.19 * (1 + math.tanh(3)) / 2, 1.2]
    np.testing.assert_allclose(learning.deviations(rho).numpy(), expected, rtol=1e-14)


def test_bits_are_those_of_gaussian_channels() -> None:
    """A normal image: the mutual information is the difference of two entropies (scipy), and the bound is tight."""
    cloak = some_cloak()
    variances = torch.from_numpy(np.random.default_rng(2).uniform(0.01, 0.3, SHAPE))
    kept = cloak.kept.numpy()
    sigma, variance = cloak.sigma.numpy()[kept], variances.numpy()[kept]
    exact = stats.norm(scale=np.sqrt(variance + sigma**2)).entropy() - stats.norm(scale=sigma).entropy()
    assert cloak.bits(variances) == pytest.approx(float(exact.sum()) / math.log(2), rel=1e-12)
    assert uniform_noise(SHAPE, 0.5, True).bits(torch.full(SHAPE, 0.75)) == pytest.approx(16 * 1.0)


def test_bits_are_no_less_than_what_a_coin_tells() -> None:
    """Black or white at even odds is far from normal: its information, by quadrature, is below the bound."""
    sigma = 0.4
    grid = np.linspace(-4, 5, 20_001)
    density = (stats.norm.pdf(grid, 0, sigma) + stats.norm.pdf(grid, 1, sigma)) / 2
    entropy = -np.trapezoid(density * np.log(density), grid)
    told = (entropy - float(stats.norm(scale=sigma).entropy())) / math.log(2)
    bound = uniform_noise((1, 1, 1), sigma, False).bits(torch.full((1, 1, 1), 0.25))
    assert 0.5 < told < bound < 1


@pytest.fixture(scope="module")
def learnt() -> tuple[Cloak, Cloak, Learning, torch.nn.Module]:
    """A model that looks at the first row of an image alone: noise learnt for it, and the rest suppressed."""
    network = hidden(2, seed=7, width=4)
    with torch.no_grad():
        network[1].weight *= 3
        network[1].weight[:, 4:] = 0
    network.requires_grad_(False)
    images = public(200, 8, 2).images
    labels = network(images).argmax(dim=1)
    learning = Learning(weight=10.0, steps=150)
    cloak = learn_noise(network, images, labels, learning, torch_stream(5, "test"))
    few = suppress(cloak, 0.75, network, images, labels, replace(learning, steps=20), torch_stream(6, "test"))
    return cloak, few, learning, network


def test_noise_goes_where_the_model_does_not_look(
    learnt: tuple[Cloak, Cloak, Learning, torch.nn.Module],
) -> None:
    cloak, few, learning, _ = learnt
    assert learning.least <= float(cloak.sigma.min()) and float(cloak.sigma.max()) <= learning.most
    assert float(cloak.sigma[0, 1:].min()) > 1.2
    assert float(cloak.sigma[0, 0].min()) < 0.5
    assert bool((few.kept == (cloak.sigma <= 0.75)).all()) and not bool(few.kept[0, 1:].any())


def test_suppressing_leaves_the_rest_as_it_was(learnt: tuple[Cloak, Cloak, Learning, torch.nn.Module]) -> None:
    cloak, few, _, network = learnt
    assert few.sigma is cloak.sigma and few.shift is cloak.shift and cloak.kept.all()
    assert not few.constants.requires_grad and not few.sigma.requires_grad
    assert all(value.grad is None for value in network.parameters())


def test_learning_repeats(learnt: tuple[Cloak, Cloak, Learning, torch.nn.Module]) -> None:
    """The same draws: the same noise, to the last bit."""
    *_, network = learnt
    data, learning = public(30, 8, 2), Learning(weight=1.0, steps=5)
    one, two = (learn_noise(network, data.images, data.labels, learning, torch_stream(5, "t")) for _ in range(2))
    assert torch.equal(one.sigma, two.sigma) and torch.equal(one.shift, two.shift)


def test_cloak_is_no_differential_privacy(learnt: tuple[Cloak, Cloak, Learning, torch.nn.Module]) -> None:
    """Two images that differ where noise is small are told apart: delta, exact for this Gaussian, is near 1."""
    cloak, *_ = learnt
    place = int(cloak.sigma.argmin())
    least = float(cloak.sigma.flatten()[place])
    dark, bright = torch.zeros(2, *SHAPE, dtype=torch.float64)
    bright.view(-1)[place] = 1.0
    delta = gaussian_delta(1.0, 1 / least)
    assert delta > 0.5  # at epsilon 1, where a proof would want 1e-5
    middle = 0.5 + float(cloak.shift.flatten()[place])
    sent = [
        cloak.hide(image.expand(4000, *SHAPE), torch_stream(9, "test", number)).flatten(1)[:, place] > middle
        for number, image in enumerate((dark, bright))
    ]
    advantage = float(sent[1].double().mean() - sent[0].double().mean())
    exact = 2 * float(stats.norm.cdf(0.5 / least)) - 1
    assert advantage == pytest.approx(exact, abs=5.5 * math.sqrt(2 / 4 / 4000))  # false alarm below 1e-7
    assert advantage > (math.e - 1) / (math.e + 1)  # more than epsilon 1 allows
