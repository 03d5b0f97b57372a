"""Updates as whole numbers: the sum is right, its noise has the variance that the ledger assumes, and hides a client.

Statistical tests fail by chance less than once in 10^6 runs each, the game's once in 10^3.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedpriv.accounting import Release, proven_epsilon
from fedpriv.accounting.skellam import LEVELS, SHARED_SIGMA, rounded_norm
from fedpriv.core.config import Experiment
from fedpriv.core.plan import Plan, plan_client
from fedpriv.core.randomness import Secret
from fedpriv.mechanisms.machinery.quantisation import decoded, encoded
from fedpriv.mechanisms.machinery.whole_numbers import Words, least_survivors, noisy_counts
from tests.cases import in_one_test
from tests.noise import stream

SIGMA, CHANCE = 0.7, 1e-7


def signs() -> np.random.Generator:
    return np.random.default_rng(5)


def total(words: list[Words]) -> Words:
    summed = np.zeros_like(words[0])
    for each in words:
        summed = summed + each  # modulo 2^32
    return summed


def plan(clients: int, survivors: int | None = None, sigma: float = SIGMA) -> Plan:
    settings = {
        "federation": {"clients": clients, "secure_aggregation": True, "weighting": "uniform", "algorithm": "fedavg"},
        "mechanism": {"name": "distributed", "sigma": sigma, "clip_norm": 2.0, "survivors": survivors},
        "adversary": {"attacks": []},
    }
    return plan_client(Experiment.model_validate(settings), 0, 100, (3000, 96))


def test_a_sum_without_noise_is_the_sum_of_clipped_updates() -> None:
    rng = np.random.default_rng(1)
    updates = [torch.from_numpy(rng.normal(size=300)) * scale for scale in (0.01, 0.05, 3.0)]
    words = [encoded(update, 0.0, signs(), stream(n).numpy()) for n, update in enumerate(updates)]
    for each in words:
        assert np.linalg.norm(each.view(np.int32).astype(float)) <= rounded_norm(512)
    found = decoded(total(words), 300, signs())
    wanted = sum(update / max(1.0, float(update.norm())) for update in updates)
    # Each coordinate is off by the rounding of 3 x 512 numbers, below one level each.
    assert float((found - wanted).abs().max()) < 3 * 6 / LEVELS


def test_sums_wrap_around_without_harm() -> None:
    """A negative sum is a large word; 1,000 equal updates are far from 2^31."""
    update = torch.full((4,), -0.5)
    words = encoded(update, 0.0, signs(), stream().numpy())
    assert torch.allclose(decoded(total([words] * 1000), 4, signs()), 1000 * update.double(), atol=1000 * 6 / LEVELS)


@in_one_test(("whole", "dropped"), [(None, 0), (None, 1), (None, 3), (9, 0), (9, 1), (10, 0)])
def test_the_noise_of_the_sum_has_the_variance_of_the_ledger(whole: int | None, dropped: int) -> None:
    """With as many dropouts as a sum may have exactly that, and with fewer more, by the shares."""
    clients = 10
    share = plan(clients, whole).share_of_noise
    survivors = clients - dropped
    assert least_survivors(clients) == 7
    assert survivors >= share.survivors == (whole or 7)
    nothing = torch.zeros(4096)
    words = [encoded(nothing, share.variance, signs(), stream(n).numpy()) for n in range(survivors)]
    noise = decoded(total(words), 4096, signs()).numpy() * share.bound
    expected = (SIGMA * 2.0) ** 2 * survivors / share.survivors
    statistic = float(np.square(noise).sum()) / expected
    assert stats.chi2.ppf(CHANCE, 4096) < statistic < stats.chi2.isf(CHANCE, 4096)


def test_shares_of_the_noise_on_counts_add_up() -> None:
    """The sample deviation of 20,000 numbers is within 2.5 %: a false alarm in about one of 10 million runs."""
    none = torch.zeros((1, 1000), dtype=torch.uint8)
    clients, sigma = 9, 3.0
    secret = Secret.of_seed(1)
    counts = [noisy_counts(none, 20, sigma, clients, secret.stream("votes", k)) for k in range(7)]  # the least there be
    found = (sum(counts) - torch.tensor([7.0] + [0.0] * 19)).std()
    assert float(found) == pytest.approx(sigma, rel=0.025)


@in_one_test(
    ("sigma", "clients"),
    [
        (SHARED_SIGMA.floor, 2),
        (1023.0, 2),
        (SHARED_SIGMA.most, 2),
        (SHARED_SIGMA.floor, 1000),
        (SHARED_SIGMA.most, 1000),
    ],
)
def test_the_noise_has_its_law_at_the_edge_of_what_is_allowed(sigma: float, clients: int) -> None:
    """The fewest survivors and as many clients as do not wrap around, with the least and the most noise.

    The sum of as few clients as may be in one; and, of all 1,000 clients, each with the same update, no sum that wraps.
    """
    share = plan(clients, sigma=sigma).share_of_noise
    numbers = 1 << 17 if clients == 2 else 1 << 9
    rng, nothing = stream().numpy(), torch.zeros(numbers)
    words = total([encoded(nothing, share.variance, signs(), rng) for _ in range(share.survivors)])
    noise = words.view(np.int32).astype(float)
    expected = (sigma * LEVELS) ** 2
    statistic = float(np.square(noise).sum()) / expected
    assert stats.chi2.ppf(CHANCE, numbers) < statistic < stats.chi2.isf(CHANCE, numbers)
    assert abs(float(stats.kurtosis(noise))) < stats.norm.isf(CHANCE) * math.sqrt(24 / numbers)
    # Rounding to whole levels moves the normal law by half a level.
    assert stats.kstest((noise + 0.5) / math.sqrt(expected), "norm").pvalue > CHANCE
    if clients == 2:
        return
    alike = torch.eye(1, 4)[0]
    words = total([encoded(alike, share.variance, signs(), rng) for _ in range(clients)])
    deviation = sigma * math.sqrt(clients / share.survivors)
    found = decoded(words, 4, signs())
    assert float((found - clients * alike.double()).abs().max()) < 6 * deviation + clients * 4 / LEVELS


@pytest.mark.parametrize(("factor", "refuted"), [(1.0, False), (0.5, True)])
def test_a_distinguishing_game_stays_below_the_ledger(factor: float, refuted: bool) -> None:
    """Is a client in the sum, or does it count as zero? The best threshold on the sum refutes halved noise alone."""
    delta, draws, sigma = 0.1, 2000, 1.0
    claimed = proven_epsilon(Release("distributed", "update", "full", 1.0, 1, (1,), sigma, delta, "zero-out"))
    rng = stream().numpy()
    variance = (factor * sigma * LEVELS) ** 2

    def sums(present: float) -> np.ndarray:
        update = torch.tensor([present])
        return np.array([float(decoded(encoded(update, variance, signs(), rng), 1, signs())) for _ in range(draws)])

    with_client, without = sums(1.0), sums(0.0)
    refutations = []
    for threshold in (1.0, 1.25, 1.5, 2.0):
        hits, alarms = int((with_client > threshold).sum()), int((without > threshold).sum())
        low = stats.binomtest(hits, draws).proportion_ci(1 - 1e-4).low
        high = stats.binomtest(alarms, draws).proportion_ci(1 - 1e-4).high
        refutations.append(low - math.exp(claimed) * high > delta)
    assert any(refutations) == refuted
