"""What a curious endpoint reads: the filter against regression, rates by hand, uniform noise at equal accuracy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fedpriv.attacks.endpoint.probes.cloak import (
    Cloak,
    CloakTrial,
    Game,
    Training,
    equal_uniform,
    linear_filter,
    mean_interval,
    right_rates,
    suppression_figures,
    trained_reader,
    uniform_noise,
    verdict,
)
from fedpriv.attacks.scene import Public
from tests.attacks.endpoint_scenes import SHAPE, linear, public
from tests.attacks.test_cloak import some_cloak
from tests.cases import in_one_test


@in_one_test("count", [7, 12, 60])
def test_the_filter_is_the_best_linear_estimate(count: int) -> None:
    """S (S + D)^-1 by inverting the whole matrix, with a large deviation in place of what is suppressed."""
    images, cloak = public(count, 1, 2).images, some_cloak()
    found = torch.eye(16, dtype=torch.float64)
    factors = linear_filter(images, cloak)
    for factor in factors:
        found = found @ factor
    covariance = np.cov(images.flatten(1).numpy().T, bias=True)
    noise = np.where(cloak.kept.flatten(), cloak.sigma.flatten() ** 2, 1e12)
    best = covariance @ np.linalg.inv(covariance + np.diag(noise))
    np.testing.assert_allclose(found.T.numpy(), best, atol=1e-8)
    assert len(factors) == (2 if 2 * count < 16 else 1)


def threshold(images: Tensor) -> Tensor:
    """Class 1 where the first pixel is above a half."""
    return torch.stack([torch.full((len(images),), 0.5, dtype=images.dtype), images[:, 0, 0, 0]], dim=1)


def squares(count: int) -> Public:
    """Images whose first pixel is 0.2 or 0.8, by their class."""
    data = public(count, 3, 2)
    data.images[:, 0, 0, 0] = 0.2 + 0.6 * data.labels
    return data


def test_rates_are_the_normal_laws() -> None:
    """The first pixel is 0.3 on the right side: five standard errors, a false alarm in 1.7 million."""
    data, draws = squares(2000), 4
    rates = right_rates(threshold, uniform_noise(SHAPE, 0.4, False), data.images, data.labels, 5)
    expected = stats.norm.cdf(0.3 / 0.4)
    assert abs(rates.mean() - expected) < 5 * math.sqrt(expected * (1 - expected) / (draws * 2000))
    assert set(np.unique(rates)) <= {0, 0.25, 0.5, 0.75, 1}
    interval = mean_interval(rates)
    low, high = stats.norm.interval(0.95, rates.mean(), stats.sem(rates))
    assert interval.low == pytest.approx(low, abs=1e-5) and interval.high == pytest.approx(high, abs=1e-5)


def test_uniform_noise_is_found_that_costs_the_same() -> None:
    """The deviation is 0.3 / z of the wanted accuracy, up to the draws' chance: within a point of it."""
    data = squares(2000)
    found = equal_uniform(threshold, 0.8, data.images, data.labels, 5, False)
    assert float(found.sigma.max()) == pytest.approx(0.3 / stats.norm.ppf(0.7975), rel=0.08)
    assert right_rates(threshold, found, data.images, data.labels, 5).mean() == pytest.approx(0.7975, abs=0.001)
    free = equal_uniform(threshold, 1.0, data.images, data.labels, 5, False)
    assert right_rates(threshold, free, data.images, data.labels, 5).mean() >= 0.9975


def test_an_adversary_reads_what_noise_leaves_and_not_what_is_suppressed() -> None:
    data, held = squares(300), squares(300)
    training = Training(steps=60, rate=1e-2)
    torch.manual_seed(0)
    shares = []
    for kept in (True, False):
        base = uniform_noise(SHAPE, 0.05, False)
        cloak = Cloak(base.shift, base.sigma, torch.full(SHAPE, True), base.constants, False)
        cloak.kept[0, 0, 0] = kept
        network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
        reader = trained_reader(network, cloak, data.images, data.labels, training, 4)
        shares.append(right_rates(reader.logits, cloak, held.images, held.labels, 6).mean())
    assert shares[0] > 0.99
    # Suppressed, the rest says nothing: held images are the public ones, so a little can be learnt by heart.
    assert shares[1] < 0.8


def test_the_guess_is_the_commonest_attribute_of_each_label() -> None:
    labels, wanted = torch.tensor([0, 0, 0, 1, 1, 1, 1]), torch.tensor([0, 0, 1, 2, 3, 3, 2])
    held = Public(torch.zeros(7, *SHAPE), labels)
    game = Game(threshold, held, held, (wanted, wanted), lambda: linear(4, 1), Training(1), False, 0)
    assert game.guess == pytest.approx((2 + 2) / 7)


def trial(answered: float, read: float, sigma: float = 0.3) -> CloakTrial:
    """Of 1,000 images, read alike whatever the noise."""
    rates = [np.where(np.arange(1000) < 1000 * share, 1.0, 0.0) for share in (answered, read)]
    return CloakTrial(uniform_noise(SHAPE, sigma, False), *rates, 10.0)


@in_one_test(
    ("cloaked", "uniform", "said"),
    [
        (trial(0.86, 0.84), trial(0.865, 0.88), "Cloak hides more than uniform noise from this adversary. At about"),
        (trial(0.86, 0.87), trial(0.86, 0.88), "hides no more than uniform noise. At about the same accuracy (86.0%, "),
        (trial(0.86, 0.95), trial(0.86, 0.88), "difference -7.0 points, 95 %: -8.6 to -5.4"),
        (trial(0.86, 0.84), trial(0.88, 0.90), "Cloak is not compared: 86.0% of the answers are right, and no"),
        (trial(0.59, 0.20), trial(0.59, 0.88), "is not better than uniform noise: 59.0% of the answers are right"),
    ],
)
def test_the_verdict_is_of_two_points_at_equal_accuracy(cloaked: CloakTrial, uniform: CloakTrial, said: str) -> None:
    found = verdict(cloaked, uniform, 0.6)
    assert said in found and ("always naming the commonest group (60.0%)" in found) == (cloaked.answered.mean() < 0.6)


def test_what_chance_explains_is_not_better() -> None:
    """Two points less of 50 images, read by chance: the interval includes none."""
    rng = np.random.default_rng(1)
    cloaked, uniform = (rng.permutation(np.where(np.arange(50) < count, 1.0, 0.0)) for count in (25, 27))
    right, noise = np.ones(50), uniform_noise(SHAPE, 0.3, False)
    found = verdict(CloakTrial(noise, right, cloaked, 1.0), CloakTrial(noise, right, uniform, 1.0), 0.6)
    assert found.startswith("Cloak is not shown to hide more than uniform noise.")


def test_suppression_is_also_counted_among_what_is_ever_lit() -> None:
    images = torch.zeros(5, *SHAPE, dtype=torch.float64)
    images[2, 0, :2] = 0.5
    cloak = some_cloak()
    shares = {figure.what: figure.measured.value for figure in suppression_figures(cloak, images)}
    assert shares == {"pixels suppressed": 4 / 16, "pixels suppressed, of those that are ever lit": 2 / 8}
    assert suppression_figures(uniform_noise(SHAPE, 0.3, False), images) == ()
