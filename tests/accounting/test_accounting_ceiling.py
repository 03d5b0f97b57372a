"""Ceilings against exact formulas, integrals, enumeration, dp-accounting and attacks; and what they have to obey."""

import itertools
import math
from dataclasses import replace
from functools import cache

import mpmath
import numpy as np
import pytest
from scipy import integrate, optimize, special, stats

from fedpriv.accounting import Release, ceilings, gaussian_rdp, laplace_rdp, log_mgf
from fedpriv.accounting.numerical import LossDistribution
from fedpriv.accounting.references import DirectionalReference, LaplaceReference, NormalReference
from fedpriv.core.errors import InputError
from fedpriv.core.registry import MECHANISMS
from tests.cases import in_one_test

pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")


def release(mechanism, noise, count=1, sampling="full", rate=1.0, dimensions=(1,), unit="example"):
    return Release(mechanism, unit, sampling, rate, count, dimensions, noise, 1e-5)


def gamma(k0, *arguments, **options):
    (ceiling,) = ceilings(release(*arguments, **options), [k0])
    assert ceiling.k0 == k0
    return ceiling.gamma


# ---- normal noise ---------------------------------------------------------------------------------------------------

# k0, sigma, T: the ceiling, that of the ledger's replace-one pair, and the Renyi form
GAUSSIAN = [
    (0.01, 1.0, 1, 0.0923622481, 0.3720805854, 0.126152),
    (0.01, 0.5, 1, 0.3720805854, 0.9529005062, 0.585399),
    (0.1, 1.0, 1, 0.3891436916, 0.7637595841, 0.518672),
    (0.001, 1.0, 4, 0.1378054129, 0.8185274823, 0.229063),
    (0.01, 4.0, 16, 0.0923622481, 0.3720805854, 0.126152),
    (1e-6, 0.5, 1, 0.0029487703, 0.2255974899, None),
]


def exact_normal(k0, distance):
    with mpmath.workdps(30):
        quantile = mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(k0) - 1)
        return float(mpmath.ncdf(quantile + distance))


def renyi_form(k0, divergence):
    """Min over orders of (k0 exp(D_a))^((a - 1) / a), the order found by search."""

    def log_bound(log_excess):
        order = 1 + math.exp(log_excess)
        return (math.log(k0) + float(divergence(order))) * (order - 1) / order

    best = min(np.linspace(-6, 10, 65), key=log_bound)
    found = optimize.minimize_scalar(log_bound, bounds=(best - 0.3, best + 0.3), options={"xatol": 1e-6})
    return min(1.0, math.exp(found.fun))


@in_one_test("mechanism", ["gaussian", "hgm"])
@in_one_test(("k0", "sigma", "count", "figure", "replaced", "renyi"), GAUSSIAN)
def test_normal_noise_is_exact(mechanism, k0, sigma, count, figure, replaced, renyi):
    found = gamma(k0, mechanism, sigma, count)
    assert found == pytest.approx(exact_normal(k0, math.sqrt(count) / sigma), rel=1e-11)
    assert found == pytest.approx(figure, abs=6e-11)
    assert exact_normal(k0, 2 * math.sqrt(count) / sigma) == pytest.approx(replaced, abs=6e-11)
    if renyi is not None:
        form = renyi_form(k0, lambda order: count * gaussian_rdp(order, sigma))
        assert form <= renyi <= form * (1 + 2e-4)  # printed by a coarse list of orders
        assert found <= form


@in_one_test("sampling", ["shuffled", "full"])
@in_one_test("unit", ["example", "update"])
def test_a_pass_and_an_update_are_a_participation(sampling, unit):
    used = "full" if unit == "update" else sampling
    assert gamma(0.01, "gaussian", 4.0, 16, used, unit=unit) == gamma(0.01, "gaussian", 4.0, 16)


# ---- directional noise, one participation ---------------------------------------------------------------------------

# k0, K, kappa: the ceiling, about what a normal law gives, the Renyi form, the ledger's pair of opposite directions
DIRECTIONAL = [
    (0.01, 3, 2.0, 0.0399421265, 0.1207, 0.0402, 0.3555),
    (0.1, 3, 2.0, 0.3358309117, 0.4495, 0.3517, 0.8585),
    (0.01, 10, 5.0, 0.1381622755, 0.2281, 0.1634, 0.7644),
    (0.1, 100, 10.0, 0.3863720625, 0.3891, 0.5076, 0.7637),
    (0.01, 1000, 50.0, 0.2268131930, 0.2281, 0.3444, 0.7980),
    (0.001, 14818, 300.0, 0.2654377996, 0.2657, 0.4558, 0.9670),
    (0.01, 14818, 100.0, 0.0661685526, 0.0662, 0.0863, 0.2472),
    (0.01, 14818, 500.0, 0.9623797436, 0.9626, 1.0, 1.0),
    (0.01, 167000, 500.0, 0.1350479036, 0.1351, 0.1939, 0.5481),
    (0.01, 789258, 500.0, 0.0389046753, 0.0389, 0.0471, 0.1149),
]


def threshold(k0, dimension):
    """What a cosine of a uniform direction exceeds with probability k0 < 1/2."""
    return math.sqrt(1 - special.betaincinv((dimension - 1) / 2, 0.5, 2 * k0))


def directional_law(dimension, kappa, centre, points, deviations=14):
    """A fine grid of cosines around a centre, and the density there of the VMF law's, by normalising."""
    width = deviations / math.sqrt(dimension)
    t = np.linspace(max(-1 + 1e-15, centre - width), min(1 - 1e-15, centre + width), points)
    log_density = (dimension - 3) / 2 * np.log1p(-t * t) + kappa * t
    density = np.exp(log_density - log_density.max())
    return t, density / integrate.simpson(density, x=t)


def exact_directional(k0, dimension, kappa):
    """By integration over the cosine, with mpmath."""
    tau = threshold(k0, dimension)
    power = (dimension - 3) / 2
    mode = min(2 * kappa / (2 * power + math.hypot(2 * power, 2 * kappa)), 0.999)
    height = power * math.log1p(-mode * mode) + kappa * mode
    step = 3 / math.sqrt(dimension)

    def density(t):
        return mpmath.mpf(1 - t * t) ** power * mpmath.exp(kappa * t - height)

    def integral(low):
        inner = [mode + step * number for number in range(-4, 5)]
        return mpmath.quad(density, sorted({low, 1.0, *(min(max(x, low), 1.0) for x in inner)}))

    return float(integral(tau) / integral(-1.0))


@pytest.mark.parametrize(("k0", "dimension", "kappa", "figure", "normal", "renyi", "replaced"), DIRECTIONAL)
def test_one_directional_draw(k0, dimension, kappa, figure, normal, renyi, replaced):
    found = gamma(k0, "vmf", kappa, dimensions=(dimension,))
    assert found == pytest.approx(figure, abs=1e-10)
    assert exact_normal(k0, kappa / math.sqrt(dimension)) == pytest.approx(normal, abs=6e-5)

    def divergence(order):
        return (log_mgf(dimension, order * kappa) - order * log_mgf(dimension, kappa)) / (order - 1)

    assert renyi_form(k0, divergence) == pytest.approx(renyi, abs=1e-4)
    capacity = k0 * math.exp(kappa - float(log_mgf(dimension, kappa)))
    assert found <= renyi_form(k0, divergence) <= min(1.0, capacity * (1 + 1e-9))
    assert replaced_one(release("vmf", kappa, dimensions=(dimension,)), k0) == pytest.approx(replaced, abs=3e-4)


@pytest.mark.parametrize(("k0", "dimension", "kappa"), [case[:3] for case in DIRECTIONAL])
def test_one_directional_draw_by_mpmath(k0, dimension, kappa):
    exact = exact_directional(k0, dimension, kappa)
    assert gamma(k0, "vmf", kappa, dimensions=(dimension,)) == pytest.approx(exact, rel=1e-9)


@in_one_test("kappa", [1e-3, 0.5, 2.0, 30.0, 700.0])
@in_one_test("k0", [1e-9, 0.01, 0.3, 0.99])
def test_three_dimensions_have_a_closed_form(k0, kappa):
    """The cosine of a uniform direction is uniform, tau = 1 - 2 k0: (exp(kappa) - exp(kappa tau)) / (2 sinh kappa)."""
    exact = math.expm1(-2 * kappa * k0) / math.expm1(-2 * kappa)
    assert gamma(k0, "vmf", kappa, dimensions=(3,)) == pytest.approx(exact, rel=1e-10)


@in_one_test(
    ("dimension", "k0", "figure"),
    [
        (15826, 0.01, 0.9502),
        (212106, 0.01, 0.1074),
        (15826, 1 / 85, 0.9562),
        (212106, 1 / 85, 0.1192),
        (789258, 1 / 85, 0.0444),
    ],
)
def test_figures_of_the_table_of_attacks(dimension, k0, figure):
    assert gamma(k0, "vmf", 500.0, dimensions=(dimension,)) == pytest.approx(figure, abs=6e-5)


# ---- Laplace noise, one participation -------------------------------------------------------------------------------


@in_one_test("scale", [0.05, 0.5, 1.0, 30.0])
@in_one_test("k0", [1e-6, 0.01, 0.3, 0.7])
def test_one_laplace_release_has_a_closed_form(k0, scale):
    """Neyman and Pearson: in the lower tail, between the centres, and beyond."""
    shift = 1 / scale
    if k0 < math.exp(-shift) / 2:
        exact = math.exp(shift) * k0
    elif k0 < 0.5:
        exact = 1 - math.exp(-shift) / (4 * k0)
    else:
        exact = 1 - math.exp(-shift) * (1 - k0)
    assert gamma(k0, "laplace", scale) == pytest.approx(exact, rel=1e-10)


# ---- composition ----------------------------------------------------------------------------------------------------


def summed_directional(k0, dimension, kappa, count, points=2**13 + 1):
    """P that the sum of T cosines exceeds what it exceeds with probability k0 where all are uniform: on a fine grid."""
    tails = []
    for concentration in (0.0, kappa):
        centre = kappa / (2 * dimension)
        t, density = directional_law(dimension, concentration, centre, points)
        step = t[1] - t[0]
        size = 2 ** math.ceil(math.log2(count * points))
        spectrum = np.fft.rfft(density * step, size) ** count
        total = np.fft.irfft(spectrum, size)[: count * (points - 1) + 1]
        # The probability above a point: half of its cell, and all beyond.
        tails.append(np.cumsum(total[::-1])[::-1] - total / 2)
    order = slice(None, None, -1)
    near = (tails[0] > k0 / 50) & (tails[0] < min(1.0, 50 * k0))
    return float(np.interp(k0, tails[0][near][order], tails[1][near][order]))


# k0, K, kappa, T: an upper bound from losses rounded up, which the specification prints
COMPOSED = [
    (0.01, 10, 2.0, 4, 0.131141),
    (0.01, 14818, 100.0, 10, 0.607185),
    (0.01, 14818, 20.0, 100, 0.247385),
    (0.1, 1000, 5.0, 50, 0.435226),
]


@in_one_test(("k0", "dimension", "kappa", "count", "figure"), COMPOSED)
def test_directional_draws_compose_exactly(k0, dimension, kappa, count, figure):
    exact = summed_directional(k0, dimension, kappa, count)
    found = gamma(k0, "vmf", kappa, count, dimensions=(dimension,))
    assert exact * (1 - 2e-6) <= found <= exact * (1 + 1e-4)
    assert found <= figure <= found * (1 + 1e-3)


def test_directional_draws_by_simulation():
    """200,000 draws of (0.01, 10, 2, T 4): five standard errors, a false alarm in two million."""
    rng = np.random.default_rng(20_261)
    t, density = directional_law(10, 2.0, 0.0, 20_001)
    weights = np.cumsum(density) / density.sum()
    first = np.interp(rng.uniform(size=(200_000, 4)), weights, t).sum(axis=1)
    uniform = (2 * rng.beta(4.5, 4.5, size=(2_000_000, 4)) - 1).sum(axis=1)
    rate = np.mean(first > np.quantile(uniform, 0.99))
    # The quantile's own error is a third of it.
    assert gamma(0.01, "vmf", 2.0, 4, dimensions=(10,)) == pytest.approx(rate, abs=6 * math.sqrt(0.13 / 200_000))


@in_one_test(("kappa", "count"), list(itertools.product([0.02, 0.5, 2.0], [1, 2, 9, 60])))
@in_one_test("k0", [0.01, 0.4])
def test_signs_are_enumerated(k0, kappa, count):
    """K = 1: of T signs only the number that is kept matters; the ceiling is linear between those numbers."""
    kept = np.arange(count, -1, -1)
    second = np.cumsum(stats.binom.pmf(kept, count, 0.5))
    first = np.cumsum(stats.binom.pmf(kept, count, special.expit(2 * kappa)))
    exact = float(np.interp(k0, [0.0, *second], [0.0, *first]))
    assert exact * (1 - 1e-10) <= gamma(k0, "vmf", kappa, count, dimensions=(1,)) <= exact * (1 + 1e-3)
    blocks = gamma(k0, "vmf", kappa, 1, dimensions=(1,) * count)
    assert blocks == pytest.approx(gamma(k0, "vmf", kappa, count, dimensions=(1,)), rel=1e-3)


@in_one_test("dimensions", [(150, 96, 2400, 48_000, 120), (64,) * 40, (100, 64, 64)])
def test_blocks_are_nearly_one_normal_law(dimensions):
    """The variance of the sum of losses is kappa^2 times the sum of 1 / K, for blocks of many coordinates."""
    kappa = 0.5
    distance = kappa * math.sqrt(3 * sum(1 / size for size in dimensions))
    assert gamma(0.01, "vmf", kappa, 3, dimensions=dimensions) == pytest.approx(exact_normal(0.01, distance), rel=2e-2)


@pytest.mark.parametrize("count", [10**4, 10**11])
def test_many_participations_are_a_normal_law(count):
    """Grids that get coarser: of Laplace and directional noise, whose sums are nearly normal."""
    exact = exact_normal(0.01, 1.0)
    assert gamma(0.01, "laplace", math.sqrt(count), count) == pytest.approx(exact, rel=5e-3)
    found = gamma(0.01, "vmf", math.sqrt(10**8 / count), count, dimensions=(10**8,))
    assert exact * (1 - 1e-4) <= found <= exact * (1 + 3e-3)


# ---- sampling -------------------------------------------------------------------------------------------------------


@in_one_test(("k0", "sigma", "rate"), [(0.01, 0.6, 0.1), (0.1, 2.0, 0.9), (1e-6, 1.0, 1e-3), (0.7, 0.3, 0.5)])
def test_one_poisson_step_is_exact(k0, sigma, rate):
    """The likelihood ratio grows with the noise, so the best event is a half-line."""
    exact = (1 - rate) * k0 + rate * exact_normal(k0, 1 / sigma)
    assert gamma(k0, "gaussian", sigma, 1, "poisson", rate) == pytest.approx(exact, rel=1e-9)


@in_one_test("k0", [1e-12, 1e-20, 1e-100])
@in_one_test("sigma", [0.3, 1.0, 5.0])
def test_no_baseline_is_too_small(k0, sigma):
    """What a grid leaves out of the tails of P counts, too: a ceiling is never below the exact figure."""
    exact = 0.5 * (k0 + stats.norm.sf(stats.norm.isf(k0) - 1 / sigma))
    assert exact <= gamma(k0, "gaussian", sigma, 1, "poisson", 0.5) <= exact + 2e-15


def test_the_printed_poisson_step():
    assert gamma(0.01, "gaussian", 0.6, 1, "poisson", 0.1) == pytest.approx(0.0344729214, abs=6e-11)


@pytest.mark.parametrize(
    ("k0", "sigma", "rate", "count", "figure"),
    [(0.01, 1.0, 0.01, 100, 0.0150574), (0.01, 0.6, 0.1, 20, 0.1598619)],
)
def test_poisson_steps_agree_with_dp_accounting(k0, sigma, rate, count, figure):
    """Its loss of a batch with the example against one without it, composed on a finer grid than ours."""
    single = pld.from_gaussian_mechanism(sigma, sampling_prob=rate, value_discretization_interval=1e-4)
    removed = single.self_compose(count)._pmf_remove
    epsilons = np.linspace(-2, 4, 6001)
    exact = float(np.min(np.exp(epsilons) * k0 + removed.get_delta_for_epsilon(epsilons)))
    assert exact == pytest.approx(figure, abs=6e-8)
    assert gamma(k0, "gaussian", sigma, count, "poisson", rate) == pytest.approx(exact, rel=1e-5)


@in_one_test("mechanism", ["gaussian", "laplace", "vmf"])
def test_every_batch_is_no_sampling(mechanism):
    plain = gamma(0.01, mechanism, 2.0, 10, dimensions=(50,))
    for sampling in ("poisson", "fixed"):
        assert gamma(0.01, mechanism, 2.0, 10, sampling, 1.0, (50,)) == plain
    assert gamma(0.1, "gaussian", 2.0, 10, "poisson", 1.0) == pytest.approx(0.6177540, abs=6e-8)


@in_one_test(("kappa", "rate"), list(itertools.product([0.3, 2.0], [0.05, 0.6])))
@in_one_test("count", [1, 3, 8])
def test_poisson_batches_of_signs_are_enumerated(kappa, rate, count):
    """K = 1: of T steps n use the example, which both worlds show, and of n signs some are kept."""
    used = np.repeat(np.arange(count + 1), np.arange(count + 1) + 1)
    kept = np.concatenate([np.arange(number + 1) for number in range(count + 1)])
    share = stats.binom.pmf(used, count, rate)
    first, second = (share * stats.binom.pmf(kept, used, keep) for keep in (special.expit(2 * kappa), 0.5))
    order = np.argsort(-first / second)
    for k0 in (0.01, 0.3):
        exact = float(np.interp(k0, [0, *np.cumsum(second[order])], [0, *np.cumsum(first[order])]))
        found = gamma(k0, "vmf", kappa, count, "poisson", rate, (1,))
        assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-4)


def best_events(first, second, baselines):
    """sup P(E) where Q(E) <= k0 of two discrete laws, for each k0."""
    order = np.argsort(-first / np.maximum(second, 1e-300))
    return np.interp(baselines, np.append(0, np.cumsum(second[order])), np.append(0, np.cumsum(first[order])))


@pytest.mark.parametrize(("sigma", "rate"), list(itertools.product([0.4, 1.0, 3.0], [0.05, 0.5])))
def test_no_batch_of_a_fixed_size_exceeds_the_claim(sigma, rate):
    """On a line: z, or zero, or another example in its place, anywhere within the clipping norm."""
    x = np.linspace(-1 - 10 * sigma, 1 + 10 * sigma, 4001)

    def law(centre):
        density = np.exp(-(((x - centre) / sigma) ** 2) / 2)
        return density / density.sum()

    rng = np.random.default_rng(4)
    baselines = [1e-3, 0.01, 0.2, 0.8]
    claimed = [gamma(k0, "gaussian", sigma, 1, "fixed", rate) for k0 in baselines]
    for own, other in [(1.0, -1.0), (1.0, 1.0), *rng.uniform(-1, 1, (20, 2))]:
        first = (1 - rate) * law(other) + rate * law(own)
        second = (1 - rate) * law(other) + rate * law(0.0)
        assert np.all(best_events(first, second, baselines) <= np.array(claimed) * (1 + 1e-3))


@pytest.mark.parametrize(("kappa", "rate"), list(itertools.product([0.3, 2.0, 8.0], [0.05, 0.5])))
@pytest.mark.parametrize("count", [1, 2])
def test_no_directions_of_batches_of_a_fixed_size_exceed_the_claim(kappa, rate, count):
    """On a circle, with a uniform direction in the place of z; two steps as if both were seen."""
    angles = np.linspace(0, 2 * np.pi, 361)[:-1]

    def law(angle):
        density = np.exp(kappa * np.cos(angles - angle))
        return density / density.sum()

    baselines = [1e-3, 0.01, 0.2, 0.8]
    claimed = [gamma(k0, "vmf", kappa, count, "fixed", rate, (2,)) for k0 in baselines]
    for other in (0.0, 1.0, 2.5, np.pi):
        first = (1 - rate) * law(other) + rate * law(0.0)
        second = (1 - rate) * law(other) + rate / angles.size
        if count == 2:
            first, second = np.outer(first, first).ravel(), np.outer(second, second).ravel()
        assert np.all(best_events(first, second, baselines) <= np.array(claimed) * (1 + 2e-3))


@in_one_test("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize(("kappa", "blocks"), [(5.0, 1000), (20.0, 3000)])
def test_a_participation_that_cannot_be_missed(kappa, blocks, sampling):
    """Its law has no loss near 0; who took part is known for certain then, and all others are guessed."""
    used = 1 - 0.99**10
    found = gamma(0.01, "vmf", kappa, 10, sampling, 0.01, (64,) * blocks)
    assert used + 0.01 * (1 - used) <= found <= (used + 0.01) * (1 + 1e-6)


def test_blocks_of_sixty_sizes_are_nearly_one_normal_law():
    sampling, rate = "fixed", 0.01
    sizes = np.random.default_rng(1).integers(2_000, 3_000_000, 60)
    distance = 2.0 * math.sqrt(sum(1 / sizes))
    exact = gamma(0.01, "gaussian", 1 / distance, 10_000, sampling, rate)
    found = gamma(0.01, "vmf", 2.0, 10_000, sampling, rate, tuple(int(size) for size in sizes))
    assert found == pytest.approx(exact, rel=2e-3)


# ---- what every ceiling obeys ---------------------------------------------------------------------------------------

KINDS = {
    "gaussian": ((0.7, 2.0, 40.0), (1,)),
    "hgm": ((0.7, 2.0, 40.0), (1,)),
    "laplace": ((0.7, 2.0, 40.0), (1,)),
    "vmf": ((60.0, 5.0, 0.1), (3000,)),
    "vmf, few": ((4.0, 0.6, 0.05), (3,)),
    "vmf, layers": ((3.0, 0.5, 0.02), (150, 6, 2400, 16)),
}
SAMPLINGS = [("full", 1.0), ("shuffled", 1.0), ("fixed", 0.05), ("poisson", 0.05), ("poisson", 0.9), ("fixed", 0.9)]
CASES = [
    # Each kind with every second sampling, in which it has both that take some, and one and many participations.
    *(
        (kind, *sampling, "example", (1, 30)[row // 2 % 2])
        for row, kind in enumerate(KINDS)
        for sampling in SAMPLINGS[row % 2 :: 2]
    ),
    *((kind, "full", 1.0, "update", (30, 1)[row // 2 % 2]) for row, kind in enumerate(KINDS)),
]


def replaced_one(run, k0):
    """The ceiling by the ledger's own pair, which is valid, too: a common grid of losses."""
    if run.mechanism in ("gaussian", "hgm"):
        proof = MECHANISMS[run.mechanism].proof()(replace(run, sampling="full"))
        return exact_normal(k0, 2 * math.sqrt(run.participations) / proof.noise)
    return replaced_law(run).success(k0)


@cache
def replaced_law(run):
    proof = MECHANISMS[run.mechanism].proof()(replace(run, sampling="full"))
    pairs = proof.dominating_pairs()
    interval = max(0.02 * min(pair.spread for pair, _ in pairs), max(pair.largest for pair, _ in pairs) / 1e5)
    laws = [LossDistribution.of(pair, interval).repeated(number * run.participations) for pair, number in pairs]
    whole = laws[0]
    for law in laws[1:]:
        whole = whole.composed_with(law)
    return whole


@pytest.mark.parametrize(("kind", "sampling", "rate", "unit", "count"), CASES)
def test_ceilings_are_ordered(kind, sampling, rate, unit, count):
    """In k0, in the noise and in participations; not below k0, and not above weaker forms."""
    noises, dimensions = KINDS[kind]
    mechanism = kind.split(",")[0]
    baselines = (1e-6, 0.01, 0.1, 0.9)

    def figures(noise, participations):
        run = release(mechanism, noise, participations, sampling, rate, dimensions, unit)
        return np.array([ceiling.gamma for ceiling in ceilings(run, baselines)])

    rows = np.array([figures(noise, count) for noise in noises])
    assert np.all(rows >= np.array(baselines)) and np.all(rows <= 1)
    assert np.all(np.diff(rows, axis=1) >= 0)
    assert np.all(np.diff(rows, axis=0) <= 1e-9)
    assert np.all(figures(noises[1], 2 * count) >= rows[1] * (1 - 1e-4))
    unsampled = release(mechanism, noises[1], count, "full", 1.0, dimensions)
    weaker = np.array([ceiling.gamma for ceiling in ceilings(unsampled, baselines)])
    assert np.all(rows[1] <= weaker * (1 + 1e-3) + 1e-11)
    replaced = np.array([replaced_one(unsampled, k0) for k0 in baselines])
    assert np.all(weaker <= replaced * (1 + 1e-3) + 1e-11)


@pytest.mark.parametrize(
    ("kind", "count"), [("laplace", 30), ("vmf", 5000), ("vmf, few", 1), ("vmf, few", 5000), ("vmf, layers", 30)]
)
def test_no_ceiling_is_above_the_renyi_form(kind, count):
    noises, dimensions = KINDS[kind]
    noise, mechanism = noises[1], kind.split(",")[0]

    def divergence(order):
        if mechanism == "laplace":
            return count * laplace_rdp(order, 1 / noise)
        sums = [log_mgf(size, order * noise) - order * log_mgf(size, noise) for size in dimensions]
        return count * np.sum(sums) / (order - 1)

    for k0 in (1e-6, 0.01, 0.3):
        assert gamma(k0, mechanism, noise, count, dimensions=dimensions) <= renyi_form(k0, divergence) * (1 + 1e-4)


# ---- no attack exceeds them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_the_best_decision_among_a_hundred_orthogonal_gradients(sigma):
    """20,000 decisions by the largest likelihood; five standard errors, a false alarm in two million."""
    rng = np.random.default_rng(11)
    uploads = sigma * rng.normal(size=(20_000, 100))
    uploads[:, 0] += 1
    rate = np.mean(uploads.argmax(axis=1) == 0)
    ceiling = gamma(0.01, "gaussian", sigma)
    assert rate <= ceiling + 5 * math.sqrt(rate * (1 - rate) / 20_000)
    # The comparison can fail: half the noise is well above it.
    assert exact_normal(0.01, 2 / sigma) > ceiling + 0.1


# ---- grids ----------------------------------------------------------------------------------------------------------

PAIRS = {
    "vmf": DirectionalReference(40.0, 500),
    "few": DirectionalReference(3.0, 2),
    "sign": DirectionalReference(1.0, 1),
    "laplace": LaplaceReference(1.5),
    "poisson": NormalReference(0.8, 0.1),
}


def on_grid(pair, interval):
    edges = np.arange(math.floor(pair.smallest / interval), math.ceil(pair.largest / interval) + 1) * interval
    return LossDistribution.rounded(*pair.law(edges), interval)


@in_one_test("name", PAIRS)
@pytest.mark.parametrize("share", [0.02, 0.3, 2.0])
def test_grids_round_upwards(name, share):
    pair = PAIRS[name]
    law = on_grid(pair, share * pair.spread)
    assert law.masses.sum() == pytest.approx(1, abs=1e-12)
    assert law.masses @ np.exp(-law.losses) == pytest.approx(1, abs=1e-9)
    exact = pair.deltas(law.losses)
    np.testing.assert_allclose(law.deltas, exact, atol=1e-10)  # no rounding on the grid itself
    coarse = law.coarser()
    assert np.all(coarse.deltas >= pair.deltas(coarse.losses) - 1e-10)
    for k0 in (0.001, 0.1, 0.5):
        assert coarse.success(k0) >= law.success(k0) - 1e-12
        assert law.tagged(0.3).success(k0) <= law.success(k0)
        assert law.compounded(7).success(k0) == pytest.approx(law.repeated(7).success(k0), rel=1e-9)


@in_one_test("name", PAIRS)
@in_one_test("count", [1, 4, 400])
def test_what_is_left_out_of_a_law_counts_as_infinite(name, count):
    pair = PAIRS[name]
    law = on_grid(pair, 0.3 * pair.spread).repeated(count)
    for largest in (600.0, float(law.losses[law.masses.argmax()]), -1.0):
        kept = law.narrowed(largest)
        assert kept.masses.size >= 2 and kept.masses.sum() + kept.infinite == pytest.approx(1, abs=1e-9)
        for k0 in (1e-6, 0.1):
            assert kept.success(k0) >= law.success(k0) * (1 - 1e-9)
            assert kept.tagged(0.3).success(k0) >= law.tagged(0.3).success(k0) * (1 - 1e-9)
    assert law.narrowed(600.0).success(0.01) == pytest.approx(law.success(0.01), rel=1e-6)


@in_one_test(("finite", "count"), itertools.product((0.5, 1e-3, 1e-9), (2, 30, 1000)))
def test_repeats_of_a_law_that_is_seldom_finite(finite, count):
    """All ``count`` losses are finite with the power of the probability that one is, however small that gets."""
    masses = finite * np.array([0.2, 0.5, 0.3])
    whole = LossDistribution(0.1, 40, masses, 1 - finite).repeated(count)
    assert whole.masses.sum() == pytest.approx(finite**count, rel=1e-6, abs=1e-14)
    assert whole.masses.sum() + whole.infinite == pytest.approx(1, abs=1e-12)
    assert 1 - finite**count <= whole.success(0.01) * (1 + 1e-12) <= 1 + 1e-12


@pytest.mark.parametrize(("blocks", "kappa", "count"), [(29, 250.0, 30), (99, 25.0, 90), (989, 5.0, 90)])
def test_blocks_whose_losses_are_nearly_always_too_large_for_the_grid(blocks, kappa, count):
    assert gamma(0.01, "vmf", kappa, count, "full", 1.0, (16,) * blocks + (2,)) == 1


def test_compounding_on_coarser_grids_is_never_below():
    law = on_grid(PAIRS["vmf"], 0.005 * PAIRS["vmf"].spread)
    exact, found = law.repeated(300).success(1e-6), law.compounded(300).success(1e-6)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-3)


def test_a_law_under_bounds_is_the_largest_convex_one():
    epsilons = np.arange(-300, 301) * 0.02
    deltas = PAIRS["laplace"].deltas(epsilons)
    law = LossDistribution.under(-300, deltas, 0.02)
    np.testing.assert_allclose(law.deltas, deltas, atol=1e-9)
    bumped = np.where(np.abs(epsilons - 0.5) < 0.2, np.minimum(deltas + 0.05, 1.0), deltas)
    under = LossDistribution.under(-300, bumped, 0.02)
    assert np.all(under.deltas <= bumped + 1e-9) and np.all(under.deltas >= deltas - 1e-9)
    assert under.masses.min() >= 0


# ---- extremes, and what there is no ceiling for ---------------------------------------------------------------------


@in_one_test(
    ("count", "sampling"), [(1, "poisson"), (10**6, "fixed"), (10**15, "full"), (10**15, "poisson"), (1, "fixed")]
)
@pytest.mark.parametrize(
    ("mechanism", "noise", "dimensions"),
    [
        *(("vmf", kappa, dimensions) for kappa in (0.0, 1e-9, 1e7) for dimensions in ((1,), (2, 10**8), (10**12,))),
        *((mechanism, noise, (1,)) for mechanism in ("gaussian", "laplace") for noise in (1e-9, 1e12)),
    ],
)
def test_extreme_numbers(mechanism, noise, dimensions, count, sampling):
    for ceiling in ceilings(release(mechanism, noise, count, sampling, 0.3, dimensions), [1e-12, 0.5, 0.999]):
        assert ceiling.k0 <= ceiling.gamma <= 1
        assert ceiling.theorem


@pytest.mark.parametrize(("kappa", "sampling"), [(2e-5, "full"), (2.0, "poisson"), (2e-5, "fixed")])
def test_a_hundred_million_coordinates_in_small_blocks(kappa, sampling):
    run = release("vmf", kappa, 10_000, sampling, 0.01, (64,) * 1_562_500)
    (ceiling,) = ceilings(run, [0.01])
    distance = kappa * math.sqrt(1_562_500 * 10_000 / 64)
    assert 0.01 <= ceiling.gamma <= exact_normal(0.01, min(distance, 30.0)) * (1 + 2e-3)


@in_one_test("sampling", ["full", "poisson", "fixed"])
def test_without_participation_or_concentration_a_guess_is_all(sampling):
    assert gamma(0.3, "gaussian", 1.0, 0, sampling, 0.2) == 0.3
    assert gamma(0.3, "vmf", 0.0, 5, sampling, 0.2, (10, 20)) == 0.3


@in_one_test("k0", [0.0, 1.0, -0.1, 1.5, math.nan, math.inf])
@in_one_test("mechanism", ["gaussian", "none"])
def test_baselines_are_probabilities(k0, mechanism):
    with pytest.raises(InputError, match="allowed is between 0 and 1, both excluded"):
        ceilings(release(mechanism, 1.0), [k0])


def test_there_is_no_ceiling_without_a_mechanism():
    (ceiling,) = ceilings(Release("none", "example", "full", 1.0, 3, (10,), None, 1e-5), [0.01])
    assert ceiling.gamma is None
    assert ceiling.theorem.startswith("no ceiling: nothing is proven")


@in_one_test("mechanism", ["gaussian", "hgm", "laplace", "vmf"])
@in_one_test("sampling", ["full", "shuffled", "fixed", "poisson"])
def test_every_ceiling_comes_with_its_theorem(mechanism, sampling):
    (ceiling,) = ceilings(release(mechanism, 3.0, 4, sampling, 0.1, (100, 30)), [0.01])
    assert ceiling.theorem.startswith(("sup P(E) where Q(E) <= k0", "Renyi form"))
    assert "Balle" in ceiling.theorem or "Kaissis" in ceiling.theorem
