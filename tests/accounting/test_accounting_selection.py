"""The best of several trials: Papernot and Steinke's formulas, and the exact law of the best of a random number."""

import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from fedpriv.accounting import release_with
from fedpriv.accounting.gaussian import gaussian_epsilon
from fedpriv.accounting.gaussian_proof import GaussianProof
from fedpriv.accounting.renyi import ORDERS, gaussian_rdp
from fedpriv.accounting.selection import best_of_poisson, best_of_truncated, selections
from tests.cases import in_one_test

POINTS = np.linspace(-12, 12, 40_001)


def logarithmic_parameter(mean: float) -> mpmath.mpf:
    with mpmath.workdps(40):
        ends = (mpmath.mpf(10) ** -20, mpmath.mpf("0.999999"))
        return mpmath.findroot(lambda g: (1 / g - 1) / mpmath.log(1 / g) - mean, ends, solver="anderson", maxsteps=500)


def best_law(share: np.ndarray, number: str, mean: float) -> np.ndarray:
    """The law of the largest of K draws, of which each is at most the points with these chances, and of none."""
    if number == "poisson":
        below = np.exp(mean * (share - 1))
    elif number == "geometric":
        below = share / mean / (1 - (1 - 1 / mean) * share)
    else:
        chance = float(logarithmic_parameter(mean))
        below = np.log1p(-(1 - chance) * share) / math.log(chance)
    return np.diff(below, prepend=0.0)


def exact_epsilon(mu: float, number: str, mean: float, delta: float) -> float:
    """Trials release a normal number, which is the score, too: the neighbour's is larger by mu."""
    one, two = (best_law(stats.norm.cdf(POINTS, loc=shift), number, mean) for shift in (0.0, mu))
    least, most = 0.0, 60.0
    for _ in range(50):
        epsilon = (least + most) / 2
        found = max(np.maximum(p - math.exp(epsilon) * q, 0).sum() for p, q in ((one, two), (two, one)))
        least, most = (epsilon, most) if found > delta else (least, epsilon)
    return most


@in_one_test("number", ["poisson", "geometric", "logarithmic"])
@in_one_test(("mu", "mean"), [(0.3, 5), (1.0, 30), (0.1, 200)])
def test_no_exact_law_of_the_best_exceeds_the_claim(number: str, mu: float, mean: int) -> None:
    """And that of trials with a quarter of the noise is found out."""
    claims = {
        each.number.split()[3]: each.epsilon for each in selections([gaussian_rdp(ORDERS, 1 / mu)] * mean, 1e-5)[1:]
    }
    claim = next(value for key, value in claims.items() if key.lower() == number)
    assert exact_epsilon(mu, number, mean, 1e-5) <= claim
    assert exact_epsilon(4 * mu, number, mean, 1e-5) > claim
    assert claim > gaussian_epsilon(1e-5, mu)  # of one trial alone


@in_one_test(("sigma", "mean"), [(3.0, 4), (0.7, 50)])
def test_the_formulas_by_mpmath(sigma: float, mean: int) -> None:
    rdp = gaussian_rdp(ORDERS, sigma)
    poisson, geometric, logarithmic = best_of_poisson(rdp, mean), *(best_of_truncated(rdp, mean, s) for s in (1.0, 0.0))
    mpf = mpmath.mpf
    chance = logarithmic_parameter(mean)
    for place in (20, 60, 100, 150):
        order = mpf(float(ORDERS[place]))
        own, tail = order / (2 * mpf(sigma) ** 2), mpmath.log(mean) / (order - 1)
        within = mpmath.log(1 + 1 / (order - 1))
        deltas = (
            mpmath.exp((a - 1) * (a / (2 * mpf(sigma) ** 2) - within)) / a * (1 - 1 / a) ** (a - 1)
            for a in map(mpf, ORDERS.tolist())
        )
        assert float(poisson[place]) == pytest.approx(float(own + mean * min(1, *deltas) + tail), rel=1e-9)
        for found, gamma, shape in ((geometric, mpf(1) / mean, 1), (logarithmic, chance, 0)):
            beside = min(
                (1 - 1 / a) * a / (2 * mpf(sigma) ** 2) - mpmath.log(gamma) / a for a in map(mpf, ORDERS.tolist())
            )
            assert float(found[place]) == pytest.approx(float(own + (1 + shape) * beside + tail), rel=1e-9)


def test_a_fixed_number_of_trials_composes() -> None:
    run = {"mechanism": "gaussian", "sampling": "full", "rate": 1.0}
    once = GaussianProof(release_with(8.0, 1e-5, participations=5, **run)).run_rdp()
    many = GaussianProof(release_with(8.0, 1e-5, participations=20, **run)).best().epsilon
    (fixed, *_) = selections([once] * 4, 1e-5)
    assert many <= fixed.epsilon <= 1.1 * many
    (alone,) = selections([once], 1e-5)
    assert alone.number.startswith("1,")
