"""The Laplace mechanism against 60-digit evaluations, integrals over the line, dp-accounting, and its exact delta."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy import integrate, stats

from fedpriv.accounting import (
    ORDERS,
    Release,
    amplified_pure,
    amplified_rdp,
    guarantee,
    laplace_rdp,
    pure_rdp,
    rdp_to_epsilon,
    running_epsilon,
)
from fedpriv.accounting.composition import pure_composition_epsilon
from fedpriv.accounting.numerical import composed_epsilon
from fedpriv.accounting.pairs import LaplacePair
from tests.cases import in_one_test

SHIFTS = [
    1e-30,
    1e-15,
    1e-9,
    1e-6,
    1e-3,
    0.1,
    0.5,
    0.999,
    1.0,
    1.001,
    2.0,
    10.0,
    98.0,
    101.0,
    700.0,
    1e3,
    1e6,
    2e9,
    1e15,
]


# ---- Renyi divergence -----------------------------------------------------------------------------------------------


@in_one_test("shift", SHIFTS)
def test_renyi_agrees_with_mpmath_from_tiny_to_huge_shifts(shift):
    orders = ORDERS[::4]
    with mpmath.workdps(90):
        t, expected = mpmath.mpf(shift), []
        for order in orders:
            a = mpmath.mpf(float(order))
            w = a / (2 * a - 1)
            expected.append(float(mpmath.log(w * mpmath.exp((a - 1) * t) + (1 - w) * mpmath.exp(-a * t)) / (a - 1)))
    np.testing.assert_allclose(laplace_rdp(orders, shift), expected, rtol=1e-13)


@in_one_test(("order", "shift"), list(itertools.product([1.05, 1.5, 2.0, 3.5, 20.0], [0.01, 0.4, 1.0, 6.0])))
def test_renyi_agrees_with_an_integral_over_the_line(order, shift):
    def density(x):
        return math.exp(-order * abs(x) + (order - 1) * abs(x - shift)) / 2

    pieces = [(-60.0, 0.0), (0.0, shift), (shift, shift + 60.0)]
    moment = sum(integrate.quad(density, low, high, epsabs=0, epsrel=1e-12, limit=200)[0] for low, high in pieces)
    assert float(laplace_rdp(order, shift)) == pytest.approx(math.log(moment) / (order - 1), rel=1e-9)


@pytest.mark.parametrize("noise", [0.05, 0.5, 3.0, 40.0])
def test_renyi_agrees_with_dp_accounting(noise):
    dp = pytest.importorskip("dp_accounting")
    orders = [1.05, 1.5, 2.0, 10.0, 300.0]
    expected = dp.rdp.RdpAccountant(orders).compose(dp.LaplaceDpEvent(noise)).rdp
    np.testing.assert_allclose(laplace_rdp(orders, 1 / noise), expected, rtol=1e-10)


@in_one_test("shift", SHIFTS)
def test_renyi_grows_with_order_and_shift_and_stays_below_the_pure_bound(shift):
    rdp = laplace_rdp(ORDERS, shift)
    assert np.all(np.diff(rdp) >= -1e-14 * rdp[:-1])
    assert np.all(rdp <= laplace_rdp(ORDERS, 1.001 * shift))
    assert np.all(rdp <= shift)
    assert np.all(rdp <= pure_rdp(ORDERS, shift))
    assert np.all(rdp >= 0) and np.all(np.isfinite(rdp))


def test_renyi_limits():
    assert float(laplace_rdp(2.0**20, 1.0)) == pytest.approx(1.0, rel=1e-5)
    assert float(laplace_rdp(7.0, 1e-8)) == pytest.approx(7 * 1e-16 / 2, rel=1e-6)
    assert float(laplace_rdp(7.0, 0.0)) == 0.0
    assert np.all(np.isinf(laplace_rdp(ORDERS, math.inf)))


@in_one_test(("orders", "shift"), [(1.0, 1.0), (np.nan, 1.0), (2.0, -1e-9), (2.0, math.nan)])
def test_renyi_refuses_what_it_cannot_compute(orders, shift):
    with pytest.raises(ValueError):
        laplace_rdp(orders, shift)


@in_one_test("seed", range(20))
def test_a_shift_shared_by_many_coordinates_costs_no_more(seed):
    """Random splits of the L1 sensitivity over up to 60 coordinates, even, uneven and nearly alone."""
    rng = np.random.default_rng(seed)
    shift = float(np.exp(rng.uniform(-6, 6)))
    shares = rng.dirichlet(np.full(int(rng.integers(2, 61)), rng.choice([0.05, 1.0, 100.0])))
    split = np.sum([laplace_rdp(ORDERS, float(share) * shift) for share in shares], axis=0)
    assert np.all(split <= laplace_rdp(ORDERS, shift) * (1 + 1e-12))


# ---- delta ----------------------------------------------------------------------------------------------------------


def composed(shift, count, delta, known):
    return composed_epsilon(((LaplacePair(shift), count),), delta, known)


def one_delta(epsilon, shift):
    """Exact delta of one release at any epsilon, 1 - min(1, exp(epsilon), exp((epsilon - shift) / 2))."""
    return 1 - min(1.0, math.exp(epsilon), math.exp((epsilon - shift) / 2))


def loss_law(shift, cells=4000):
    """The privacy loss of one coordinate under P: atoms at both ends, the density between in small cells."""
    middle = (np.arange(cells) + 0.5) / cells * 2 * shift - shift
    weights = np.exp((middle - shift) / 2) / 4 * (2 * shift / cells)
    return np.concatenate([[shift, -shift], middle]), np.concatenate([[0.5, math.exp(-shift) / 2], weights])


def product_delta(epsilon, shifts):
    losses, weights = np.zeros(1), np.ones(1)
    for shift in shifts:
        more, chances = loss_law(shift, 1500)
        losses = (losses[:, None] + more[None, :]).ravel()
        weights = (weights[:, None] * chances[None, :]).ravel()
    return float(np.sum(weights * np.maximum(0.0, -np.expm1(epsilon - losses))))


def test_the_loss_law_is_that_of_the_exact_delta():
    for shift, share in itertools.product([0.1, 1.0, 4.0], [-0.9, -0.3, 0.0, 0.5, 0.95]):
        assert product_delta(share * shift, [shift]) == pytest.approx(one_delta(share * shift, shift), abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_one_coordinate_at_the_full_distance_dominates_two(seed):
    """The claim on which the privacy-loss distribution of one coordinate rests: at every epsilon, of either sign."""
    rng = np.random.default_rng(seed)
    shifts = rng.exponential(1.5, 2)
    for share in rng.uniform(-1.1, 1.1, 5):
        epsilon = float(share * shifts.sum())
        assert product_delta(epsilon, shifts) <= one_delta(epsilon, float(shifts.sum())) + 1e-6


@in_one_test("shift", [0.02, 0.3, 1.0, 7.0, 300.0])
@in_one_test("delta", [0.01, 1e-5, 1e-8])
def test_one_release_is_exact(shift, delta):
    exact = max(shift + 2 * math.log1p(-delta), 0.0)
    claimed = composed(shift, 1, delta, shift)
    assert exact <= claimed <= exact + 0.4 * delta


@in_one_test("shift", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("delta", [0.05, 1e-3])
def test_two_releases_agree_with_a_convolution(shift, delta):
    claimed = composed(shift, 2, delta, 2 * shift)
    assert product_delta(claimed, [shift, shift]) == pytest.approx(delta, rel=5e-2)
    assert product_delta(claimed, [shift, shift]) <= delta * (1 + 1e-3)


@pytest.mark.parametrize("shift", [0.02, 0.2, 2.0])
@pytest.mark.parametrize("count", [1, 30, 1000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9, 1e-15])
def test_many_releases_lie_between_two_randomised_responses(shift, count, delta):
    """Whether the noisy number is above the middle is a randomised response; and the release is shift-DP itself."""
    least = pure_composition_epsilon(math.log(2 * math.exp(shift / 2) - 1), count, delta)
    most = pure_composition_epsilon(shift, count, delta)
    claimed = composed(shift, count, delta, most)
    assert least * (1 - 1e-9) <= claimed <= most * (1 + 2e-3) + 1e-3


# ---- the ledger -----------------------------------------------------------------------------------------------------


def release(sampling="shuffled", scale=2.0, participations=3, rate=0.1, unit="example", delta=1e-5):
    return Release("laplace", unit, sampling, rate, participations, (1000,), scale, delta)


@in_one_test(("unit", "sampling"), [("example", "shuffled"), ("example", "full"), ("update", "full")])
@in_one_test(("scale", "participations"), list(itertools.product([0.1, 2.0, 50.0, 1e4], [1, 30])))
def test_ledger_without_amplification(unit, sampling, scale, participations):
    found = guarantee(release(sampling, scale, participations, unit=unit))
    renyi = rdp_to_epsilon(ORDERS, participations * laplace_rdp(ORDERS, 2 / scale), 1e-5)
    composed = pure_composition_epsilon(2 / scale, participations, 1e-5)
    assert found.nominal_epsilon == pytest.approx(1 / scale, rel=1e-14)
    assert found.pure_epsilon == pytest.approx(2 * participations / scale, rel=1e-14)
    assert found.epsilon <= min(found.pure_epsilon, renyi, composed)
    least = pure_composition_epsilon(math.log(2 * math.exp(min(1 / scale, 600)) - 1), participations, 1e-5)
    assert found.epsilon >= least * (1 - 1e-9)


@in_one_test(("scale", "rate"), list(itertools.product([0.1, 2.0, 50.0], [1e-3, 0.2])))
def test_ledger_with_fixed_size_sampling(scale, rate):
    found, unsampled = guarantee(release("fixed", scale, 40, rate)), guarantee(release("full", scale, 40))
    step = amplified_pure(2 / scale, rate)
    renyi = rdp_to_epsilon(
        ORDERS, 40 * amplified_rdp(ORDERS, lambda orders: laplace_rdp(orders, 2 / scale), 2 / scale, rate), 1e-5
    )
    assert found.pure_epsilon == pytest.approx(40 * step, rel=1e-13)
    running = running_epsilon(release("fixed", scale, 40, rate))
    assert running == min(found.pure_epsilon, renyi, pure_composition_epsilon(step, 40, 1e-5))
    assert found.epsilon <= min(running, unsampled.epsilon)


@pytest.mark.parametrize(("scale", "rate"), [(0.5, 0.4), (3.0, 0.01)])
def test_poisson_batches_agree_with_a_sum_over_participations(scale, rate):
    """Both neighbours show who took part: delta is the mean over n of that of n releases, by dp-accounting."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    found = guarantee(release("poisson", scale, 12, rate)).epsilon
    single = pld.from_laplace_mechanism(scale / 2, value_discretization_interval=1e-4)
    shares = stats.binom.pmf(np.arange(13), 12, rate)
    counts = [count for count in range(1, 13) if shares[count] > 1e-9]

    def delta(epsilon):
        return sum(shares[n] * single.self_compose(n).get_delta_for_epsilon(epsilon) for n in counts)

    assert delta(found) <= 1e-5 * (1 + 1e-3) <= delta(found * (1 - 5e-3))


def test_dp_accountings_event_with_twice_the_sensitivity_is_the_same():
    dp = pytest.importorskip("dp_accounting")
    event = dp.SelfComposedDpEvent(dp.LaplaceDpEvent(1.5), 12)
    exact = dp.pld.PLDAccountant(value_discretization_interval=1e-4).compose(event).get_epsilon(1e-5)
    assert guarantee(release("full", 3.0, 12)).epsilon == pytest.approx(exact, rel=1e-3)
    renyi = dp.rdp.RdpAccountant(ORDERS).compose(event).get_epsilon(1e-5)
    assert running_epsilon(release("full", 3.0, 12)) <= renyi * (1 + 1e-9)
