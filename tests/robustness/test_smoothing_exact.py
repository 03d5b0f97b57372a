"""Certificates of networks whose probabilities are known in closed form: no radius beyond the true boundary.

What stands behind the noise is linear with two classes: the first wins with probability Phi(score / deviation), and the
distance to where it no longer does is known. A vote counts what is drawn, so wrong noise, a forgotten normalisation, a
norm that is too small or a bound at too little confidence shows here.
"""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor, nn

from fedpriv.core.randomness import torch_stream
from fedpriv.robustness.build import Smoothing, even_smoothing, shares_spread
from fedpriv.robustness.certify import Bounds, certificate, main_margin, vote_bounds
from fedpriv.robustness.noise import RobustnessNoise
from fedpriv.robustness.norms import layer_norms
from fedpriv.robustness.settings import CertifyConfig
from fedpriv.robustness.smoothed import SmoothedNetwork
from tests.cases import in_one_test
from tests.robustness.smoothed_networks import first_layer, jacobian, normalised, seeded

SHAPE, MEAN, STD = (1, 3, 4), (0.13,), (0.31,)
PIXELS, COORDINATES = 12, 8
FALSE_ALARMS = 1e-6  # of each statistical test here


class Linear:
    """Two classes, z'w + c above 0 or not, behind noise that is shared out unevenly; all is known."""

    def __init__(self, seed: int, worst: bool = False) -> None:
        inner = seeded(nn.Linear, PIXELS, COORDINATES, seed=seed)
        stream = torch_stream(seed, "noise shares")
        spread = shares_spread(torch.rand(COORDINATES, generator=stream, dtype=torch.float64) ** 3, 1.0)
        head = nn.Linear(COORDINATES, 2)
        self.network = nn.Sequential(nn.Flatten(), RobustnessNoise(inner), head)
        self.first = first_layer(self.network, SHAPE, MEAN, STD)
        self.columns = jacobian(self.first, nn.Sequential(nn.Flatten(), inner))
        scale = torch.linalg.matrix_norm(self.columns / spread.flatten()[:, None], 2)
        Smoothing(self.first, 0.3, "l2", spread).fitted(float(scale))
        self.deviations = (0.3 * float(scale) * spread).flatten()
        relative = self.columns / self.deviations[:, None]
        direction = torch.randn(COORDINATES, generator=stream, dtype=torch.float64)
        if worst:  # where the certificate is exact
            direction = torch.linalg.svd(relative).U[:, 0] / self.deviations
        with torch.no_grad():
            head.weight.copy_(torch.stack([direction, torch.zeros(COORDINATES)]))
            head.bias.zero_()
        self.direction, self.head = direction, head
        self.voting = SmoothedNetwork(self.first, 2, seed)

    def shifted_to(self, image: Tensor, probability: float) -> None:
        """Move the boundary so that the first class wins on the image with this probability."""
        wanted = special.ndtri(probability) * self.spread_of_score
        with torch.no_grad():
            self.head.bias[0] += wanted - self.score(image)

    @property
    def spread_of_score(self) -> float:
        return float((self.direction * self.deviations).norm())

    def score(self, image: Tensor) -> float:
        value = self.first(image[None])[0].detach().double() @ self.direction
        return float(value + self.head.bias[0].detach().double())

    def probability(self, image: Tensor) -> float:
        return float(special.ndtr(self.score(image) / self.spread_of_score))

    def distance(self, image: Tensor, norm: str) -> float:
        """To where both classes are as likely, in pixels."""
        slope = self.columns.T @ self.direction
        return abs(self.score(image)) / float(slope.norm() if norm == "l2" else slope.abs().sum())

    def step(self, norm: str, size: float) -> Tensor:
        """The most damaging change of that size."""
        slope = self.columns.T @ self.direction
        unit = slope / slope.norm() if norm == "l2" else slope.sign()
        return (-size * unit).float().view(SHAPE)


@pytest.fixture
def image() -> Tensor:
    return torch.rand(SHAPE, generator=torch_stream(2, "image"))


def radii(made: Linear, probability: float) -> tuple[float, float]:
    norms = layer_norms(made.first, made.first.layer.deviations)  # type: ignore[arg-type]
    margin = main_margin(Bounds(probability, 1 - probability))
    return margin / norms.l2, margin / norms.linf


@in_one_test("seed", range(6))
def test_no_radius_is_beyond_the_boundary(seed: int, image: Tensor) -> None:
    made = Linear(seed)
    made.shifted_to(image, 0.9)
    for radius, norm in zip(radii(made, made.probability(image)), ("l2", "linf"), strict=True):
        assert 0 < radius <= made.distance(image, norm) * (1 + 1e-6)


@in_one_test("seed", range(6))
def test_the_euclidean_radius_is_exact_in_the_worst_case(seed: int, image: Tensor) -> None:
    """A step of 1.01 radii changes the vote, one of 0.99 does not."""
    made = Linear(seed, worst=True)
    made.shifted_to(image, 0.93)
    radius, _ = radii(made, made.probability(image))
    assert radius == pytest.approx(made.distance(image, "l2"), rel=1e-5)
    assert made.probability(image + made.step("l2", 0.99 * radius)) > 0.5
    assert made.probability(image + made.step("l2", 1.01 * radius)) < 0.5


@in_one_test("probability", [0.55, 0.8, 0.97])
def test_votes_are_as_frequent_as_the_closed_form(probability: float, image: Tensor) -> None:
    """Half the noise would make 0.8 into 0.95."""
    made = Linear(1)
    made.shifted_to(image, probability)
    wins = int(made.voting.votes(image[None], 4000, "test", [0])[0, 0])
    assert stats.binomtest(wins, 4000, probability).pvalue > FALSE_ALARMS


def test_votes_under_attack_are_as_frequent_as_the_closed_form(image: Tensor) -> None:
    made = Linear(2, worst=True)
    made.shifted_to(image, 0.9)
    radius, _ = radii(made, 0.9)
    moved = image + made.step("l2", radius)
    wins = int(made.voting.votes(moved[None], 4000, "test", [0])[0, 0])
    assert stats.binomtest(wins, 4000, 0.5).pvalue > FALSE_ALARMS


def test_certificates_from_votes_hold_as_often_as_they_say(image: Tensor) -> None:
    """In the worst case a radius above the distance is wrong: at alpha = 0.05 no more than that share of 300 are.

    More than 40 are by chance less than once in a million times; at half the confidence it would be about 150.
    """
    made = Linear(3, worst=True)
    made.shifted_to(image, 0.85)
    norms = layer_norms(made.first, made.first.layer.deviations)  # type: ignore[arg-type]
    config = CertifyConfig(alpha=0.05, rivals="together")
    distance = made.distance(image, "l2")
    counts = made.voting.votes(image.expand(300, *SHAPE), 100, "test", range(300)).tolist()
    wrong = sum(certificate(0, 0, 0, votes, config, norms).radius_l2 > distance for votes in counts)
    assert stats.binom.sf(40, 300, 0.05) < FALSE_ALARMS
    assert wrong <= 40


def test_votes_do_not_depend_on_what_is_asked_beside_them(image: Tensor) -> None:
    made = Linear(1)
    made.shifted_to(image, 0.7)
    other = torch.rand(SHAPE, generator=torch_stream(9, "image"))
    together = made.voting.votes(torch.stack([other, image]), 500, "test", [4, 7])
    assert torch.equal(together[1], made.voting.votes(image[None], 500, "test", [7])[0])
    assert not torch.equal(together[1], made.voting.votes(image[None], 500, "test", [8])[0])
    assert not torch.equal(together[1], made.voting.votes(image[None], 500, "other", [7])[0])
    assert together.sum(dim=1).tolist() == [500, 500]


def test_votes_are_those_of_whole_forward_passes(image: Tensor) -> None:
    """The first layer once, then noise: as if the network had been run with its noise for each vote."""
    conv = seeded(nn.Conv2d, 1, 3, 3, padding=1)
    model = nn.Sequential(RobustnessNoise(conv), nn.ReLU(), nn.Flatten(), seeded(nn.Linear, 36, 4, seed=5))
    first = first_layer(model, SHAPE, MEAN, STD)
    first.layer.deviations = torch.full((3, 3, 4), 0.8)
    voting = SmoothedNetwork(first, 4, 1)
    stream, wanted = torch_stream(1, "test", 3), torch.zeros(4, dtype=torch.int64)
    with torch.no_grad():
        value = conv(first.normalise(image[None]))
        z = value + 0.8 * torch.randn(200, *value.shape[1:], generator=stream)
        wanted = torch.bincount(model[3](torch.relu(z).flatten(1)).argmax(dim=1), minlength=4)
    assert torch.equal(voting.votes(image[None], 200, "test", [3])[0], wanted)


def test_noisy_logits_have_the_gradient_of_whole_forward_passes(image: Tensor) -> None:
    conv = seeded(nn.Conv2d, 1, 3, 3, padding=1)
    model = nn.Sequential(RobustnessNoise(conv), nn.Tanh(), nn.Flatten(), seeded(nn.Linear, 36, 4, seed=5)).eval()
    first = first_layer(model, SHAPE, MEAN, STD)
    first.layer.deviations = torch.full((3, 3, 4), 0.8)
    voting = SmoothedNetwork(first, 4, 1)
    images = torch.stack([image, 1 - image]).requires_grad_()
    found = voting.noisy_logits(images, 5, torch_stream(1, "test"))
    noise = 0.8 * torch.randn(5, 2, 3, 3, 4, generator=torch_stream(1, "test"))
    wanted = torch.stack(
        [model[3](torch.tanh(conv(normalised(MEAN, STD, images)) + draw).flatten(1)) for draw in noise]
    )
    assert torch.allclose(found, wanted, atol=1e-5)
    gradients = [
        torch.autograd.grad(logits.softmax(2).mean(0)[:, 1].log().sum(), images)[0] for logits in (found, wanted)
    ]
    assert torch.allclose(*gradients, atol=1e-6)


# ---- one dimension ---------------------------------------------------------------------------------------------------

CLASSIFIERS = {
    "threshold": lambda t: (t > 0.4).astype(float),
    "interval": lambda t: ((t > -1.0) & (t < 1.4)).astype(float),
    "stripes": lambda t: (np.sin(3 * t) > -0.6).astype(float),
    "soft": lambda t: 1 / (1 + np.exp(-4 * t)),
}


@in_one_test("name", CLASSIFIERS)
@in_one_test("sigma", [0.3, 1.0])
def test_any_function_of_one_number_keeps_to_the_margin(name: str, sigma: float) -> None:
    """By quadrature: within the radius of a point the smoothed value stays above a half; a threshold reaches it."""
    points = np.linspace(-9, 9, 60_001)
    values = CLASSIFIERS[name](points)

    def smoothed(x: float) -> float:
        density = np.exp(-(((points - x) / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))
        return float(integrate.simpson(values * density, x=points))

    for x in np.linspace(-1.5, 2.5, 9):
        p = smoothed(float(x))
        if not 0.5 < p < 1 - 1e-9:
            continue
        radius = sigma * main_margin(Bounds(p, 1 - p))
        ends = smoothed(float(x) - 0.999 * radius), smoothed(float(x) + 0.999 * radius)
        assert min(ends) > 0.5 - 1e-4
        if name == "threshold":
            assert smoothed(float(x) - 1.01 * radius) < 0.5


def test_bounds_of_votes_enter_the_radius(image: Tensor) -> None:
    made = Linear(1)
    norms = layer_norms(made.first, made.first.layer.deviations)  # type: ignore[arg-type]
    found = certificate(5, 1, 0, [90, 10], CertifyConfig(), norms)
    bounds = vote_bounds([90, 10], 0, 0.001, "each")
    assert (found.lower, found.upper, found.votes, found.runner_up) == (bounds.lower, bounds.upper, 100, 10)
    assert found.radius_l2 * norms.l2 == pytest.approx(main_margin(bounds))
    assert found.radius_linf * norms.linf == pytest.approx(main_margin(bounds))
    assert not found.right and found.radius("l2") == 0.0


def test_votes_come_in_batches_that_the_widest_layer_allows(image: Tensor) -> None:
    """With noise on 12 pixels, and 4,096 numbers behind them: at most 2^19 numbers at once, and no vote is lost."""
    wide = nn.Sequential(nn.Flatten(), nn.Linear(12, 4096), nn.ReLU(), nn.Linear(4096, 2))
    first = first_layer(RobustnessNoise(wide, "input"), SHAPE, MEAN, STD)
    seen: list[int] = []
    wide[1].register_forward_hook(lambda layer, given, made: seen.append(len(made)))
    voting = SmoothedNetwork(even_smoothing(first, 0.5).first, 2, 1)
    assert voting.votes(image[None], 300, "test", [0]).sum() == 300
    assert max(seen) * 4096 <= 1 << 19 and sum(seen) == 300 + 1 and len(seen) == 4
