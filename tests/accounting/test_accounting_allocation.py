"""Balls in bins: deltas against brute-force integrals and draws, dominance, and what they need less noise than."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedpriv.accounting import guarantee, proven_epsilon, release_with, running_epsilon
from fedpriv.accounting.allocation import AllocationPair, ZeroOutAllocationPair
from fedpriv.accounting.gaussian_proof import GaussianProof
from fedpriv.accounting.numerical import composed_epsilon
from fedpriv.accounting.pairs import DirectionalPair, GaussianPair, LaplacePair
from fedpriv.accounting.proofs import Claim
from fedpriv.accounting.references import (
    CeilingReference,
    DirectionalReference,
    LaplaceReference,
    NormalReference,
    ReferencePair,
)

EPSILONS = np.array([0.0, 0.1, 0.5, 1.0, 2.0, 3.0])
NODES, WEIGHTS = np.polynomial.legendre.leggauss(1500)


def reference(pair: ReferencePair, count: int = 1) -> CeilingReference:
    return CeilingReference(((pair, count),), "")


def ratios(name: str) -> tuple[ReferencePair, np.ndarray, np.ndarray, np.ndarray]:
    """A step without the example, by Gauss-Legendre quadrature: weights, and the ratios of opposite gradients."""
    if name == "gaussian":
        x = 9 * NODES
        weights = 9 * WEIGHTS * stats.norm.pdf(x)
        return NormalReference(1.2), weights, np.exp(x / 1.2 - 0.5 / 1.44), np.exp(-x / 1.2 - 0.5 / 1.44)
    if name == "laplace":  # one part for each side of the kinks
        edges = np.array([-40.0, -0.8, 0.0, 0.8, 40.0])
        nodes, node_weights = np.polynomial.legendre.leggauss(400)
        halves = np.diff(edges)[:, None] / 2
        x = (edges[:-1, None] + halves * (1 + nodes)).ravel()
        weights = (halves * node_weights).ravel() * np.exp(-np.abs(x)) / 2
        return LaplaceReference(0.8), weights, np.exp(abs(x) - abs(x - 0.8)), np.exp(abs(x) - abs(x + 0.8))
    kappa = 1.5  # in three dimensions the cosine of a uniform direction is uniform
    scale = kappa / math.sinh(kappa)
    return DirectionalReference(kappa, 3), WEIGHTS / 2, scale * np.exp(kappa * NODES), scale * np.exp(-kappa * NODES)


@pytest.mark.parametrize("name", ["gaussian", "laplace", "vmf"])
def test_two_steps_are_the_integral_over_both(name: str) -> None:
    pair, weights, large, small = ratios(name)
    both = np.outer(weights, weights)
    means = [(ratio[:, None] + ratio[None, :]) / 2 for ratio in (large, small)]
    ones = np.ones_like(means[0])
    goes = ZeroOutAllocationPair(reference(pair), 2)
    for found, (first, second) in (
        (AllocationPair(reference(pair), 2), means),
        (goes, (means[0], ones)),
        (goes.exchanged, (ones, means[0])),
    ):
        exact = np.array([np.sum(both * np.maximum(first - math.exp(each) * second, 0)) for each in EPSILONS])
        deltas = found.deltas(EPSILONS)
        assert np.all(deltas >= exact * (1 - 2e-5) - 1e-10)
        np.testing.assert_allclose(deltas, exact, rtol=0.06, atol=2e-5)


@pytest.mark.parametrize(
    ("pair", "whole"),
    [
        (NormalReference(1.5), GaussianPair(2 / 1.5)),
        (LaplaceReference(0.7), LaplacePair(1.4)),
        (DirectionalReference(6.0, 50), DirectionalPair(6.0, 50)),
    ],
)
def test_one_step_is_the_pair_without_sampling(pair, whole) -> None:
    deltas, exact = AllocationPair(reference(pair), 1).deltas(EPSILONS), whole.deltas(EPSILONS)
    assert np.all(deltas >= exact * (1 - 1e-6))
    np.testing.assert_allclose(deltas, exact, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize(("sigma", "steps"), [(0.6, 234), (1.0, 20)])
def test_many_steps_are_as_draws_say(sigma: float, steps: int) -> None:
    """Means of 20,000 draws; false alarm 1e-6 a figure, fixed seed."""
    x = np.random.default_rng(5).standard_normal((20_000, steps))
    x[:, 0] += 1 / sigma
    first, second = (np.exp(sign * x / sigma - 0.5 / sigma**2).mean(axis=1) for sign in (1, -1))
    epsilons = np.array([0.0, 0.25, 0.5, 1.0])
    pair = reference(NormalReference(sigma))
    goes = ZeroOutAllocationPair(pair, steps)
    for found, loss in ((AllocationPair(pair, steps), np.log(first / second)), (goes, np.log(first))):
        drawn = np.maximum(-np.expm1(epsilons - loss[:, None]), 0)
        off = found.deltas(epsilons) - drawn.mean(axis=0)
        assert np.all(np.abs(off) < 5 * drawn.std(axis=0) / 141 + 0.005 * drawn.mean(axis=0))


def test_opposite_gradients_dominate_others() -> None:
    """At an angle, or shorter, the deltas of two steps of normal noise in the plane are no larger."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    x, y = (axis.ravel() for axis in np.meshgrid(nodes, nodes))
    masses = np.outer(weights, weights).ravel() / (2 * np.pi)
    both = np.outer(masses, masses)
    limits = AllocationPair(reference(NormalReference(1.0)), 2).deltas(EPSILONS)

    def means(vector: np.ndarray) -> np.ndarray:
        ratio = np.exp(x * vector[0] + y * vector[1] - vector @ vector / 2)
        return (ratio[:, None] + ratio[None, :]) / 2

    for length, angle in ((1.0, 0.5), (1.0, 0.75), (0.5, 1.0), (0.0, 1.0)):
        first = means(np.array([1.0, 0.0]))
        second = means(length * np.array([math.cos(math.pi * angle), math.sin(math.pi * angle)]))
        deltas = [np.sum(both * np.maximum(first - math.exp(each) * second, 0)) for each in EPSILONS]
        assert np.all(np.array(deltas) <= limits + 1e-3)


RUN = {"sampling": "balls-in-bins", "rate": 1 / 234, "participations": 5, "dimensions": (101_770,)}


@pytest.mark.parametrize(("mechanism", "shuffled", "here"), [("gaussian", 2.685, 0.494), ("vmf", 118.7, 645.0)])
def test_epsilon_8_on_fashion_mnist_takes_far_less_noise_than_shuffled(mechanism, shuffled, here) -> None:
    """60,000 images in batches of 256, five passes: a fifth of the noise that shuffled batches need."""
    release = release_with(here, 1e-5, mechanism=mechanism, **RUN)
    assert 7.6 < proven_epsilon(release) < 8
    needed = replace(release, sampling="shuffled", noise=shuffled * 1.005 ** (-1 if mechanism == "vmf" else 1))
    assert 7.9 < proven_epsilon(needed) < 8


def test_published_bounds_on_random_allocation_lie_above() -> None:
    """Renyi bounds of random-allocation 1.0.5 (direct method) for an example that comes: computed once."""
    pair = ZeroOutAllocationPair(reference(NormalReference(1.0)), 100, comes=True)
    found = composed_epsilon(((pair, 5),), 1e-5, 10.0)
    assert found is not None and 1.0 < found < 1.3157


def test_the_ledger_names_the_other_samplings_and_falls_back() -> None:
    proven = guarantee(release_with(2.0, 1e-5, mechanism="gaussian", **{**RUN, "rate": 1 / 20}))
    shuffled = proven_epsilon(release_with(2.0, 1e-5, mechanism="gaussian", **{**RUN, "sampling": "shuffled"}))
    assert proven.sampling == "balls-in-bins, 20 steps a pass"
    assert any(f"epsilon {shuffled:.4g} for shuffled" in note for note in proven.notes)
    for noise in (1e-3, 1e9):  # so little or so much that nothing is gained
        release = release_with(noise, 1e-5, mechanism="gaussian", **RUN)
        assert proven_epsilon(release) == proven_epsilon(replace(release, sampling="shuffled"))
    for scale in (1e-3, 0.02, 0.03):  # one step tells nearly all
        release = release_with(scale, 1e-5, mechanism="laplace", **{**RUN, "participations": 1})
        for adjacency in ("replace-one", "zero-out"):
            assert proven_epsilon(replace(release, adjacency=adjacency)) == pytest.approx(2 / scale, rel=1e-6)


def test_the_final_figure_is_never_above_the_running_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which clients stop at a target: sigma 125.5, 100,000 passes, zero-out had 0.2166 at the end and 0.2150 before.

    Whichever of the two grids is the tighter one, as there.
    """
    for fine, coarse in ((0.2166, 0.2150), (0.2150, 0.2166)):
        claims = {False: [Claim(fine, "fine")], True: [Claim(coarse, "coarse")]}
        monkeypatch.setattr(GaussianProof, "allocated_claims", lambda *_, coarse=False, known=claims: known[coarse])
        release = release_with(1.0, 1e-5, mechanism="gaussian", **RUN)
        assert proven_epsilon(release) == 0.2150 <= running_epsilon(release)


def test_deltas_that_drown_in_rounding_are_rounded_up() -> None:
    """Against the integral over the step with the example, given draws of the others; their deviation is 2 %."""
    sigma, steps, epsilons = 0.5, 10_000, np.array([2.0, 4.0, 6.0, 9.0])
    others = np.random.default_rng(1).normal(size=(100, steps - 1)) / sigma
    sums = [np.exp(sign * others - 0.5 / sigma**2).sum(axis=1)[:, None] for sign in (1, -1)]
    z = np.linspace(-8, 15, 4001)
    weights = stats.norm.pdf(z - 1 / sigma) * (z[1] - z[0])
    large, small = (np.exp(sign * z / sigma - 0.5 / sigma**2) for sign in (1, -1))
    ratios = (sums[1] + small) / (sums[0] + large)
    exact = np.array([np.mean(np.maximum(1 - odds * ratios, 0) @ weights) for odds in np.exp(epsilons)])
    found = AllocationPair(reference(NormalReference(sigma)), steps)._bounds(epsilons)
    assert (0.95 * exact <= found).all() and (found <= 1.2 * exact + 3e-11).all()
    assert found[-1] < 1e-11  # and not exp(epsilon) times what rounding costs
