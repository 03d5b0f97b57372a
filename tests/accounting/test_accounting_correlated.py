"""Correlated noise: explicit matrices, every pattern of participations, and what jax_privacy computes."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import linalg, signal, special

from fedpriv.accounting import (
    Release,
    calibrate,
    ceilings,
    gaussian_epsilon,
    guarantee,
    membership_bound,
    proven_epsilon,
)
from fedpriv.accounting.correlated import noise_factors, sensitivity
from fedpriv.accounting.people import Share, person
from fedpriv.accounting.release import Correlation
from fedpriv.core.errors import InputError
from fedpriv.core.names import AdjacencyName, UnitName
from tests.cases import in_one_test

DELTA = 1e-5


def release(
    sigma: float, pattern: Correlation, adjacency: AdjacencyName = "replace-one", unit: UnitName = "update"
) -> Release:
    count = pattern.participations
    return Release("correlated", unit, "full", 1.0, count, (9,), sigma, DELTA, adjacency, correlation=pattern)


def matrices(band: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """What independent noise is multiplied with in all releases, and the inverse of that."""
    column = np.pad(special.binom(0.5, np.arange(band)) * (-1.0) ** np.arange(band), (0, rounds - band))
    spread = np.tril(linalg.toeplitz(column))
    return spread, np.linalg.inv(spread)


def patterns(rounds: int, apart: int, most: int) -> list[tuple[int, ...]]:
    """All sets of rounds, at most so many and so far apart."""
    return [
        chosen
        for count in range(1, most + 1)
        for chosen in itertools.combinations(range(rounds), count)
        if all(later - earlier >= apart for earlier, later in itertools.pairwise(chosen))
    ]


@in_one_test("rounds", [1, 5, 9])
@in_one_test("apart", [1, 2, 4])
@in_one_test("most", [1, 3, 9])
def test_no_pattern_and_no_updates_move_the_releases_further(rounds: int, apart: int, most: int) -> None:
    rng = np.random.default_rng(0)
    for band in range(1, rounds + 1):
        spread, inverse = matrices(band, rounds)
        pattern = Correlation(band, min(apart, rounds), min(most, -(-rounds // apart)), rounds)
        np.testing.assert_allclose(noise_factors(band), spread[:band, 0], rtol=1e-12)
        proven, reached = sensitivity(pattern, pattern.participations), 0.0
        for chosen in patterns(rounds, apart, most):
            alike = float(np.linalg.norm(inverse[:, chosen].sum(1)))
            updates = rng.normal(size=(len(chosen), 3))
            updates /= np.linalg.norm(updates, axis=1, keepdims=True)
            assert float(np.linalg.norm(inverse[:, chosen] @ updates)) <= alike * (1 + 1e-12)
            reached = max(reached, alike)
        assert proven == pytest.approx(reached, rel=1e-12)
        # As far as the releases themselves tell, in units of their own noise.
        whole = inverse[:, ::apart][:, : pattern.participations].sum(1)
        moved = spread @ whole
        covariance = spread @ spread.T
        assert math.sqrt(float(moved @ np.linalg.solve(covariance, moved))) == pytest.approx(proven, rel=1e-9)


@in_one_test("band", [2, 3, 17, 200])
def test_what_a_round_adds_to_later_ones_does_not_increase(band: int) -> None:
    """And is what the moments of the arcsine law say, before the band ends."""
    inverse = matrices(band, 200)[1][:, 0]
    assert np.all(np.diff(inverse) <= 0) and inverse[-1] > 0
    known = special.binom(2 * np.arange(band), np.arange(band)) / 4.0 ** np.arange(band)
    np.testing.assert_allclose(inverse[:band], known, rtol=1e-9)


JAX_PRIVACY = {
    (1, 10, 20, 200): 4.47213595499958,
    (8, 10, 20, 200): 7.6702254733402,
    (10, 10, 20, 200): 8.382099067376286,
    (4, 3, 5, 17): 3.858360192061909,
    (50, 1, 200, 200): 139.62271628045906,
    (20, 50, 3, 200): 2.675054784592697,
    (200, 7, 11, 200): 12.152237188617322,
}
"""jax_privacy 2.0.0: square roots of toeplitz.minsep_sensitivity_squared(inverse_coef(s, n), b, k, n), in float64."""


@pytest.mark.parametrize("case", JAX_PRIVACY)
def test_agrees_with_jax_privacy(case: tuple[int, int, int, int]) -> None:
    pattern = Correlation(*case)
    assert sensitivity(pattern, pattern.participations) == pytest.approx(JAX_PRIVACY[case], rel=1e-12)


@in_one_test("pattern", [(1, 1, 3000), (70, 30, 100), (2500, 1000, 3), (3001, 2999, 2)])
def test_many_rounds_agree_with_the_recursion(pattern: tuple[int, int, int]) -> None:
    """Which is an IIR filter: each round of C x is what the noise's shares of earlier ones leave."""
    band, apart, times = pattern
    taken = np.zeros(3001)
    taken[: apart * times : apart] = 1.0
    filtered = signal.lfilter([1.0], noise_factors(band), taken)
    assert sensitivity(Correlation(band, apart, times, 3001), times) == pytest.approx(np.linalg.norm(filtered), 1e-12)


@in_one_test("adjacency", ["replace-one", "zero-out"])
@in_one_test("unit", ["example", "update"])
@in_one_test("band", [1, 8])
def test_epsilon_is_that_of_one_normal_law(adjacency: AdjacencyName, unit: UnitName, band: int) -> None:
    """With a band of 1 that of central noise on as many rounds; a ceiling is for uploads, which have no noise."""
    pattern = Correlation(band, 10, 20, 200)
    mine = release(9.0, pattern, adjacency, unit)
    mu = (2 if adjacency == "replace-one" else 1) * JAX_PRIVACY[band, 10, 20, 200] / 9.0
    assert proven_epsilon(mine) == pytest.approx(gaussian_epsilon(DELTA, mu), rel=1e-9)
    assert membership_bound(mine, [0.01]).advantage == pytest.approx(2 * special.ndtr(mu / 2) - 1, rel=1e-9)
    assert ceilings(mine, [0.01])[0].gamma is None
    if band == 1 and unit == "update":
        central = Release("central", "update", "full", 1.0, 20, (9,), 9.0, DELTA, adjacency)
        assert proven_epsilon(central) == pytest.approx(proven_epsilon(mine), rel=1e-12)
    said = guarantee(mine)
    assert said.sampling == "full, at most every 10 rounds" and "20 times at most in 200 rounds" in said.notes[-1]
    assert f"band {band}" in said.theorem["epsilon"] and "Kalinin" in said.theorem["epsilon"]


def test_the_records_of_a_person_move_the_releases_as_many_times_as_far() -> None:
    """Two clients with one and three of its records; of whole updates each is one, however many records it has."""
    pattern = Correlation(8, 10, 20, 200)
    for unit, times in (("example", 4), ("update", 2)):
        mine = release(30.0, pattern, unit=unit)
        found = person([Share(mine, 1, 60), Share(mine, 3, 60)])
        mu = times * 2 * JAX_PRIVACY[8, 10, 20, 200] / 30.0
        assert found.epsilon == pytest.approx(gaussian_epsilon(DELTA, mu), rel=1e-9)


def test_calibration_reaches_the_target() -> None:
    pattern = Correlation(8, 10, 20, 200)
    sigma = calibrate(8.0, release(1.0, pattern))
    assert 7.99 <= proven_epsilon(release(sigma, pattern)) <= 8.0
    few = replace(release(sigma, pattern), participations=pattern.most(31))
    assert few.participations == 4 and proven_epsilon(few) < 4.0


@pytest.mark.parametrize(
    ("band", "apart", "rounds", "said"),
    [(9, 1, 8, "band = 9: .*from 1 to 8"), (0, 1, 8, "band = 0"), (1, 9, 8, "separation = 9"), (1, 1, 0, "rounds = 0")],
)
def test_patterns_that_there_are_not(band: int, apart: int, rounds: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Correlation(band, apart, 1, rounds)


def test_a_release_says_how_its_noise_is_correlated_or_has_none_that_is() -> None:
    with pytest.raises(InputError, match="over how many rounds its noise is correlated"):
        Release("correlated", "update", "full", 1.0, 1, (9,), 1.0, DELTA)
    with pytest.raises(InputError, match="none: its noise is not"):
        replace(release(1.0, Correlation(1, 1, 1, 1)), mechanism="central")
