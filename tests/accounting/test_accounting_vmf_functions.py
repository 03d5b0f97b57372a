"""log M_K and A_K against mpmath, against integrals of the cosine law, and across the borders of their formulas."""

import mpmath
import numpy as np
import pytest
from scipy import integrate, special
from vmf_exact import exact_log_mgf

from fedpriv.accounting import log_mgf, mean_resultant_length
from tests.cases import in_one_test

DIMENSIONS = [1, 2, 3, 4, 5, 10, 30, 49, 50, 51, 100, 1000, 15826, 10**6, 10**8]
CONCENTRATIONS = [0.0, 1e-6, 1e-3, 1.0, 50.0, 60.0, 500.0, 9.9e3, 1.1e4, 1e6, 1e7, 1e13]


@in_one_test("dimension", DIMENSIONS)
@pytest.mark.parametrize("k", CONCENTRATIONS)
def test_log_mgf_agrees_with_mpmath(dimension, k):
    assert float(log_mgf(dimension, k)) == pytest.approx(float(exact_log_mgf(dimension, k)), rel=1e-12, abs=0)


@pytest.mark.parametrize("dimension", [1, 2, 5, 49, 50, 1000, 10**6, 10**8])
@in_one_test("k", CONCENTRATIONS)
def test_mean_resultant_length_agrees_with_mpmath(dimension, k):
    with mpmath.workdps(40):
        if dimension == 1:
            expected = mpmath.tanh(mpmath.mpf(k))
        else:  # I_{nu+1} / I_nu, written with M of two dimensions more
            upper, lower = exact_log_mgf(dimension + 2, k), exact_log_mgf(dimension, k)
            expected = mpmath.mpf(k) / dimension * mpmath.exp(upper - lower)
    assert float(mean_resultant_length(dimension, k)) == pytest.approx(float(expected), rel=1e-10, abs=0)


@in_one_test("dimension", [3, 5, 10, 100])
@in_one_test("k", [0.3, 5.0, 50.0])
def test_both_agree_with_integrals_of_the_cosine_law(dimension, k):
    log_weight = -special.betaln(0.5, (dimension - 1) / 2)

    def density(t):
        return np.exp(k * (t - 1) + (dimension - 3) / 2 * np.log1p(-t * t) + log_weight)

    mass = integrate.quad(density, -1, 1, epsabs=0, epsrel=1e-11, limit=200)[0]
    moment = integrate.quad(lambda t: t * density(t), -1, 1, epsabs=0, epsrel=1e-11, limit=200)[0]
    assert float(log_mgf(dimension, k)) == pytest.approx(np.log(mass) + k, rel=1e-9)
    assert float(mean_resultant_length(dimension, k)) == pytest.approx(moment / mass, rel=1e-9)


@in_one_test("dimension", [2, 3, 7, 48, 49, 50, 51, 52, 60, 300, 4097, 10**7])
def test_no_step_where_one_formula_hands_over_to_the_next(dimension):
    """The derivative of log M is A, so neighbouring values differ by A dk: on a fine grid over every border."""
    nu = dimension / 2 - 1
    border = 2 * np.sqrt(30 * (30 + nu))
    for centre in (border, 1e4):
        k = centre * (1 + np.linspace(-1e-3, 1e-3, 41))
        gains = np.diff(log_mgf(dimension, k))
        slopes = mean_resultant_length(dimension, (k[1:] + k[:-1]) / 2)
        np.testing.assert_allclose(gains, slopes * np.diff(k), rtol=2e-8)


@in_one_test("dimension", [1, 2, 9, 200, 10**8])
def test_bounds(dimension):
    k = np.geomspace(1e-8, 1e13, 500)
    values, lengths = log_mgf(dimension, k), mean_resultant_length(dimension, k)
    assert np.all(np.diff(values) > 0)
    assert np.all(np.diff(lengths) >= -1e-12)
    assert np.all(values <= log_mgf(1, k) * (1 + 1e-14))
    assert np.all(lengths <= np.minimum(k * (1 + 1e-12), 1))


def test_keeps_the_shape_of_k():
    assert log_mgf(5, 1.0).shape == ()
    assert log_mgf(5, np.ones((2, 3))).shape == (2, 3)
    assert mean_resultant_length(1, []).shape == (0,)


@in_one_test("function", [log_mgf, mean_resultant_length])
@in_one_test(("dimension", "k"), [(0, 1.0), (3, -1.0), (3, np.nan), (3, np.inf), (3, [1.0, -1e-9])])
def test_refuses_what_it_cannot_compute(function, dimension, k):
    with pytest.raises(ValueError):
        function(dimension, k)
