"""Dominating pairs: their deltas against closed forms, integrals and Renyi divergences; sampling against the truth."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, special

from fedpriv.accounting import gaussian_delta, gaussian_rdp, laplace_rdp, vmf_rdp
from fedpriv.accounting.numerical import ComposedPair
from fedpriv.accounting.pairs import DirectionalPair, GaussianPair, LaplacePair, SampledPair, interpolated
from tests.cases import in_one_test


def grid(pair, points=400):
    return np.linspace(0.0, pair.largest, points)


@in_one_test("mu", [1e-3, 0.1, 1.0, 8.0, 100.0])
def test_gaussian_deltas(mu):
    pair = GaussianPair(mu)
    epsilons = grid(pair, 60)
    exact = [gaussian_delta(epsilon, mu) for epsilon in epsilons]
    np.testing.assert_allclose(pair.deltas(epsilons), exact, rtol=1e-8, atol=1e-18)
    assert pair.deltas(np.array([pair.largest]))[0] < 1e-17


@in_one_test("kappa", [1e-3, 0.5, 3.0, 200.0])
def test_one_dimension_is_randomised_response(kappa):
    pair = DirectionalPair(kappa, 1)
    keep = special.expit(2 * kappa)
    for share in (0.0, 0.3, 0.99, 1.0, 1.5):
        epsilon = 2 * kappa * share
        exact = max(0.0, keep - math.exp(epsilon) * special.expit(-2 * kappa)) if share < 1 else 0.0
        assert pair.deltas(np.array([epsilon]))[0] == pytest.approx(exact, rel=1e-9, abs=1e-18)


def directional_delta(epsilon, kappa, dimension):
    """By adaptive integration over the angle to the first centre; the law is sin(angle)^(K-2) exp(kappa cos(angle))."""
    cut = math.acos(min(epsilon / (2 * kappa), 1.0))
    centre = 2 * math.atan2(2 * kappa, dimension - 2 + math.hypot(dimension - 2, 2 * kappa)) if kappa > 0 else 0
    mode = math.pi / 2 - centre  # where sin^(K-2) exp(kappa cos) is largest
    peak = (dimension - 2) * math.log(math.sin(mode)) if dimension > 2 else 0.0
    peak = peak + kappa * math.cos(mode) if dimension > 2 else kappa
    width = 1 / math.sqrt(dimension - 2 + kappa)

    def density(angle):
        power = (dimension - 2) * math.log(math.sin(angle)) if dimension > 2 else 0.0
        return math.exp(power + kappa * math.cos(angle) - peak)

    def gain(angle):
        return density(angle) * -math.expm1(epsilon - 2 * kappa * math.cos(angle))

    def integral(function, upper):
        ends = [0.0, *(mode + step * width for step in (-12, -6, -3, -1, 0, 1, 3, 6, 12)), upper]
        inside = sorted({min(max(end, 0.0), upper) for end in ends})
        options = {"epsabs": 0, "epsrel": 1e-11, "limit": 300}
        return sum(integrate.quad(function, a, b, **options)[0] for a, b in itertools.pairwise(inside))

    return integral(gain, cut) / integral(density, math.pi)


@in_one_test("dimension", [2, 3, 4, 10, 1000, 15826, 10**6])
@in_one_test("kappa", [0.05, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7])
def test_directional_deltas_agree_with_integrals_and_are_never_below(dimension, kappa, share):
    pair = DirectionalPair(kappa, dimension)
    epsilon = share * pair.largest
    exact = directional_delta(epsilon, kappa, dimension)
    claimed = pair.deltas(np.array([epsilon]))[0]
    assert exact * (1 - 1e-9) - 1e-18 <= claimed <= exact * (1 + 1e-2) + 1e-14


@in_one_test("kappa", [0.1, 2.0, 20.0])
def test_three_dimensions_have_a_closed_form(kappa):
    """The cosine has the density proportional to exp(kappa t)."""
    pair = DirectionalPair(kappa, 3)
    epsilons = grid(pair, 50)[:-1]
    t = epsilons / (2 * kappa)
    first = (np.exp(kappa) - np.exp(kappa * t)) / (2 * np.sinh(kappa))
    second = (np.exp(-kappa * t) - np.exp(-kappa)) / (2 * np.sinh(kappa))
    exact, claimed = first - np.exp(epsilons) * second, pair.deltas(epsilons)
    assert np.all(exact * (1 - 1e-9) <= claimed)
    np.testing.assert_allclose(claimed, exact, rtol=1e-3, atol=1e-4)


PAIRS = {
    "gaussian 0.3": (GaussianPair(0.3), lambda orders: gaussian_rdp(orders, 1 / 0.3)),
    "gaussian 2": (GaussianPair(2.0), lambda orders: gaussian_rdp(orders, 0.5)),
    "laplace 0.4": (LaplacePair(0.4), lambda orders: laplace_rdp(orders, 0.4)),
    "laplace 5": (LaplacePair(5.0), lambda orders: laplace_rdp(orders, 5.0)),
    **{
        f"vmf K={dimension} kappa={kappa:g}": (
            DirectionalPair(kappa, dimension),
            lambda orders, dimension=dimension, kappa=kappa: vmf_rdp(orders, dimension, kappa),
        )
        for dimension, kappa in [(1, 0.7), (2, 1.0), (3, 6.0), (50, 4.0), (15826, 25.0), (10**8, 2000.0)]
    },
}


@in_one_test("name", PAIRS)
@pytest.mark.parametrize("order", [1.3, 2.0, 3.5])
def test_the_renyi_divergence_is_an_integral_over_the_deltas(name, order):
    """exp((a - 1) D) = 1 + a (a - 1) * integral of [exp((a - 1) e) + exp(-a e)] delta(e): two formulas agree."""
    pair, rdp = PAIRS[name]
    epsilons = np.linspace(0.0, pair.largest, 200_001)
    weights = np.exp((order - 1) * epsilons) + np.exp(-order * epsilons)
    integral = integrate.simpson(weights * pair.deltas(epsilons), x=epsilons)
    found = np.log1p(order * (order - 1) * integral) / (order - 1)
    assert found == pytest.approx(float(rdp(order)), rel=2e-3)


@in_one_test("name", PAIRS)
def test_spread_and_largest_fit(name):
    pair, _ = PAIRS[name]
    assert 0 < pair.spread <= 2 * pair.largest
    assert np.all(np.diff(pair.deltas(grid(pair))) <= 0)
    assert pair.deltas(np.array([pair.largest]))[0] <= 1e-14


@in_one_test(("kappa", "dimension"), [(1e7, 2), (1e7, 3), (1e7, 10**8), (1e-6, 10**8), (1e4, 49)])
def test_extreme_directions(kappa, dimension):
    pair = DirectionalPair(kappa, dimension)
    deltas = pair.deltas(grid(pair))
    assert np.all(np.isfinite(deltas)) and np.all(deltas >= 0) and np.all(deltas <= 1)
    assert np.all(np.diff(deltas) <= 1e-14)


@in_one_test("name", PAIRS)
@in_one_test("rate", [1e-4, 0.1, 0.9])
def test_sampled_deltas_are_amplified_ones(name, rate):
    pair, _ = PAIRS[name]
    sampled = SampledPair(pair, rate)
    epsilons = np.linspace(0.0, min(pair.largest, 30.0), 50)[1:]
    after = np.log1p(rate * np.expm1(epsilons))
    np.testing.assert_allclose(sampled.deltas(after), rate * pair.deltas(epsilons), rtol=1e-6, atol=1e-15)
    assert sampled.largest == pytest.approx(
        math.log1p(rate * math.expm1(pair.largest)) if pair.largest < 500 else pair.largest + math.log(rate), rel=1e-9
    )


def hockey_stick(p, q, epsilon):
    return float(np.sum(np.maximum(0.0, p - math.exp(epsilon) * q)))


@in_one_test(("kappa", "rate"), list(itertools.product([0.3, 2.0], [0.05, 0.5])))
def test_no_sampled_directions_in_the_plane_exceed_the_claim(kappa, rate):
    """One of n directions is drawn; the own, the replaced and the others' anywhere; epsilons of either sign."""
    sampled = SampledPair(DirectionalPair(kappa, 2), rate)
    t = np.linspace(0, 2 * np.pi, 3001)[:-1]

    def law(angle):
        density = np.exp(kappa * np.cos(t - angle))
        return density / density.sum()

    positive = np.linspace(0.0, sampled.largest, 12)
    claimed = sampled.deltas(positive)
    negative = -np.expm1(-positive) + np.exp(-positive) * claimed
    rng = np.random.default_rng(5)
    triples = [(0.0, np.pi, np.pi), (0.0, np.pi, 0.0), *rng.uniform(0, 2 * np.pi, (30, 3))]
    worst = 0.0
    for own, replaced, others in triples:
        p, q = (rate * law(angle) + (1 - rate) * law(others) for angle in (own, replaced))
        for epsilon, above, below in zip(positive, claimed, negative, strict=True):
            assert hockey_stick(p, q, epsilon) <= above + 1e-6
            assert hockey_stick(p, q, -epsilon) <= below + 1e-6
            worst = max(worst, hockey_stick(p, q, epsilon) / max(above, 1e-3))
    assert worst > 0.999  # opposite directions among like ones reach it


def test_interpolation_is_from_above_and_exact_at_the_edges():
    edges = np.array([0.0, 0.5, 2.0])
    deltas = np.array([gaussian_delta(edge, 1.0) for edge in edges])
    np.testing.assert_allclose(interpolated(edges, deltas, edges), deltas)
    between = np.linspace(0, 2, 21)
    assert np.all(interpolated(edges, deltas, between) >= [gaussian_delta(e, 1.0) * (1 - 1e-12) for e in between])
    assert interpolated(edges, deltas, np.array([5.0]))[0] == deltas[-1]


@in_one_test(("kappa", "seed"), list(itertools.product([0.3, 1.5], range(3))))
def test_no_batch_of_two_of_three_directions_exceeds_the_claim(kappa, seed):
    """Both draws are seen, in random order, which tells more than their sum; all directions anywhere on the circle."""
    sampled = SampledPair(DirectionalPair(kappa, 2), 2 / 3)
    t = np.linspace(0, 2 * np.pi, 97)[:-1]
    rng = np.random.default_rng(seed)

    def law(angle):
        density = np.exp(kappa * np.cos(t - angle))
        return density / density.sum()

    def release(angles):
        laws = [law(angle) for angle in angles]
        return sum(np.outer(laws[i], laws[j]) for i, j in itertools.permutations(range(3), 2)) / 6

    neighbours = [(0.0, np.pi, np.pi, np.pi), (0.0, np.pi, 0.0, np.pi), *rng.uniform(0, 2 * np.pi, (12, 4))]
    positive = np.linspace(0.0, sampled.largest, 8)
    claimed = sampled.deltas(positive)
    for own, replaced, *others in neighbours:
        p, q = release([own, *others]), release([replaced, *others])
        for epsilon, above in zip(positive, claimed, strict=True):
            assert hockey_stick(p, q, epsilon) <= above + 1e-6
            assert hockey_stick(q, p, epsilon) <= above + 1e-6


@in_one_test(("kappa", "rate"), list(itertools.product([0.5, 3.0], [0.3, 1.0])))
def test_no_two_blocks_turned_at_once_exceed_the_composed_pair(kappa, rate):
    """Blocks of two and of three coordinates, all of a replaced gradient at once, by any angles, others anywhere."""
    pair = ComposedPair(((DirectionalPair(kappa, 2), 1), (DirectionalPair(kappa, 3), 1)))
    claim = SampledPair(pair, rate) if rate < 1 else pair
    circle = np.linspace(0, 2 * np.pi, 121)[:-1]
    nodes, weights = np.polynomial.legendre.leggauss(24)
    around = np.linspace(0, 2 * np.pi, 25)[:-1]
    sine = np.sqrt(1 - nodes**2)[:, None]
    sphere = np.stack(np.broadcast_arrays(sine * np.cos(around), sine * np.sin(around), nodes[:, None]), -1)
    area = np.repeat(weights, around.size)

    def law(plane, space):
        first = np.exp(kappa * np.cos(circle - plane))
        second = area * np.exp(kappa * sphere.reshape(-1, 3) @ space)
        return np.outer(first / first.sum(), second / second.sum())

    rng = np.random.default_rng(3)
    directions = rng.normal(size=(6, 3, 3))
    directions /= np.linalg.norm(directions, axis=2, keepdims=True)
    pole = np.array([0.0, 0.0, 1.0])
    cases = [((0.0, pole), (np.pi, -pole), (np.pi, -pole)), ((0.0, pole), (0.0, -pole), (1.0, pole))]
    cases += [tuple(zip(rng.uniform(0, 2 * np.pi, 3), three, strict=True)) for three in directions]
    epsilons = np.linspace(0.0, 0.9 * claim.largest, 6)
    claimed = claim.deltas(epsilons)
    for own, replaced, others in cases:
        p, q = (rate * law(*one) + (1 - rate) * law(*others) for one in (own, replaced))
        for epsilon, above in zip(epsilons, claimed, strict=True):
            assert hockey_stick(p, q, epsilon) <= above + 2e-4
            assert hockey_stick(q, p, epsilon) <= above + 2e-4
    p, q = law(0.0, pole), law(np.pi, -pole)
    if rate == 1:  # opposite directions in every block reach it
        assert hockey_stick(p, q, 0.0) >= 0.98 * claimed[0]
