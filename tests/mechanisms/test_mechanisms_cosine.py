"""The law of the cosine: draws against numerical integration and scipy, the mean against mpmath.

All seeds are fixed. Each comparison raises a false alarm with probability 1e-5 had the seed been drawn at random.
"""

import mpmath
import numpy as np
import pytest
from scipy import special, stats
from vmf_oracle import angle_law

from fedpriv.mechanisms.machinery.vmf_sampling import Cosines, draw_cosines, draw_uniform_cosines, mean_cosine
from tests.cases import in_one_test

ALARM = 1e-5
COUNT = 20_000
DIMENSIONS = [2, 3, 4, 17, 200, 15_826, 10**7, 10**8]
KAPPAS = [0.0, 1e-3, 0.7, 5.0, 500.0, 1e5, 1e7]


def exact_mean(kappa: float, dimension: int) -> float:
    with mpmath.workdps(40):
        order, argument = mpmath.mpf(dimension) / 2, mpmath.mpf(kappa) ** 2 / 4
        upper, lower = (mpmath.hyp0f1(order + shift, argument, maxterms=10**6) for shift in (1, 0))
        return float(mpmath.mpf(kappa) / (2 * order) * upper / lower)


@in_one_test("dimension", [1, 2, 3, 4, 17, 200, 15_826, 10**6, 10**8])
@in_one_test("kappa", [1e-8, 1e-3, 0.7, 5.0, 100.0, 2000.0, 2e4])
def test_mean_against_mpmath(dimension: int, kappa: float) -> None:
    assert mean_cosine(kappa, dimension) == pytest.approx(exact_mean(kappa, dimension), rel=1e-13, abs=0)


@in_one_test("dimension", [2, 3, 200, 3000])
def test_mean_for_large_kappa(dimension: int) -> None:
    """I_v by its asymptotic series (mpmath chooses it), where 0F1 has too many terms."""
    with mpmath.workdps(40):
        upper, lower = (mpmath.besseli(mpmath.mpf(dimension) / 2 - shift, mpmath.mpf(10) ** 7) for shift in (0, 1))
        assert mean_cosine(1e7, dimension) == pytest.approx(float(upper / lower), rel=1e-13, abs=0)


def test_mean_at_the_ends() -> None:
    assert mean_cosine(0.0, 7) == 0
    assert mean_cosine(3.0, 1) == pytest.approx(np.tanh(3.0), rel=1e-14)
    assert mean_cosine(3.0, 3) == pytest.approx(1 / np.tanh(3.0) - 1 / 3, rel=1e-14)


@in_one_test("dimension", DIMENSIONS)
@pytest.mark.parametrize("kappa", KAPPAS)
def test_draws_follow_the_density(dimension: int, kappa: float) -> None:
    draws = draw_cosines(kappa, dimension, COUNT, np.random.default_rng(11))
    assert np.abs(draws.cosine**2 + draws.sine**2 - 1).max() < 1e-13
    angles, cumulative = angle_law(kappa, dimension)
    drawn = np.arctan2(draws.sine, draws.cosine)
    assert stats.kstest(drawn, lambda angle: np.interp(angle, angles, cumulative)).pvalue > ALARM
    deviation = abs(draws.cosine.mean() - mean_cosine(kappa, dimension))
    assert deviation < stats.norm.isf(ALARM / 2) * draws.cosine.std() / COUNT**0.5


@in_one_test("dimension", [2, 3, 17, 200])
@pytest.mark.parametrize("kappa", [0.0, 0.7, 50.0, 1e5])
def test_draws_from_given_proposals_follow_the_density(dimension: int, kappa: float) -> None:
    """Of normal vectors: the cosine with the first axis, which is kept where no concentration is."""
    vectors = np.random.default_rng(18).standard_normal((COUNT, dimension))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    proposals = Cosines(vectors[:, 0], np.linalg.norm(vectors[:, 1:], axis=1))
    draws = draw_cosines(kappa, dimension, COUNT, np.random.default_rng(19), proposals)
    assert np.array_equal(proposals.cosine, vectors[:, 0])
    angles, cumulative = angle_law(kappa, dimension)
    drawn = np.arctan2(draws.sine, draws.cosine)
    assert stats.kstest(drawn, lambda angle: np.interp(angle, angles, cumulative)).pvalue > ALARM
    # It is these proposals that the draws are made of, and what belongs to them does not change their law.
    assert stats.spearmanr(draws.cosine, proposals.cosine).statistic > 0.3
    assert kappa > 0 or np.allclose(draws.cosine, proposals.cosine)
    across = vectors[:, 1] / proposals.sine
    assert stats.spearmanr(draws.cosine, across).pvalue > ALARM


@in_one_test(("dimension", "kappa"), [(17, 50.0), (200, 500.0), (15_826, 1e5), (10**8, 1e7)])
def test_the_comparison_can_fail(dimension: int, kappa: float) -> None:
    """Had the sampler 5 % more or less concentration, the same numbers of draws would show it."""
    angles, cumulative = angle_law(kappa, dimension)
    for factor in (0.95, 1.05):
        draws = draw_cosines(factor * kappa, dimension, COUNT, np.random.default_rng(11))
        drawn = np.arctan2(draws.sine, draws.cosine)
        assert stats.kstest(drawn, lambda angle: np.interp(angle, angles, cumulative)).pvalue < ALARM


class Counting:
    """A source of randomness that counts the proposals: one exponential number decides on each."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.proposals = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._rng, name)

    def standard_exponential(self, size: int) -> np.ndarray:
        self.proposals += size
        return self._rng.standard_exponential(size)


def exact_acceptance(kappa: float, dimension: int) -> float:
    """The mean, over the proposals, of the probability that one is accepted, by integration over their angle."""
    with mpmath.workdps(40):
        k, d = mpmath.mpf(kappa), mpmath.mpf(dimension - 1)
        b = (-2 * k + mpmath.sqrt(4 * k**2 + d**2)) / d  # the textbook's form: it cancels, but not in 40 digits
        x0 = (1 - b) / (1 + b)
        slope, share = float(k * (1 - x0**2)), float(x0)
    width = min(np.pi / 2, 40 / np.sqrt(dimension))
    angles = np.linspace(np.pi / 2 - width, np.pi / 2 + width, 2_000_001)
    with np.errstate(divide="ignore"):
        weights = np.exp((dimension - 2) * np.log(np.sin(angles))) if dimension > 2 else np.ones_like(angles)
    y = np.cos(angles)
    heights = slope * y / (1 + share * y) - (dimension - 1) * np.log1p(share * y)
    return float((weights * np.exp(heights)).sum() / weights.sum())


@pytest.mark.parametrize(
    ("dimension", "kappa"),
    [
        (dimension, kappa)
        for row, dimension in enumerate([2, 3, 5, 17, 200, 15_826, 10**7, 10**8])
        for column, kappa in enumerate([0.0, 0.7, 5.0, 500.0, 1e5, 1e7])
        if (row + column) % 2 == 0
    ],
)
def test_acceptance(dimension: int, kappa: float) -> None:
    """As many proposals are accepted as should be, and never fewer than the docstring says."""
    rng = Counting(17)
    draw_cosines(kappa, dimension, COUNT, rng)  # type: ignore[arg-type]
    exact = min(1.0, exact_acceptance(kappa, dimension))
    assert exact >= np.sqrt(np.e / (2 * np.pi)) * (1 - 1e-4)
    assert stats.binomtest(COUNT, rng.proposals, exact).pvalue > ALARM if exact < 1 - 1e-6 else rng.proposals == COUNT


@pytest.mark.parametrize("dimension", [2, 3, 5, 17, 200])
def test_acceptance_for_much_concentration(dimension: int) -> None:
    """The limit that the docstring states, by its logarithm."""
    d = dimension - 1
    limit = np.exp(d / 2 * np.log(np.e / (2 * d)) + special.gammaln(d) - special.gammaln(d / 2))
    assert exact_acceptance(1e7, dimension) == pytest.approx(limit, rel=2e-3)


@in_one_test("dimension", [2, 3, 8])
@in_one_test("kappa", [0.5, 20.0])
def test_draws_agree_with_scipy(dimension: int, kappa: float) -> None:
    axis = np.eye(dimension)[0]
    theirs = stats.vonmises_fisher(axis, kappa, seed=5).rvs(COUNT) @ axis
    ours = draw_cosines(kappa, dimension, COUNT, np.random.default_rng(12)).cosine
    assert stats.ks_2samp(ours, theirs).pvalue > ALARM


@in_one_test("kappa", [0.0, 0.4, 2.0])
def test_one_dimension_is_a_random_sign(kappa: float) -> None:
    draws = draw_cosines(kappa, 1, COUNT, np.random.default_rng(13))
    assert set(draws.cosine) == {-1.0, 1.0}
    assert not draws.sine.any()
    same = int((draws.cosine > 0).sum())
    assert stats.binomtest(same, COUNT, 1 / (1 + np.exp(-2 * kappa))).pvalue > ALARM


def test_one_dimension_with_certainty() -> None:
    assert (draw_cosines(1e7, 1, 1000, np.random.default_rng(14)).cosine == 1).all()


@in_one_test("dimension", [1, 2, 3, 50, 10**8])
def test_uniform_cosines(dimension: int) -> None:
    draws = draw_uniform_cosines(dimension, COUNT, np.random.default_rng(15))
    if dimension == 1:
        assert stats.binomtest(int((draws > 0).sum()), COUNT, 0.5).pvalue > ALARM
        return
    half = (dimension - 1) / 2
    assert stats.kstest((1 - draws) / 2, stats.beta(half, half).cdf).pvalue > ALARM


def test_none_to_draw() -> None:
    assert draw_cosines(3.0, 5, 0, np.random.default_rng(16)).cosine.shape == (0,)
