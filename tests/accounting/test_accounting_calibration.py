"""Calibrated noise gives the target, from below, by the ledger's own figure."""

import itertools
import math
from dataclasses import replace

import pytest
import riskcal.analysis
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats

from fedpriv.accounting import (
    Release,
    analytic_sigma,
    calibrate,
    calibrate_ceiling,
    ceilings,
    classic_sigma,
    extended_sigma,
    guarantee,
    nominal_noise,
    release_with,
)
from fedpriv.accounting.proofs import NoProof
from fedpriv.core.errors import InputError
from fedpriv.core.registry import MECHANISMS
from tests.cases import in_one_test

SETTINGS = [("example", "shuffled"), ("example", "fixed"), ("example", "full"), ("update", "full")]
PARAMETER = {"gaussian": "sigma", "hgm": "sigma", "laplace": "scale", "vmf": "kappa"}
FULL = {"sampling": "full", "rate": 1.0, "participations": 1}


def epsilon_with(noise, delta, *, mechanism, sampling, rate, participations, dimensions=(1,), unit="example"):
    return guarantee(Release(mechanism, unit, sampling, rate, participations, dimensions, noise, delta)).epsilon


def check(target, delta, **options):
    noise = calibrate(target, release_with(1.0, delta, **options))
    assert target * (1 - 1e-3) <= epsilon_with(noise, delta, **options) <= target


@in_one_test("mechanism", ["gaussian", "hgm", "laplace"])
@pytest.mark.parametrize(("unit", "sampling"), SETTINGS)
@pytest.mark.parametrize(("target", "participations"), list(itertools.product([0.05, 1.0, 8.0, 500.0], [1, 300])))
def test_noise_reaches_the_target_from_below(mechanism, unit, sampling, target, participations):
    options = {"sampling": sampling, "rate": 0.05, "participations": participations, "unit": unit}
    check(target, 1e-5, mechanism=mechanism, **options)


@in_one_test(("target", "rate", "steps"), [(0.3, 0.01, 300), (3.0, 0.1, 10), (3.0, 1.0, 4)])
def test_sigma_reaches_the_target_under_poisson_sampling(target, rate, steps):
    check(target, 1e-5, mechanism="gaussian", sampling="poisson", rate=rate, participations=steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "rate", "steps", "delta"),
    [
        *((0.1, 0.001, 10_000, 1e-5), (1.0, 0.01, 10_000, 1e-5), (8.0, 0.3, 1_000, 1e-5), (100.0, 0.01, 10_000, 1e-5)),
        *((0.1, 0.3, 1_000, 1e-12), (1.0, 0.001, 10_000, 1e-12), (8.0, 0.01, 10_000, 1e-12)),
    ],
)
def test_sigma_over_long_poisson_runs(target, rate, steps, delta):
    check(target, delta, mechanism="gaussian", sampling="poisson", rate=rate, participations=steps)


@in_one_test(("target", "delta"), list(itertools.product([0.1, 1.0, 20.0], [1e-3, 1e-9])))
def test_sigma_of_one_update_is_the_analytic_one_at_twice_the_sensitivity(target, delta):
    sigma = calibrate(target, release_with(1.0, delta, mechanism="gaussian", unit="update", **FULL))
    assert sigma == pytest.approx(2 * analytic_sigma(target, delta), rel=1e-3)
    assert sigma >= 2 * analytic_sigma(target, delta) * (1 - 1e-9)


@pytest.mark.parametrize(("unit", "sampling"), [*SETTINGS, ("example", "poisson")])
@pytest.mark.parametrize(
    ("target", "dimensions"), [(0.5, (1,)), (1e4, (10_000,)), (0.5, (300, 12, 3600, 10)), (1e4, (300, 12, 3600, 10))]
)
def test_kappa_reaches_the_target_from_below(unit, sampling, target, dimensions):
    options = {"dimensions": dimensions, "sampling": sampling, "rate": 0.05, "participations": 20, "unit": unit}
    check(target, 1e-5, mechanism="vmf", **options)


@in_one_test("mechanism", PARAMETER)
@in_one_test("target", [0.0, -1.0, math.nan, math.inf])
def test_bad_targets_are_refused(mechanism, target):
    with pytest.raises(InputError, match="epsilon = "):
        calibrate(target, release_with(1.0, 1e-5, mechanism=mechanism, **FULL))


@in_one_test("mechanism", PARAMETER)
@in_one_test(
    ("change", "words"),
    [
        ({"rate": 0.0}, "rate = 0"),
        ({"rate": math.nan}, "rate = nan"),
        ({"participations": 0}, "participations = 0"),
        ({"participations": -3}, "participations = -3"),
        ({"sampling": "cyclic"}, "sampling = 'cyclic'"),
        ({"unit": "update"}, "unit = 'update'"),
    ],
)
def test_bad_settings_are_refused(mechanism, change, words):
    options = {"sampling": "fixed", "rate": 0.1, "participations": 5, **change}
    with pytest.raises(InputError, match=words):
        calibrate(1.0, release_with(1.0, 1e-5, mechanism=mechanism, **options))


@in_one_test("mechanism", PARAMETER)
@in_one_test("delta", [0.0, 1.0, math.nan])
def test_bad_delta_is_refused(mechanism, delta):
    with pytest.raises(InputError, match="delta = "):
        calibrate(1.0, release_with(1.0, delta, mechanism=mechanism, **FULL))


def test_only_mechanisms_with_noise_are_calibrated():
    # Noise on sums is calibrated in tests/accounting/test_accounting_trust.py.
    on_uploads = {name for name, each in MECHANISMS.items() if each.on_gradients and each.noise_at == "clients"}
    assert set(PARAMETER) == {name for name in on_uploads if MECHANISMS[name].proof() is not NoProof}
    with pytest.raises(InputError, match="mechanism = 'none': nothing is proven"):
        calibrate(1.0, release_with(1.0, 1e-5, mechanism="none", **FULL))
    with pytest.raises(InputError, match="mechanism = 'output': its amount is an epsilon already"):
        calibrate(1.0, release_with(1.0, 1e-5, mechanism="output", **FULL))


@in_one_test(
    ("mechanism", "target", "words"),
    [
        ("gaussian", 1e30, r"less noise than the least allowed \(sigma = 1e-09\)"),
        ("hgm", 1e30, r"less noise than the least allowed \(sigma = 1e-09\)"),
        ("laplace", 1e30, r"less noise than the least allowed \(scale = 1e-09\)"),
        ("vmf", 1e30, r"less noise than the least allowed \(kappa = 1e\+07\)"),
        ("gaussian", 1e-14, r"no sigma from 1e-09 to 1e\+12 reaches it"),
        ("hgm", 1e-14, r"no sigma from 1e-09 to 1e\+12 reaches it"),
        ("laplace", 1e-14, r"no scale from 1e-09 to 1e\+12 reaches it"),
        ("vmf", 1e-14, r"no kappa from 1e-12 to 1e\+07 reaches it"),
    ],
)
def test_targets_out_of_reach_are_refused(mechanism, target, words):
    with pytest.raises(InputError, match=words):
        calibrate(
            target, release_with(1.0, 1e-15, mechanism=mechanism, sampling="full", rate=1.0, participations=10**9)
        )


# ---- nominal ones ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mechanism", "expected"), [("vmf", 0.4), ("laplace", 1.25)])
def test_the_nominal_epsilon_of_pure_mechanisms(mechanism, expected):
    noise = nominal_noise(0.8, 1e-5, mechanism=mechanism)
    assert noise == expected
    options = {"mechanism": mechanism, "sampling": "full", "rate": 1.0, "participations": 7}
    found = guarantee(Release(unit="example", dimensions=(50,), noise=noise, delta=1e-5, **options))
    assert found.nominal_epsilon == 0.8


@in_one_test("mechanism", ["gaussian", "hgm"])
@in_one_test(
    ("calibration", "single"), [("analytic", analytic_sigma), ("extended", extended_sigma), ("classic", classic_sigma)]
)
def test_the_nominal_epsilon_of_one_gaussian_release(mechanism, calibration, single):
    sigma = nominal_noise(0.8, 1e-5, mechanism=mechanism, calibration=calibration)
    assert sigma == 2 * single(0.8, 1e-5)
    assert nominal_noise(0.8, 1e-5, mechanism=mechanism, calibration=calibration, sensitivity=1) == sigma / 2
    proven = epsilon_with(sigma, 1e-5, mechanism=mechanism, unit="update", **FULL)
    assert proven <= 0.8
    assert (proven == pytest.approx(0.8, rel=1e-6)) == (calibration == "analytic")


@in_one_test("mechanism", PARAMETER)
@in_one_test("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_bad_nominal_epsilons_are_refused(mechanism, epsilon):
    with pytest.raises(InputError, match="epsilon = "):
        nominal_noise(epsilon, 1e-5, mechanism=mechanism)


@in_one_test(
    ("epsilon", "delta", "calibration", "words"),
    [
        (1.5, 1e-5, "classic", "proven for epsilon <= 1"),
        (1.0, 0.9, "extended", "0.798"),
        (1.0, 2.0, "analytic", "delta"),
    ],
)
def test_what_a_calibration_does_not_cover_is_refused(epsilon, delta, calibration, words):
    with pytest.raises(InputError, match=words):
        nominal_noise(epsilon, delta, mechanism="gaussian", calibration=calibration)
    with pytest.raises(InputError, match="mechanism = 'none'"):
        nominal_noise(1.0, 1e-5, mechanism="none")


# ---- noise for a given risk -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mechanism", "sampling"), list(itertools.product(PARAMETER, ["full", "fixed", "poisson"])))
@pytest.mark.parametrize(("target", "guess", "participations"), [(0.05, 0.01, 50), (0.6, 0.5, 3_000)])
def test_noise_for_a_ceiling(mechanism, sampling, target, guess, participations):
    rate = 1.0 if sampling == "full" else 0.05
    run = {"mechanism": mechanism, "sampling": sampling, "rate": rate, "participations": participations}
    release = release_with(1.0, 1e-5, **run, dimensions=(1000, 70))

    noise = calibrate_ceiling(target, guess, release)

    found = ceilings(replace(release, noise=noise), [guess])[0].gamma
    assert found <= target
    parameter = MECHANISMS[mechanism].proof().parameter
    less = noise * (1.01 if parameter.least > parameter.most else 0.99)
    assert ceilings(replace(release, noise=less), [guess])[0].gamma > target


@in_one_test(("target", "guess", "count"), [(0.05, 0.01, 1), (0.05, 0.01, 10_000), (0.9, 0.1, 7)])
def test_normal_noise_for_a_ceiling_is_a_closed_form(target, guess, count):
    release = release_with(1.0, 1e-5, mechanism="gaussian", sampling="full", rate=1.0, participations=count)
    exact = math.sqrt(count) / (stats.norm.ppf(target) - stats.norm.ppf(guess))
    assert exact <= calibrate_ceiling(target, guess, release) <= exact * 1.001


@in_one_test(("sigma", "rate", "count"), [(0.8, 0.01, 500), (2.0, 0.1, 100)])
def test_poisson_noise_for_a_ceiling_is_that_of_riskcal(sigma, rate, count):
    """Its trade-off of dp-accounting's pair where the example goes, at a false positive rate of the guess."""
    steps = pld.from_gaussian_mechanism(sigma, sampling_prob=rate).self_compose(count)
    target = 1 - float(riskcal.analysis.get_beta_from_pld(steps, 0.01))
    run = {"mechanism": "gaussian", "sampling": "poisson", "rate": rate, "participations": count}

    assert calibrate_ceiling(target, 0.01, release_with(1.0, 1e-5, **run)) == pytest.approx(sigma, rel=5e-3)


@in_one_test("rate", [0.01, 0.5])
@in_one_test("sigma", [1e-9, 1e-8, 1e-6, 1e-4, 1e-2])
def test_noise_that_hides_nothing_tells_who_took_part(rate, sigma):
    """With the example a step tells it, and without it no step depends on it."""
    release = Release("gaussian", "example", "poisson", rate, 10, (1,), sigma, 1e-5)
    (ceiling,) = ceilings(release, [0.01])
    assert ceiling.gamma == pytest.approx(1 - (1 - rate) ** 10 * 0.99, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "target", "guess", "words"),
    [
        ({}, 0.01, 0.01, "ceiling = 0.01: allowed is above the guess, 0.01, and below 1"),
        ({}, 1.0, 0.01, "ceiling = 1: allowed is above the guess"),
        ({}, 0.05, 0.0, "guess = 0: allowed is between 0 and 1"),
        ({"participations": 0}, 0.05, 0.01, "without a participation there is nothing to calibrate"),
        (
            {"mechanism": "central", "unit": "update"},
            0.05,
            0.01,
            r"central: no ceiling: .*; allowed: gaussian, hgm, laplace, vmf",
        ),
        ({"sampling": "poisson", "rate": 0.01}, 0.05, 0.01, "so high that it needs less noise than the least allowed"),
        ({"mechanism": "laplace", "participations": 10**15}, 0.0100000001, 0.01, "no scale from 1e-09 to 1e\\+12"),
    ],
)
def test_ceilings_that_no_noise_gives(options, target, guess, words):
    run = {"mechanism": "gaussian", **FULL, **options}
    with pytest.raises(InputError, match=words):
        calibrate_ceiling(target, guess, release_with(1.0, 1e-5, **run))
