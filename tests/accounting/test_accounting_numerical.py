"""Numerical composition against exact figures, bounds from below, dp-accounting and finer grids."""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize

from fedpriv.accounting import (
    ORDERS,
    amplified_rdp,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_rdp,
    guarantee,
    rdp_to_epsilon,
    release_with,
    running_epsilon,
    vmf_rdp,
)
from fedpriv.accounting.composition import pure_composition_epsilon
from fedpriv.accounting.numerical import ComposedPair, LossDistribution, composed_epsilon
from fedpriv.accounting.pairs import DirectionalPair, GaussianPair, LaplacePair, SampledPair
from fedpriv.accounting.vmf_functions import mean_resultant_length
from tests.cases import in_one_test

pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
pld_pmf = pytest.importorskip("dp_accounting.pld.pld_pmf")


@pytest.mark.parametrize("total", [0.1, 1.0, 10.0])
@in_one_test("count", [1, 30, 1000, 10_000, 900_000, 9_900_000])
@in_one_test("delta", [1e-2, 1e-5, 1e-9, 1e-12, 1e-18])
def test_gaussians_are_exact_and_never_below(total, count, delta):
    """Also where a plain Fourier transform rounds to less than the truth: small deltas and long runs."""
    exact = gaussian_epsilon(delta, total)
    found = composed_epsilon(((GaussianPair(total / math.sqrt(count)), count),), delta, 1.2 * exact + 1e-3)
    assert exact * (1 - 1e-9) <= found <= 1.005 * exact + 1e-3 * total


@in_one_test(("kappa", "count"), list(itertools.product([0.02, 0.3, 2.0], [1, 10, 500])))
def test_one_dimensional_draws_are_composed_randomised_responses(kappa, count):
    exact = pure_composition_epsilon(2 * kappa, count, 1e-5)
    found = composed_epsilon(((DirectionalPair(kappa, 1), count),), 1e-5, exact)
    assert exact * (1 - 1e-8) <= found <= 1.01 * exact + 0.2 * kappa


@in_one_test(("dimension", "kappa"), [(15826, 25.0), (61706, 10.0), (10**8, 1000.0)])
@in_one_test("count", [1, 10, 1000])
def test_directions_in_a_high_dimension_are_nearly_gaussian(dimension, kappa, count):
    """The loss 2 kappa t is nearly normal, and its mean and variance are 2 kappa A and 4 kappa^2 / K."""
    renyi = rdp_to_epsilon(ORDERS, count * vmf_rdp(ORDERS, dimension, kappa), 1e-5)
    found = composed_epsilon(((DirectionalPair(kappa, dimension), count),), 1e-5, renyi)
    assert found == pytest.approx(gaussian_epsilon(1e-5, 2 * kappa * math.sqrt(count / dimension)), rel=5e-3)
    assert found < renyi


@in_one_test("dimension", [2, 3, 20])
@in_one_test(("kappa", "count"), list(itertools.product([0.1, 1.0, 10.0], [1, 20, 1000])))
def test_directions_lie_between_what_one_test_tells_and_renyi_accounting(dimension, kappa, count):
    """On which side of the equator a draw lies is a randomised response: its composition is a bound from below."""
    t = np.cos((np.arange(20_000) + 0.5) * np.pi / 20_000)
    masses = (1 - t * t) ** ((dimension - 2) / 2) * np.exp(kappa * (t - 1))
    keep = masses[t > 0].sum() / masses.sum()
    least = pure_composition_epsilon(math.log(keep / (1 - keep)), count, 1e-5)
    release = release_with(
        kappa, 1e-5, mechanism="vmf", sampling="full", rate=1.0, participations=count, dimensions=(dimension,)
    )
    assert least * (1 - 1e-6) <= guarantee(release).epsilon <= running_epsilon(release)


@pytest.mark.parametrize(("kappa", "delta"), [(0.3, 1e-3), (2.0, 0.02)])
def test_two_draws_on_the_circle_agree_with_a_convolution(kappa, delta):
    found = composed_epsilon(((DirectionalPair(kappa, 2), 2),), delta, 4 * kappa)
    losses = 2 * kappa * np.cos((np.arange(2000) + 0.5) * np.pi / 2000)
    masses = np.exp(losses / 2) / np.exp(losses / 2).sum()
    both, weights = losses[:, None] + losses[None, :], masses[:, None] * masses[None, :]

    def excess(epsilon):
        return np.sum(weights * np.maximum(0.0, -np.expm1(epsilon - both))) - delta

    exact = optimize.brentq(excess, 0, 4 * kappa, xtol=1e-6)
    assert exact * (1 - 1e-5) <= found <= 1.01 * exact + 0.02 * kappa


@in_one_test(("mu", "rate"), list(itertools.product([0.2, 1.0, 4.0], [0.001, 0.05, 0.5])))
@in_one_test("delta", [1e-4, 1e-7])
def test_one_sampled_step_is_exact(mu, rate, delta):
    """delta at log(1 + q (exp(epsilon) - 1)) is q times that of the batch at epsilon."""
    batch = gaussian_epsilon(delta / rate, mu) if delta < rate else 0.0
    exact = math.log1p(rate * math.expm1(batch))
    found = composed_epsilon(((SampledPair(GaussianPair(mu), rate), 1),), delta, 1.2 * exact + 1e-3)
    assert exact * (1 - 1e-9) <= found <= 1.01 * exact + 0.2 * rate * min(mu, 1.0)


@pytest.mark.parametrize(("mu", "rate", "count"), [(0.4, 0.01, 500), (3.0, 0.2, 20)])
def test_sampled_gaussians_lie_between_a_known_attack_and_renyi_accounting(mu, rate, count):
    """Neighbours among equal examples: P is (1 - q) Q + q P against Q, which dp-accounting composes for Poisson."""
    single = pld.from_gaussian_mechanism(1 / mu, sampling_prob=rate, value_discretization_interval=1e-4)
    least = single.self_compose(count).get_epsilon_for_delta(1e-5)
    step = amplified_rdp(ORDERS, lambda orders: gaussian_rdp(orders, 1 / mu), math.inf, rate)
    renyi = rdp_to_epsilon(ORDERS, count * step, 1e-5)
    found = composed_epsilon(((SampledPair(GaussianPair(mu), rate), count),), 1e-5, renyi)
    assert 0.999 * least <= found <= min(1.35 * least, renyi)


CASES = {
    "gaussian": ((SampledPair(GaussianPair(0.5), 0.02), 300),),
    "gaussian, much": ((SampledPair(GaussianPair(4.0), 0.01), 100),),
    "laplace": ((SampledPair(LaplacePair(1.0), 0.02), 300),),
    "vmf": ((SampledPair(DirectionalPair(25.0, 15826), 0.02), 300),),
    "vmf, blocks": (
        (SampledPair(ComposedPair(((DirectionalPair(0.2, 16), 60), (DirectionalPair(0.2, 7), 1))), 0.1), 50),
    ),
    "vmf, layers": ((DirectionalPair(2.0, 300), 20), (DirectionalPair(2.0, 12), 20), (DirectionalPair(2.0, 1), 20)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_finer_grid_changes_little_and_lowers(name, monkeypatch):
    known = 1.5 * composed_epsilon(CASES[name], 1e-5, 1.0)
    rough = composed_epsilon(CASES[name], 1e-5, known)
    monkeypatch.setattr("fedpriv.accounting.numerical._SHARE_OF_SPREAD", 0.02)
    fine = composed_epsilon(CASES[name], 1e-5, known)
    assert fine * (1 - 1e-6) <= rough <= 1.005 * fine


@in_one_test("count", [1, 4, 60])
def test_composed_pairs_have_the_deltas_of_the_whole(count):
    pair, whole = ComposedPair(((GaussianPair(0.3), count),)), GaussianPair(0.3 * math.sqrt(count))
    epsilons = np.linspace(0.0, 0.9 * whole.largest, 40)
    exact = np.array([gaussian_delta(epsilon, whole.mu) for epsilon in epsilons])
    found = pair.deltas(epsilons)
    assert np.all(found >= exact - 2e-15)
    assert np.all(found <= 1.1 * exact + 1e-13)
    assert found[0] <= 1.01 * exact[0]
    assert pair.spread == pytest.approx(whole.mu)
    assert pair.pieces == count


def test_composed_pairs_whose_loss_is_hardly_ever_small():
    """Below all losses of the grid delta is claimed to be 1, which it nearly is."""
    deltas = ComposedPair(((GaussianPair(30.0), 4),)).deltas(np.linspace(0.0, 1800.0, 5))
    assert deltas[0] == 1.0
    assert deltas[-1] == pytest.approx(gaussian_delta(1800.0, 60.0), rel=5e-2)
    assert np.all(np.diff(deltas) <= 0)


@in_one_test("pair", [GaussianPair(0.7), LaplacePair(1.3), DirectionalPair(3.0, 20)])
@in_one_test("count", [1, 5, 200])
def test_grids_and_their_deltas_agree_with_dp_accounting(pair, count):
    interval = 0.05 * pair.spread
    own = LossDistribution.of(pair, interval)
    cells = math.ceil(pair.largest / interval)
    positive = pair.deltas(np.arange(cells + 1) * interval)
    negative = 1 - np.exp(-np.arange(cells, 0, -1) * interval) * (1 - positive[:0:-1])
    dots = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, -cells, cells, np.concatenate([negative, positive])
    )
    theirs = pld.PrivacyLossDistribution(dots).self_compose(count)
    for delta in (1e-2, 1e-5, 1e-7):
        assert own.repeated(count).epsilon(delta) == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=1e-6)


def test_the_smallest_epsilon_of_a_distribution():
    distribution = LossDistribution(0.5, -2, np.array([0.1, 0.2, 0.3, 0.25, 0.1]), 0.05)
    losses, masses = distribution.losses, distribution.masses

    def delta(epsilon):
        return 0.05 + np.sum(masses * np.maximum(0.0, -np.expm1(epsilon - losses)))

    np.testing.assert_allclose(distribution.deltas, [delta(loss) for loss in losses], rtol=1e-12)
    for target in (0.06, 0.1, 0.15):
        found = distribution.epsilon(target)
        assert delta(found) == pytest.approx(target, rel=1e-9)
    assert distribution.epsilon(0.04) == math.inf
    assert distribution.epsilon(0.9) == 0.0


def test_the_variance_of_the_loss_is_kept():
    """Connecting the dots adds at most a quarter of the squared interval."""
    pair = DirectionalPair(5.0, 30)
    distribution = LossDistribution.of(pair, 0.1 * pair.spread)
    mean = distribution.losses @ distribution.masses
    variance = (distribution.losses - mean) ** 2 @ distribution.masses
    assert mean == pytest.approx(10.0 * float(mean_resultant_length(30, 5.0)), rel=2e-3)
    assert pair.spread**2 <= variance * (1 + 1e-4) <= 1.005 * pair.spread**2
    assert distribution.masses.sum() + distribution.infinite == pytest.approx(1.0, abs=1e-12)


@in_one_test(
    ("pair", "delta", "known"),
    [
        *[(GaussianPair(1.0), 9e-21, 5.0), (GaussianPair(1.0), 1e-5, 1.1e6)],
        (SampledPair(ComposedPair(((GaussianPair(1.0), 2),)), 0.1), 9e-10, 5.0),
    ],
)
def test_nothing_is_said_where_it_would_not_be_accurate(pair, delta, known):
    assert composed_epsilon(((pair, 10),), delta, known) is None
