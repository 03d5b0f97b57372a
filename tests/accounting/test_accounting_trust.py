"""Central and distributed noise: dp-accounting, as pfl-research uses it, Flower's accountant, and exact divergences."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant as GoogleRdp
from flwr.supercore.privacy_accounting import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from scipy import stats

from fedpriv.accounting import Release, calibrate, guarantee, proven_epsilon
from fedpriv.accounting.skellam import LEVELS, padded, rounded_norm, skellam_rdp
from fedpriv.core.errors import InputError
from fedpriv.core.names import AdjacencyName, SamplingName
from tests.cases import in_one_test

DELTA = 1e-5


def release(
    name: str, sigma: float, rounds: int, adjacency: AdjacencyName, sampling: SamplingName = "full", rate: float = 1.0
) -> Release:
    return Release(name, "update", sampling, rate, rounds, (1000,), sigma, DELTA, adjacency)


@in_one_test(("name", "adjacency"), [(n, a) for n in ("central", "distributed") for a in ("replace-one", "zero-out")])
def test_a_sum_of_updates_has_no_figure_for_one_example(name: str, adjacency: AdjacencyName) -> None:
    """One example less may move a client's clipped update by 2 clip_norm; zero-out counts 1 clip_norm."""
    with pytest.raises(InputError, match=r"unit = 'example': .* allowed is update"):
        Release(name, "example", "full", 1.0, 1, (1000,), 1.0, DELTA, adjacency)


@pytest.mark.parametrize(("sigma", "rate", "rounds"), [(1.0, 50 / 280, 20), (0.8, 0.05, 100)])
def test_sampled_clients_agree_with_pfl(sigma: float, rate: float, rounds: int) -> None:
    """pfl's PLDPrivacyAccountant and RDPPrivacyAccountant are dp-accounting's on this event."""
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(sigma))
    ours = guarantee(release("central", sigma, rounds, "zero-out", "poisson", rate)).epsilon
    assert ours is not None
    assert ours == pytest.approx(PLDAccountant().compose(event, rounds).get_epsilon(DELTA), rel=0.01)
    assert ours <= GoogleRdp().compose(event, rounds).get_epsilon(DELTA)


@pytest.mark.parametrize(
    ("method", "sampling"), [(SamplingMethod.NO_AMPLIFICATION, "full"), (SamplingMethod.POISSON, "poisson")]
)
def test_agrees_with_flower(method: SamplingMethod, sampling: SamplingName) -> None:
    """Flower converts Renyi bounds, and so lies above the exact figure, by a fifth at most here."""
    flower = RdpAccountant(PrivacyConfig(DELTA, 100, NeighboringRelation.ADD_OR_REMOVE_ONE, method))
    flower.compose(GaussianPrivacyEvent(2.0, 10, 100), 10)
    ours = guarantee(release("central", 2.0, 10, "zero-out", sampling, 0.1)).epsilon
    assert ours is not None
    assert ours <= flower.get_epsilon(DELTA) <= 1.2 * ours


def test_a_cohort_of_a_fixed_size_is_worse_than_a_poisson_one_and_better_than_none() -> None:
    fixed, poisson, none = (
        proven_epsilon(release("central", 2.0, 10, "replace-one", sampling, 0.1))
        for sampling in ("fixed", "poisson", "full")
    )
    assert poisson <= fixed * (1 + 1e-6) < none
    with pytest.raises(InputError, match="zero-out"):
        release("central", 2.0, 10, "zero-out", "fixed", 0.1)
    with pytest.raises(InputError, match="update is not sampled"):
        release("gaussian", 2.0, 10, "replace-one", "poisson", 0.1)


@in_one_test("variance", [0.7, 6.0, 80.0])
@in_one_test("shift", [(1,), (3,), (2, -1, 1)])
def test_skellam_divergence_is_bounded(variance: float, shift: tuple[int, ...]) -> None:
    """Against the sum over all whole numbers, in both directions; close to it where there is much noise."""
    orders = np.array([2.0, 3.0, 5.0, 16.0])
    x = np.arange(-600, 601)
    log_p = stats.skellam.logpmf(x, variance / 2, variance / 2)
    exact = np.zeros(len(orders))
    for by in shift:
        # P and Q where Q has mass in double precision; what is left out only lowers the exact figure.
        q = stats.skellam.logpmf(x - by, variance / 2, variance / 2)
        seen = np.isfinite(log_p) & np.isfinite(q)
        exact += [np.log(np.sum(np.exp(a * log_p[seen] + (1 - a) * q[seen]))) / (a - 1) for a in orders]
    l1, l2 = float(np.abs(shift).sum()), float(np.linalg.norm(shift))
    bound = skellam_rdp(orders, variance, l1, l2)
    assert np.all(exact <= bound * (1 + 1e-9))
    if variance == 80:
        assert np.all(bound[:3] <= 1.2 * exact[:3])
    with pytest.raises(ValueError, match="whole orders"):
        skellam_rdp(np.array([1.5]), variance, l1, l2)


def test_distributed_noise_costs_hardly_more_than_central_noise() -> None:
    """With 2^16 levels rounding and the law of the noise take less than 3 %, most of it the conversion's."""
    for adjacency in ("zero-out", "replace-one"):
        central = proven_epsilon(release("central", 4.0, 10, adjacency))
        renyi = GoogleRdp().compose(GaussianDpEvent(4.0 / (1 if adjacency == "zero-out" else 2)), 10)
        ours = proven_epsilon(release("distributed", 4.0, 10, adjacency))
        assert central < ours <= 1.03 * renyi.get_epsilon(DELTA)


def test_the_norm_after_rounding() -> None:
    assert [padded(k) for k in (1, 2, 3, 1000, 1024)] == [1, 2, 4, 1024, 1024]
    assert LEVELS < rounded_norm(1024) <= LEVELS + math.sqrt(1024)


def test_calibration_reaches_the_target() -> None:
    sigma = calibrate(5.0, release("distributed", 1.0, 10, "replace-one"))
    assert 4.99 <= proven_epsilon(release("distributed", sigma, 10, "replace-one")) <= 5.0
