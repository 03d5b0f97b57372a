"""What is proven about a person over several clients, against exact deltas of the worst groups."""

import itertools
import math
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy

from fedpriv.accounting import guarantee, release_with
from fedpriv.accounting.people import Share, person, together
from fedpriv.core.errors import InputError

DELTA = 1e-5


def share(records: int, examples: int | None = None, **changes: Any) -> Share:
    given: dict[str, Any] = {"mechanism": "gaussian", "sampling": "full", "rate": 1.0, "participations": 4}
    noise, law = changes.pop("noise", 6.0), changes.pop("law", None)
    return Share(replace(release_with(noise, DELTA, **(given | changes)), law=law), records, examples)


def normal_delta(mu: mpmath.mpf, epsilon: float | None) -> float:
    """Balle and Wang 2018, Theorem 8, in 40 digits."""
    with mpmath.workdps(40):
        first, second = (mpmath.ncdf(sign * mu / 2 - epsilon / mu) for sign in (1, -1))
        return float(first - mpmath.exp(epsilon) * second)


def test_normal_noise_adds_up_as_squares() -> None:
    """Every client has its own noise, participations and records; of shuffled data all may be in one batch."""
    for name, sampling in itertools.product(("gaussian", "hgm"), ("full", "shuffled")):
        clients = [(6.0, 4, 3), (9.0, 1, 1), (12.0, 7, 5)]
        shares = [
            share(k, noise=sigma, participations=count, mechanism=name, sampling=sampling)
            for sigma, count, k in clients
        ]
        mu = mpmath.sqrt(sum(count * (mpmath.mpf(2) * k / sigma) ** 2 for sigma, count, k in clients))
        found = person(shares)
        assert normal_delta(mu, found.epsilon) == pytest.approx(DELTA, rel=1e-6)
        assert (found.records, found.pure_epsilon) == ((5, 3, 1), None)


def test_one_clients_releases_that_differ_are_composed() -> None:
    """Normal ones exactly; pure ones no worse than added; of one kind they are one with all participations."""
    kinds = [share(1, noise=sigma, participations=count).release for sigma, count in ((6.0, 4), (9.0, 1), (6.0, 2))]
    found, mu = together(kinds), mpmath.sqrt(6 * (mpmath.mpf(2) / 6) ** 2 + (mpmath.mpf(2) / 9) ** 2)
    assert normal_delta(mu, found.epsilon) == pytest.approx(DELTA, rel=1e-6)
    assert (found.participations, found.sampling, found.pure_epsilon) == (7, "full", None)
    assert together(kinds[::2]) == guarantee(share(1, participations=6).release)
    laplace = together([share(1, mechanism="laplace", noise=scale, participations=1).release for scale in (4.0, 8.0)])
    assert laplace.pure_epsilon == pytest.approx(2 / 4 + 2 / 8) and 0 < (laplace.epsilon or 0) <= laplace.pure_epsilon


def test_noise_on_a_sum_is_shared_by_all_clients_of_a_person() -> None:
    shares = [share(9, mechanism="central", unit="update", participations=count) for count in (4, 2, 4)]
    mu = 3 * mpmath.mpf(2) / 6 * 2
    assert normal_delta(mu, person(shares).epsilon) == pytest.approx(DELTA, rel=1e-6)


def test_an_update_is_one_unit_whatever_it_holds() -> None:
    assert person([share(50, unit="update")]).epsilon == person([share(1, unit="update")]).epsilon
    assert person([share(50, participations=0)]).epsilon == 0
    assert (person([share(3, noise=1e-9, sampling="poisson", rate=0.1)]).epsilon or math.inf) > 1e6


def test_draws_of_one_number_are_randomised_response() -> None:
    """Each record has its own bits, whose sum is binomial: delta of k T bits is a finite sum."""
    kappa, bits = 0.2, (3 * 4 + 2 * 4)
    shares = [share(k, mechanism="vmf", noise=kappa, dimensions=(1,)) for k in (3, 2)]
    same = np.arange(bits + 1)
    keep = 1 / (1 + math.exp(-2 * kappa))
    p, q = scipy.stats.binom(bits, keep).pmf(same), scipy.stats.binom(bits, 1 - keep).pmf(same)
    epsilon = person(shares).epsilon
    assert epsilon is not None
    assert np.maximum(p - math.exp(epsilon) * q, 0).sum() <= DELTA
    assert np.maximum(p - math.exp(0.995 * epsilon) * q, 0).sum() > DELTA
    assert person(shares).pure_epsilon == pytest.approx(2 * kappa * bits)


def mixture_delta(law: Any, units: int, sigma: float, epsilon: float, ways: tuple[int, int]) -> float:
    """One step of normal noise whose batch holds M records, moved by M times each of two numbers: by quadrature."""
    x = np.linspace(-12 * sigma - 2 * units, 12 * sigma + 2 * units, 20_001)
    members = np.arange(units + 1)
    first, second = (law.pmf(members) @ scipy.stats.norm(way * members[:, None], sigma).pdf(x) for way in ways)
    return float(np.trapezoid(np.maximum(first - math.exp(epsilon) * second, 0), x))


@pytest.mark.parametrize("case", ["poisson", "poisson, zero-out", "fixed"])
def test_a_sampled_group_is_never_below_the_truth_of_opposite_gradients(case: str) -> None:
    """In batches of a fixed size other examples take the place of absent ones; they are zero here."""
    sampling, _, adjacency = case.partition(", ")
    given = {"sampling": sampling, "adjacency": adjacency or "replace-one", "participations": 1}
    ways = ((1, 0), (0, 1)) if adjacency else ((1, -1),)
    # With Poisson batches it is the truth, but for groups so large that their members in a batch are rounded up.
    for units, sigma, rate, share_of_it in ((2, 1.5, 0.1, 0.99), (5, 2.0, 0.02, 0.99), (40, 8.0, 0.25, 0.9)):
        found = person([share(units, 200, noise=sigma, rate=rate, **given)])
        binomial = scipy.stats.binom(units, rate)
        law = binomial if sampling == "poisson" else scipy.stats.hypergeom(200, units, round(200 * rate))

        def truth(epsilon: float, law: Any = law, units: int = units, sigma: float = sigma) -> float:
            return max(mixture_delta(law, units, sigma, epsilon, each) for each in ways)

        assert found.epsilon is not None and truth(found.epsilon) <= DELTA
        assert sampling == "fixed" or truth(share_of_it * found.epsilon) > DELTA


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "vmf"])
def test_more_records_or_clients_never_prove_more(mechanism: str) -> None:
    noise = 5.0 if mechanism == "vmf" else 20.0
    for sampling in ("shuffled", "fixed", "poisson", "balls-in-bins"):
        growing = [
            person([share(k, 300, mechanism=mechanism, noise=noise, sampling=sampling, rate=0.1) for k in records])
            for records in ((1,), (2, 1), (9, 2))
        ]
        epsilons = [found.epsilon or math.nan for found in growing]
        assert epsilons == sorted(epsilons)
        assert epsilons[0] > 0


def test_a_chain_of_neighbours_where_nothing_else_is_known() -> None:
    """A pure figure of one client is multiplied by the records; delta of two clients is shared out."""
    one, group = (person([share(k, mechanism="output", noise=0.5, participations=1, law="laplace")]) for k in (1, 4))
    assert group.epsilon == pytest.approx(4 * (one.epsilon or math.nan))
    both = person([share(4, mechanism="output", noise=0.5, participations=1, law="laplace")] * 2)
    assert both.epsilon == pytest.approx(8 * (one.epsilon or math.nan))


def test_wrong_numbers_of_records() -> None:
    for records, examples in ((0, 10), (11, 10), (2_000_000, None)):
        with pytest.raises(InputError, match="records"):
            share(records, examples)
    with pytest.raises(InputError, match="sampling"):
        person([share(2, sampling="fixed", rate=0.1)])
