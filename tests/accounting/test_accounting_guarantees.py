"""The ledger's line for every mechanism, unit and sampling: figures by hand, order of sizes, words, and honesty."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize, special, stats

from fedpriv.accounting import (
    ORDERS,
    Release,
    amplified_pure,
    amplified_rdp,
    gaussian_epsilon,
    gaussian_rdp,
    guarantee,
    guarantees,
    proven_epsilon,
    rdp_to_epsilon,
    running_epsilon,
    vmf_rdp,
)
from fedpriv.accounting.composition import pure_composition_epsilon
from fedpriv.accounting.proofs import Claim, NoProof
from fedpriv.core.errors import InputError
from fedpriv.core.registry import MECHANISMS
from tests.cases import in_one_test

LENET = (300, 12, 3600, 12, 3600, 12, 76800, 10)
FIGURES = ("nominal_epsilon", "pure_epsilon", "epsilon")


def vmf(sampling="shuffled", kappa=2.0, participations=3, dimensions=(1000,), rate=0.1, unit="example", delta=1e-5):
    return Release("vmf", unit, sampling, rate, participations, dimensions, kappa, delta)


def gaussian(sampling="shuffled", sigma=2.0, participations=3, rate=0.1, unit="example", delta=1e-5):
    return Release("gaussian", unit, sampling, rate, participations, (1000,), sigma, delta)


def zero_out(sampling="poisson", **options):
    return replace(gaussian(sampling, **options), adjacency="zero-out")


def hgm(sampling="shuffled", **options):
    return replace(gaussian(sampling, **options), mechanism="hgm")


def laplace(sampling="shuffled", scale=2.0, participations=3, rate=0.1, unit="example", delta=1e-5):
    return Release("laplace", unit, sampling, rate, participations, (1000,), scale, delta)


BUILDS = [gaussian, hgm, laplace, vmf]
EXAMPLE = [("example", sampling) for sampling in ("shuffled", "fixed", "poisson", "full")]
EVERY = [*EXAMPLE, ("update", "full")]


@in_one_test(("unit", "sampling"), EVERY)
def test_nothing_is_proven_without_a_mechanism(unit, sampling):
    found = guarantee(Release("none", unit, sampling, 0.1, 3, (10,), None, 1e-5))
    assert (found.nominal_epsilon, found.pure_epsilon, found.epsilon) == (None, None, None)
    assert "without noise" in found.theorem["epsilon"]
    assert found.delta == 1e-5


@in_one_test(("unit", "sampling"), EVERY)
@in_one_test("build", BUILDS)
def test_every_figure_comes_with_its_words(build, unit, sampling):
    found = guarantee(build(sampling=sampling, unit=unit))
    assert set(found.theorem) == set(FIGURES)
    assert all(found.theorem[name] for name in FIGURES)
    assert found.participations == 3
    assert found.sampling.startswith(sampling)
    assert found.adjacency.startswith("replace-one")
    assert ("whole update" in found.adjacency) == (unit == "update")


@in_one_test(("unit", "sampling"), EVERY)
@in_one_test("build", BUILDS)
def test_no_participation_costs_nothing(build, unit, sampling):
    found = guarantee(build(sampling=sampling, unit=unit, participations=0))
    assert (found.pure_epsilon, found.epsilon) == (0.0, 0.0)
    assert "no participation" in found.theorem["epsilon"]


# ---- vmf ------------------------------------------------------------------------------------------------------------


@in_one_test("dimensions", [(1000,), (1,), LENET])
@in_one_test(("unit", "sampling"), [pair for pair in EVERY if pair[1] not in ("fixed", "poisson")])
@pytest.mark.parametrize("participations", [1, 30])
def test_vmf_without_amplification(dimensions, unit, sampling, participations):
    kappa, blocks = 1.5, len(dimensions)
    found = guarantee(vmf(sampling, kappa, participations, dimensions, 0.1, unit))
    rdp = participations * np.sum([vmf_rdp(ORDERS, dimension, kappa) for dimension in dimensions], axis=0)
    assert found.pure_epsilon == pytest.approx(2 * kappa * blocks * participations, rel=1e-14)
    assert found.nominal_epsilon == pytest.approx(2 * kappa * math.sqrt(blocks), rel=1e-14)
    composed = pure_composition_epsilon(2 * kappa, blocks * participations, 1e-5)
    running = running_epsilon(vmf(sampling, kappa, participations, dimensions, 0.1, unit))
    assert running == pytest.approx(min(found.pure_epsilon, rdp_to_epsilon(ORDERS, rdp, 1e-5), composed), rel=1e-9)
    assert 0.9 * running <= found.epsilon <= running
    assert "nominal" in found.theorem["nominal_epsilon"]


@in_one_test("dimensions", [(1000,), (1,), LENET])
@pytest.mark.parametrize(("kappa", "rate"), list(itertools.product([0.01, 1.5, 1e3], [1e-3, 0.2, 1.0])))
def test_vmf_with_fixed_size_sampling(dimensions, kappa, rate):
    once = 2 * kappa * len(dimensions)
    found = guarantee(vmf("fixed", kappa, 40, dimensions, rate))
    unsampled = guarantee(vmf("full", kappa, 40, dimensions, rate))
    base = lambda orders: sum(vmf_rdp(orders, dimension, kappa) for dimension in dimensions)  # noqa: E731
    renyi = rdp_to_epsilon(ORDERS, 40 * amplified_rdp(ORDERS, base, once, rate), 1e-5)
    assert found.pure_epsilon == pytest.approx(40 * amplified_pure(once, rate), rel=1e-13)
    composed = pure_composition_epsilon(amplified_pure(once, rate), 40, 1e-5)
    blockwise = pure_composition_epsilon(2 * kappa, 40 * len(dimensions), 1e-5) if rate == 1 else math.inf
    running = running_epsilon(vmf("fixed", kappa, 40, dimensions, rate))
    assert running == pytest.approx(min(found.pure_epsilon, renyi, composed, blockwise), rel=1e-9)
    assert found.epsilon <= min(running, unsampled.epsilon)
    assert found.pure_epsilon <= unsampled.pure_epsilon
    assert found.nominal_epsilon == unsampled.nominal_epsilon


def test_the_smaller_theorem_is_reported_and_named():
    small = guarantee(vmf(kappa=1e-3, participations=1, dimensions=(2,), delta=1e-15))
    assert small.epsilon == small.pure_epsilon
    assert small.theorem["epsilon"].startswith("the pure figure")
    wide = guarantee(vmf(kappa=50.0, participations=100, dimensions=(61706,)))
    assert wide.epsilon < 0.01 * wide.pure_epsilon
    assert wide.theorem["epsilon"].startswith("VMF distributions around opposite directions")
    rare = guarantee(vmf(kappa=50.0, participations=100, dimensions=(61706,), delta=1e-21))
    assert rare.theorem["epsilon"].startswith("Renyi")


def test_signs_of_single_coordinates_are_composed_optimally():
    """A VMF draw in one dimension is randomised response: no theorem can give less than its exact composition."""
    found = guarantee(vmf(kappa=0.05, participations=4, dimensions=(1,) * 200))
    assert found.epsilon == pure_composition_epsilon(0.1, 800, 1e-5)
    assert "Kairouz" in found.theorem["epsilon"]


def enumerated_epsilon(keep, rate, steps, delta):
    """T steps, of which Binomial(T, q) release a randomised response, and it is seen which: by all that can be seen."""
    used = np.repeat(np.arange(steps + 1), np.arange(steps + 1) + 1)
    kept = np.concatenate([np.arange(number + 1) for number in range(steps + 1)])
    share = stats.binom.pmf(used, steps, rate)
    first, second = (share * stats.binom.pmf(kept, used, p) for p in (keep, 1 - keep))

    def excess(epsilon):
        return np.sum(np.maximum(first - math.exp(epsilon) * second, 0)) - delta

    return 0.0 if excess(0.0) <= 0 else optimize.brentq(excess, 0, steps * math.log(keep / (1 - keep)) + 1, xtol=1e-12)


@in_one_test(("kappa", "rate"), list(itertools.product([0.05, 0.5, 2.0], [0.01, 0.3, 0.9])))
@in_one_test("steps", [1, 5, 40])
def test_poisson_batches_of_signs_agree_with_enumeration(kappa, rate, steps):
    found = guarantee(vmf("poisson", kappa, steps, (1,), rate)).epsilon
    exact = enumerated_epsilon(special.expit(2 * kappa), rate, steps, 1e-5)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 3e-4)


def test_poisson_batches_of_directions_count_participations():
    """The specification's run: about as 5 to 12 participations, where every one of 100 steps counted before."""
    found, full = guarantee(vmf("poisson", 100.0, 100, (14818,), 0.05)), guarantee(vmf("full", 100.0, 100, (14818,)))
    assert found.epsilon == pytest.approx(33.67, rel=2e-3) and f"{found.epsilon:.1f}" == "33.7"
    assert full.epsilon == pytest.approx(204.16, rel=2e-3)
    fewer, more = (guarantee(vmf("full", 100.0, count, (14818,))).epsilon for count in (5, 12))
    assert fewer == pytest.approx(21.75, rel=2e-3) and more == pytest.approx(39.72, rel=2e-3)
    assert fewer < found.epsilon < more
    assert "reveal them" in found.theorem["epsilon"] and found.pure_epsilon == full.pure_epsilon
    assert any("how many steps use an example" in note for note in found.notes)


@pytest.mark.parametrize("build", [vmf, laplace])
@pytest.mark.parametrize("noise", [0.03, 1.0, 40.0])
@in_one_test(("rate", "steps"), list(itertools.product([1e-6, 0.02, 0.5, 0.999], [1, 30, 3000])))
@pytest.mark.parametrize("delta", [1e-2, 1e-12])
def test_poisson_batches_never_cost_more_than_all_steps(build, noise, rate, steps, delta):
    found, full = (build(sampling, noise, steps, rate=rate, delta=delta) for sampling in ("poisson", "full"))
    assert guarantee(found).epsilon <= guarantee(full).epsilon
    assert running_epsilon(found) <= running_epsilon(full)
    assert guarantee(found).epsilon <= running_epsilon(found)
    every = replace(found, rate=1.0)
    assert guarantee(every).epsilon == guarantee(full).epsilon


@in_one_test("sampling", ["shuffled", "fixed", "poisson"])
def test_zero_kappa_gives_zero(sampling):
    found = guarantee(vmf(sampling, kappa=0.0))
    assert (found.nominal_epsilon, found.pure_epsilon, found.epsilon) == (0.0, 0.0, 0.0)


def test_the_resemblance_is_a_note_and_labelled():
    (note,) = [text for text in guarantee(vmf(kappa=10.0, dimensions=(10000,))).notes if "sqrt(B)" in text]
    assert note.startswith("Heuristic, not a guarantee")
    assert "here 10 sqrt(B)" in note


@in_one_test("sampling", ["shuffled", "fixed"])
@in_one_test("kappa", [1e-9, 1e7])
@in_one_test("dimensions", [(1,), (2, 10**8), LENET])
def test_extreme_vmf_settings_stay_finite(sampling, kappa, dimensions):
    found = guarantee(vmf(sampling, kappa, 10_000, dimensions, rate=1e-6))
    assert 0 <= found.epsilon <= found.pure_epsilon < math.inf


# ---- gaussian -------------------------------------------------------------------------------------------------------


@in_one_test(("unit", "sampling"), [("example", "shuffled"), ("example", "full"), ("update", "full")])
@in_one_test("participations", [1, 30])
def test_gaussian_without_sampling_is_one_release_with_twice_the_sensitivity(unit, sampling, participations):
    found = guarantee(gaussian(sampling, 2.0, participations, 0.1, unit))
    assert found.epsilon == gaussian_epsilon(1e-5, 2 * math.sqrt(participations) / 2.0)
    assert found.pure_epsilon is None
    assert "unbounded" in found.theorem["pure_epsilon"]


@in_one_test(("sigma", "rate"), list(itertools.product([0.3, 2.0, 30.0], [1e-3, 0.2, 1.0])))
def test_gaussian_with_fixed_size_sampling(sigma, rate):
    found = guarantee(gaussian("fixed", sigma, 40, rate))
    unsampled = gaussian_epsilon(1e-5, 2 * math.sqrt(40) / sigma)
    step = amplified_rdp(ORDERS, lambda orders: gaussian_rdp(orders, sigma / 2), math.inf, rate)
    renyi = rdp_to_epsilon(ORDERS, 40 * step, 1e-5) if rate < 1 else math.inf
    assert running_epsilon(gaussian("fixed", sigma, 40, rate)) == min(unsampled, renyi)
    assert found.epsilon <= min(unsampled, renyi)
    assert ("Thm 9" in found.theorem["epsilon"]) == (found.epsilon < unsampled)


@in_one_test("participations", [0, 1, 30])
def test_poisson_says_what_it_is_under_the_other_adjacency(participations):
    replaced, zeroed = (
        guarantee(gaussian("poisson", participations=participations)),
        guarantee(zero_out(participations=participations)),
    )
    assert zeroed.epsilon < replaced.epsilon or participations == 0
    assert replaced.adjacency.startswith("replace-one:")
    assert zeroed.adjacency.startswith("zero-out:") and "number of examples is public" in zeroed.adjacency
    for own, other, name in ((replaced, zeroed, "zero-out"), (zeroed, replaced, "replace-one")):
        (note,) = [text for text in own.notes if text.startswith("Under ")]
        assert note.startswith(f"Under {name} ") and f"epsilon is {other.epsilon:.4g}:" in note


@in_one_test(("sampling", "rate"), [("poisson", 0.01), ("poisson", 1.0), ("fixed", 0.01)])
def test_amplification_by_poisson_batches_says_what_it_takes_for_granted(sampling, rate):
    found = guarantee(replace(gaussian(sampling), rate=rate))
    assert any("rounding" in note for note in found.notes) == (sampling == "poisson" and rate < 1)


@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_zero_out_costs_less_than_one_clipped_gradient_without_sampling(rate):
    found = guarantee(replace(zero_out(sigma=3.0, participations=50), rate=rate))
    unsampled = gaussian_epsilon(1e-5, math.sqrt(50) / 3.0)
    assert found.epsilon == unsampled if rate == 1 else found.epsilon < 0.2 * unsampled


@in_one_test(("unit", "sampling"), EVERY)
def test_hgm_has_the_gaussians_figures_and_its_own_words(unit, sampling):
    own, plain = guarantee(hgm(sampling, unit=unit)), guarantee(gaussian(sampling, unit=unit))
    assert (own.nominal_epsilon, own.pure_epsilon, own.epsilon) == (None, None, plain.epsilon)
    assert (own.adjacency, own.sampling) == (plain.adjacency, plain.sampling)
    assert "|x / sqrt(K r)|" in own.theorem["epsilon"]
    assert any("r, the shares of the noise, must be public" in note for note in own.notes)
    assert set(plain.notes) < set(own.notes)


# ---- while a run goes on --------------------------------------------------------------------------------------------


@in_one_test(("unit", "sampling"), EVERY)
@in_one_test("build", BUILDS)
@pytest.mark.parametrize(("participations", "times"), [(0, 1.0), (1, 7.0), (500, 1.3)])
def test_the_running_figure_is_never_below_the_final_one_and_not_far(build, unit, sampling, participations, times):
    release = build(sampling, unit=unit, participations=participations, rate=0.01)
    running, final = running_epsilon(release), guarantee(release).epsilon
    assert final <= running <= times * final


def test_the_running_figure_without_a_mechanism_is_infinite():
    release = Release("none", "example", "full", 1.0, 3, (10,), None, 1e-5)
    assert running_epsilon(release) == math.inf
    assert running_epsilon(replace(release, participations=0)) == math.inf


@in_one_test("sampling", ["shuffled", "fixed", "poisson"])
@in_one_test("build", BUILDS)
def test_the_running_figure_never_falls(build, sampling):
    figures = [running_epsilon(build(sampling, participations=count, rate=0.01)) for count in range(60)]
    assert figures[0] == 0
    assert np.all(np.diff(figures) >= 0)


# ---- order of sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "sampling"), EVERY)
def test_more_of_anything_costs_more(unit, sampling):
    for build, change in (
        (vmf, {"noise": 2.2}),
        (gaussian, {"noise": 1.8}),
        (hgm, {"noise": 1.8}),
        (laplace, {"noise": 1.8}),
    ):
        base = build(sampling, unit=unit)
        found = guarantee(base).epsilon
        assert found < guarantee(replace(base, participations=4)).epsilon
        assert found < guarantee(replace(base, **change)).epsilon
        assert found < guarantee(replace(base, delta=1e-6)).epsilon
        assert found <= guarantee(replace(base, rate=0.2)).epsilon


@in_one_test("kappa", [0.01, 1.0, 30.0])
def test_more_blocks_cost_more(kappa):
    figures = [guarantee(vmf(kappa=kappa, dimensions=(1200 // m,) * m)) for m in (1, 2, 3, 8, 50, 1200)]
    assert np.all(np.diff([found.epsilon for found in figures]) > 0)
    assert np.all(np.diff([found.pure_epsilon for found in figures]) > 0)
    assert all(found.epsilon <= found.pure_epsilon for found in figures)


def test_every_mechanism_is_tested_here():
    """But for those on convex models and those with noise on sums, which have files of their own."""
    on_gradients = {name for name, each in MECHANISMS.items() if each.on_gradients and each.noise_at == "clients"}
    assert {build().mechanism for build in BUILDS} == {name for name in on_gradients if is_proven(name)}


def is_proven(mechanism):
    return MECHANISMS[mechanism].proof() is not NoProof


# ---- input ----------------------------------------------------------------------------------------------------------


@in_one_test(
    ("change", "words"),
    [
        (
            {"mechanism": "cauchy"},
            "cauchy': allowed is .*gaussian, .*laplace, none, ",
        ),
        ({"unit": "person"}, "unit = 'person'"),
        ({"sampling": "cyclic"}, "sampling = 'cyclic'"),
        ({"unit": "update"}, "with unit = 'update' allowed is full"),
        ({"adjacency": "add-one"}, "adjacency = 'add-one': allowed is replace-one, zero-out"),
        (
            {"adjacency": "zero-out"},
            "adjacency = 'zero-out': with mechanism = 'vmf' and sampling = 'shuffled' allowed is",
        ),
        (
            {"adjacency": "zero-out", "sampling": "poisson"},
            "with mechanism = 'vmf' and sampling = 'poisson' allowed is",
        ),
        (
            {"adjacency": "zero-out", "mechanism": "gaussian", "noise": 1.0},
            "mechanism = 'gaussian' and sampling = 'shuf",
        ),
        ({"rate": 0.0}, "rate = 0"),
        ({"rate": 1.1}, "rate = 1.1"),
        ({"rate": math.nan}, "rate = nan"),
        ({"participations": -1}, "participations = -1"),
        ({"participations": 2.5}, "participations = 2.5"),
        ({"participations": True}, "participations = true"),
        ({"dimensions": ()}, "dimensions"),
        ({"dimensions": (5, 0)}, "dimensions"),
        ({"noise": None}, "kappa = None"),
        ({"noise": -1.0}, "kappa = -1"),
        ({"noise": 1.1e7}, "allowed is from 0 to 1e[+]07"),
        ({"noise": math.nan}, "kappa = nan"),
        ({"delta": 0.0}, "delta = 0"),
        ({"delta": 1.0}, "delta = 1"),
        ({"delta": math.nan}, "delta = nan"),
        ({"mechanism": "gaussian", "noise": None}, "sigma = None"),
        ({"mechanism": "gaussian", "noise": 0.0}, "sigma = 0"),
        ({"mechanism": "gaussian", "noise": math.inf}, "sigma = inf"),
        ({"mechanism": "gaussian", "noise": math.nan}, "sigma = nan"),
        ({"mechanism": "hgm", "noise": None}, "sigma = None"),
        ({"mechanism": "hgm", "noise": math.nan}, "sigma = nan"),
        ({"mechanism": "laplace", "noise": None}, "scale = None"),
        ({"mechanism": "laplace", "noise": 0.0}, "scale = 0"),
        ({"mechanism": "laplace", "noise": 2e12}, "allowed is from 1e-09 to 1e[+]12"),
        ({"mechanism": "laplace", "noise": math.nan}, "scale = nan"),
    ],
)
def test_bad_releases_are_refused_in_one_line(change, words):
    with pytest.raises(InputError, match=words) as caught:
        replace(vmf(), **change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("claimed", [-1e-9, -math.inf, math.nan, None, "3"])
@pytest.mark.parametrize("figure", ["nominal", "pure", "best"])
def test_a_proof_of_somebody_else_that_claims_no_epsilon_is_named(monkeypatch, figure, claimed):
    class Optimist(NoProof):
        def pure(self):
            return Claim(claimed if figure == "pure" else 1.0, "trust me")

        def nominal(self):
            return Claim(claimed if figure == "nominal" else 1.0, "trust me")

        def cheap_claims(self):
            return [Claim(claimed if figure == "best" else 1.0, "trust me")]

        def best(self):
            return self.cheap_claims()[0]

    monkeypatch.setattr(guarantees, "_proof", Optimist)
    ask = [guarantee, proven_epsilon, running_epsilon] if figure == "best" else [guarantee]
    for question in ask:
        with pytest.raises(InputError, match=r"mechanism vmf: the proof .*Optimist claims epsilon = .* \(trust me\)"):
            question(vmf())


def test_numpy_numbers_are_numbers():
    release = vmf(participations=np.int64(3), dimensions=(np.int64(1000),), kappa=np.float64(2.0))
    found = guarantee(release)
    assert found == guarantee(vmf())
    assert type(found.participations) is int


@in_one_test("participations", [1, 30])
@in_one_test("dimension", [2, 15_826, 4_206_602])
@in_one_test("kappa", [1e-3, 1.0, 1e3, 1e5, 1e6, 1e7])
def test_any_concentration_has_a_figure_at_most_its_pure_one(kappa, dimension, participations):
    """Next to no noise too, where losses are so large that their exponentials overflow."""
    found = guarantee(vmf(participations=participations, dimensions=(dimension,), kappa=kappa))
    assert found.pure_epsilon == pytest.approx(2 * kappa * participations)
    assert 0 <= found.epsilon <= found.pure_epsilon
