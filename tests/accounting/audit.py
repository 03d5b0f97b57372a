"""Every kind of figure that fedpriv prints against an independent one, over a grid of settings: ``make audit``.

A row fails where our figure is below the independent one, which would be a false claim, or above it by more than the
row allows, which would be a waste of noise. The independent figures are

- ``contour``: an integral in the complex plane (``contour.py``), accurate at any delta, rate and number of steps;
- ``mpmath``, ``scipy``: closed forms with 40 digits, sums and quadrature;
- ``dp-accounting``: its privacy-loss distributions (PLD), which are bounds from above, on a fine grid. Units under
  replace-one: its PLD accountant counts a Gaussian event as sensitivity 2, its Renyi accountant as sensitivity 1;
- ``riskcal``: trade-offs (beta at alpha) and advantages, for ceilings and memberships.

``tests/accounting/test_accounting_audit.py`` has the rows marked as small.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import dp_accounting
import mpmath
import numpy as np
import riskcal.analysis
import scipy
from dp_accounting.pld import privacy_loss_distribution as pld

import fedpriv.mechanisms  # noqa: F401  registers them
from fedpriv.accounting import ORDERS, Release, calibrate, ceilings, gaussian_rdp, proven_epsilon, rdp_to_epsilon
from fedpriv.accounting.ceiling import membership_advantage
from fedpriv.accounting.memorisation import Statement, exposure_ceiling, of_copies, rank_ceiling
from fedpriv.accounting.response import Response, label_guarantee, most_told
from fedpriv.accounting.skellam import LEVELS, rounded_norm
from fedpriv.accounting.votes import gaussian_mu, gaussian_votes_claim, gnss_rdp, noisy_max_log_q, unlikely_rdp
from fedpriv.service.proof import AnswerRelease, answer_guarantee, calibrated_level
from tests.accounting import contour

ROUNDING = 5e-5  # of independent figures, relative
PLD_ROUNDING = 2e-3  # of those that are bounds from above themselves
EXACT = 1e-9


@dataclass(frozen=True)
class Row:
    """One figure."""

    kind: str  # of figure
    setting: str  # what it is a figure of, its adjacency with it
    oracle: str  # where the other one is from, in which unit
    ours: Callable[[], float]  # computes it
    theirs: Callable[[], float]  # computes the other one
    most: float  # ours over theirs at most; infinity: ours is a looser bound, `setting` says why
    rounding: float = ROUNDING  # of the other one, relative
    slack: float = 0.0  # by which ours may be above besides, absolute: a cell of our grid
    small: bool = False  # whether CI computes it

    def checked(self) -> "Result":
        """Compute both."""
        return Result(self, float(self.ours()), float(self.theirs()))


@dataclass(frozen=True)
class Result:
    """A row and its two figures."""

    row: Row
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return 1.0 if self.ours == self.theirs else self.ours / self.theirs if self.theirs else math.inf

    @property
    def fault(self) -> str:
        """What is wrong; empty: nothing."""
        if not self.ours >= self.theirs * (1 - self.row.rounding):
            return "BELOW THE TRUTH"
        return "" if self.ours <= self.theirs * self.row.most + self.row.slack else "too loose"

    def __str__(self) -> str:
        row = self.row
        figures = f"ours {self.ours:.8g}, theirs {self.theirs:.8g} ({row.oracle}), ratio {self.ratio:.6f}"
        rule = f"from {1 - row.rounding:g} to {row.most:g}"
        return f"{row.kind} | {row.setting} | {figures}, allowed {rule} {self.fault}"


def rows() -> Iterator[Row]:
    """All of the grid."""
    for part in (
        *(_unsampled, _poisson_gaussian, _fixed_gaussian, _laplace, _directional, _clients, _distributed),
        *(_calibrations, _ceilings, _memberships, _votes, _sanitiser, _responses, _answers, _memorisation),
    ):
        yield from part()


# ---- epsilon of mechanisms ------------------------------------------------------------------------------------------


def _release(mechanism: str, sampling: str, noise: float, count: int, delta: float, **options: object) -> Release:
    settings = {"rate": 1.0, "dimensions": (1,), "unit": "example", **options}
    return Release(
        mechanism=mechanism,
        sampling=sampling,  # type: ignore[arg-type]
        noise=noise,
        participations=count,
        delta=delta,
        **settings,  # type: ignore[arg-type]
    )


def _epsilon(release: Release, oracle: str, theirs: Callable[[], float], most: float, **options: object) -> Row:
    parameters = f"noise {release.noise:g}, T {release.participations}, delta {release.delta:g}"
    rate = f" q {release.rate:g}" if release.rate < 1 else ""
    sizes = f", K {'+'.join(map(str, release.dimensions[:3]))}" if release.mechanism == "vmf" else ""
    setting = f"{release.mechanism}, {release.sampling}{rate}, {release.adjacency}, {parameters}{sizes}"
    return Row("epsilon", setting, oracle, lambda: proven_epsilon(release), theirs, most, **options)  # type: ignore[arg-type]


def exact_gaussian(mu: float, delta: float) -> float:
    """Epsilon with 40 digits (Balle and Wang 2018, Theorem 8)."""
    with mpmath.workdps(40):
        mu, delta = mpmath.mpf(mu), mpmath.mpf(delta)

        def excess(epsilon: mpmath.mpf) -> mpmath.mpf:
            low, high = mpmath.ncdf(-mu / 2 - epsilon / mu), mpmath.ncdf(mu / 2 - epsilon / mu)
            return high - mpmath.exp(epsilon) * low - delta

        if excess(mpmath.mpf(0)) <= 0:
            return 0.0
        low, high = mpmath.mpf(0), mu * mu / 2 + 40 * mu
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return float(low)


def _unsampled() -> Iterator[Row]:
    """Sensitivity is 2 clip_norm: T releases are one of mu = 2 sqrt(T) / sigma."""
    for name, sampling, sigma, count, delta in product(
        ("gaussian", "hgm"), ("full", "shuffled"), (0.5, 4.0, 1000.0), (1, 30, 10**6), (1e-5, 1e-12)
    ):
        small, mu = name == "hgm" and sampling == "full" and count == 30, 2 * math.sqrt(count) / sigma
        yield _epsilon(
            _release(name, sampling, sigma, count, delta),
            "mpmath, sensitivity 2 clip_norm",
            lambda mu=mu, delta=delta: exact_gaussian(mu, delta),
            1 + EXACT,
            rounding=EXACT,
            small=small,
        )
    # dp-accounting has two units; its PLD accountant's is the ledger's.
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(5.0), 7)
    replaced = dp_accounting.NeighboringRelation.REPLACE_ONE
    release = _release("gaussian", "full", 5.0, 7, 1e-5)
    yield _epsilon(
        release,
        "dp-accounting's PLD accountant, replace-one: sensitivity 2",
        lambda: dp_accounting.pld.PLDAccountant(replaced, 1e-3).compose(event).get_epsilon(1e-5),
        1.0,
        rounding=PLD_ROUNDING,
        small=True,
    )
    # Its Renyi accountant's is 1: at half the noise it gives the ledger's Renyi figure.
    yield Row(
        "Renyi epsilon",
        "gaussian, full, replace-one, noise 10, T 7, delta 1e-05",
        "dp-accounting's Renyi accountant, replace-one: sensitivity 1, so at noise 5",
        lambda: rdp_to_epsilon(ORDERS, 7 * gaussian_rdp(ORDERS, 10.0 / 2), 1e-5),
        lambda: dp_accounting.rdp.RdpAccountant(ORDERS, replaced).compose(event).get_epsilon(1e-5),
        1 + EXACT,
        rounding=EXACT,
        small=True,
    )


_RARE = 1e-9  # epsilons below it are 0


def _poisson_gaussian() -> Iterator[Row]:
    for adjacency, rate, sigma, count, delta in product(
        ("replace-one", "zero-out"), (1e-6, 1e-4, 1e-2, 0.3), (0.5, 0.8, 3.0), (100, 10**4, 10**6), (1e-5, 1e-10)
    ):
        if count * rate > 2000 or (delta < 1e-9 and rate < 1e-2):
            continue  # the first prove nothing; of the others the oracle takes a minute, and there is one below
        small = (rate, sigma, count, delta) in ((1e-2, 0.8, 10**4, 1e-5), (1e-2, 3.0, 100, 1e-10))
        yield _epsilon(
            _release("gaussian", "poisson", sigma, count, delta, rate=rate, adjacency=adjacency),
            "contour",
            lambda row=(adjacency, sigma, rate, count, delta): _poisson_oracle(*row),
            1.02 if rate > 1e-5 else 1.05,  # where rare losses are a million times the usual ones the grid is coarser
            slack=_RARE,
            small=small,
        )
    # The setting in which a Renyi bound was 28 times the truth.
    for adjacency, delta in product(("replace-one", "zero-out"), (1e-5, 1e-12)):
        yield _epsilon(
            _release("gaussian", "poisson", 0.756, 1000, delta, rate=1.03e-4, adjacency=adjacency),
            "contour",
            lambda row=(adjacency, 0.756, 1.03e-4, 1000, delta): _poisson_oracle(*row),
            1.01,
            rounding=5e-4 if delta < 1e-9 else ROUNDING,
            small=delta == 1e-5,
        )


def _poisson_oracle(adjacency: str, sigma: float, rate: float, count: int, delta: float) -> float:
    if adjacency == "replace-one":
        return contour.contour_epsilon([(contour.poisson_replaced(sigma, rate), 1)], count, delta)
    ways = (contour.poisson_zero_out(sigma, rate, comes) for comes in (False, True))
    return max(contour.contour_epsilon([(way, 1)], count, delta) for way in ways)


def _gaussian_delta(mu: float) -> Callable[[np.ndarray], np.ndarray]:
    def delta(epsilons: np.ndarray) -> np.ndarray:
        low = scipy.special.log_ndtr(-mu / 2 - epsilons / mu) + epsilons
        high = scipy.special.log_ndtr(mu / 2 - epsilons / mu)
        return np.exp(high) * -np.expm1(np.minimum(low - high, 0.0))

    return delta


def _fixed_gaussian() -> Iterator[Row]:
    """Of the pair that dominates (Balle, Barthe and Gaboardi 2018, Theorem 9): no run attains it."""
    for rate, sigma, count, delta in product((1e-4, 1e-2, 0.3), (1.0, 8.0), (100, 10**4), (1e-5, 1e-10)):
        if (rate, sigma, count) == (1e-4, 1.0, 100):
            continue  # single rare losses: beyond the contour's reach
        mu = 2 / sigma
        yield _epsilon(
            _release("gaussian", "fixed", sigma, count, delta, rate=rate),
            "contour, sensitivity 2 clip_norm",
            lambda mu=mu, rate=rate, count=count, delta=delta: contour.contour_epsilon(
                [(contour.fixed(_gaussian_delta(mu), mu * mu / 2 + 12 * mu, rate), 1)], count, delta
            ),
            1.02,
            small=(rate, sigma, count, delta) == (1e-2, 8.0, 10**4, 1e-10),
        )


def _laplace() -> Iterator[Row]:
    for scale, delta in product((2.0, 20.0), (1e-5, 1e-10)):  # so few atoms are beyond the contour's reach
        interval = 2 / scale / 1000 * (1 + 1e-12)
        yield _epsilon(
            _release("laplace", "full", scale, 50, delta),
            "dp-accounting's PLD, L1 sensitivity 2 clip_norm",
            lambda row=(scale, interval, delta): float(
                pld.from_laplace_mechanism(row[0] / 2, value_discretization_interval=row[1])
                .self_compose(50)
                .get_epsilon_for_delta(row[2])
            ),
            1.005,
            rounding=PLD_ROUNDING,
            small=scale == 20.0,
        )
    for sampling, scale, count, delta in product(("full", "fixed", "poisson"), (2.0, 20.0), (50, 2000), (1e-5, 1e-10)):
        if count == 50 and sampling != "poisson":
            continue
        rate = {"full": 1.0, "fixed": 0.02, "poisson": 0.3}[sampling]
        shift = 2 / scale
        yield _epsilon(
            _release("laplace", sampling, scale, count, delta, rate=rate),
            "contour, L1 sensitivity 2 clip_norm",
            lambda shift=shift, sampling=sampling, rate=rate, count=count, delta=delta: contour.contour_epsilon(
                [(contour.fixed(_laplace_delta(shift), shift, rate if sampling == "fixed" else 1.0), 1)],
                count,
                delta,
                rate if sampling == "poisson" else 1.0,
            ),
            1.02,
            small=(count, delta, scale) == (2000, 1e-10, 20.0),
        )
    for scale, delta in product((0.5, 3.0), (0.1, 1e-5)):
        yield _epsilon(
            _release("laplace", "full", scale, 1, delta),
            "closed form, delta = 1 - exp((epsilon - shift) / 2)",
            lambda scale=scale, delta=delta: max(0.0, 2 / scale + 2 * math.log1p(-delta)),
            1.01,
            slack=0.02,
            small=True,
        )


def _laplace_delta(shift: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda epsilons: -np.expm1(np.minimum((epsilons - shift) / 2, 0.0))


def _directional() -> Iterator[Row]:
    for sampling, (kappa, dimension), count, delta in product(
        ("full", "poisson"), ((25.0, 15826), (2.0, 3), (0.5, 2), (3.0, 40)), (30, 1000), (1e-5, 1e-10)
    ):
        rate = 0.02 if sampling == "poisson" else 1.0
        yield _epsilon(
            _release("vmf", sampling, kappa, count, delta, rate=rate, dimensions=(dimension,)),
            "contour, by quadrature over the angle",
            lambda row=(kappa, dimension, count, delta, rate): contour.contour_epsilon(
                [(contour.directional(row[0], row[1]), 1)], row[2], row[3], row[4]
            ),
            1.02,
            rounding=2e-4,
            small=(kappa, count, delta) == (0.5, 1000, 1e-5),
        )
    for (kappa, dimension), count in product(((25.0, 15826), (0.5, 2), (1.0, 10)), (100, 1000)):
        yield _epsilon(
            _release("vmf", "fixed", kappa, count, 1e-5, rate=0.02, dimensions=(dimension,)),
            "contour, by quadrature over the angle",
            lambda row=(kappa, dimension, count): contour.contour_epsilon(
                [(_fixed_directions(row[0], row[1]), 1)], row[2], 1e-5
            ),
            1.02,
            rounding=2e-4,
        )
    blocks = (16, 16, 16, 7)
    yield _epsilon(
        _release("vmf", "full", 0.5, 100, 1e-8, dimensions=blocks),
        "contour, by quadrature over the angle",
        lambda: contour.contour_epsilon(
            [(contour.directional(0.5, 16), 3), (contour.directional(0.5, 7), 1)], 100, 1e-8
        ),
        1.02,
        rounding=2e-4,
        small=True,
    )


def _fixed_directions(kappa: float, dimension: int) -> contour.Profile:
    delta = contour.directional_delta(kappa, dimension)
    points = np.linspace(0.0, 2 * kappa, 400)
    return contour.fixed(delta, float(points[delta(points) > 1e-15][-1]), 0.02)


def _clients() -> Iterator[Row]:
    """Central noise on sums of updates: clients in place of examples."""
    for sigma, rounds, rate in product((1.0, 4.0), (100, 1000), (0.01, 0.1)):
        for adjacency in ("replace-one", "zero-out"):
            yield _epsilon(
                _release("central", "poisson", sigma, rounds, 1e-6, rate=rate, adjacency=adjacency, unit="update"),
                "contour",
                lambda row=(adjacency, sigma, rate, rounds, 1e-6): _poisson_oracle(*row),
                1.02,
                small=(sigma, rounds, rate) == (4.0, 1000, 0.1),
            )
    for adjacency, sensitivity in (("replace-one", 2), ("zero-out", 1)):
        mu = sensitivity * math.sqrt(40) / 6.0
        yield _epsilon(
            _release("central", "full", 6.0, 40, 1e-6, adjacency=adjacency, unit="update"),
            f"mpmath, sensitivity {sensitivity} clip_norm",
            lambda mu=mu: exact_gaussian(mu, 1e-6),
            1 + EXACT,
            rounding=EXACT,
            small=True,
        )


def _distributed() -> Iterator[Row]:
    """At such variances Skellam noise is normal to 1e-9: the normal law at the sensitivity after rounding.

    The bound is Renyi accounting at whole orders, which is looser.
    """
    for sigma, rounds, dimension, adjacency in product((1.0, 30.0), (1, 100), (1, 2**20), ("replace-one", "zero-out")):
        sensitivity = (2 if adjacency == "replace-one" else 1) * rounded_norm(dimension) / LEVELS
        mu = sensitivity * math.sqrt(rounds) / sigma
        yield _epsilon(
            _release(
                "distributed", "full", sigma, rounds, 1e-6, adjacency=adjacency, unit="update", dimensions=(dimension,)
            ),
            f"mpmath, normal law of sensitivity {sensitivity:.4g}; ours is Renyi accounting",
            lambda mu=mu: exact_gaussian(mu, 1e-6),
            1.6,
            slack=0.02,
            small=sigma == 30.0,
        )


# ---- calibrations ---------------------------------------------------------------------------------------------------


def _calibrations() -> Iterator[Row]:
    """The true epsilon at the calibrated noise is at most the target, and hardly below."""
    for adjacency, target, (rate, steps) in product(
        ("replace-one", "zero-out"), (0.3, 3.0), ((0.01, 1000), (1e-4, 10**5))
    ):
        release = _release("gaussian", "poisson", 1.0, steps, 1e-6, rate=rate, adjacency=adjacency)
        yield Row(
            "target epsilon over truth",
            f"gaussian, poisson q {rate:g}, {adjacency}, T {steps}, delta 1e-06",
            "contour",
            lambda target=target: target,
            lambda release=release, target=target: _poisson_oracle(
                release.adjacency, calibrate(target, release), release.rate, release.participations, 1e-6
            ),
            1.02,
            small=(target, steps) == (3.0, 1000),
        )
    for target in (0.1, 8.0):
        release = _release("vmf", "full", 1.0, 100, 1e-6, dimensions=(500,))
        yield Row(
            "target epsilon over truth",
            "vmf, full, replace-one, T 100, delta 1e-06, K 500",
            "contour, by quadrature over the angle",
            lambda target=target: target,
            lambda release=release, target=target: contour.contour_epsilon(
                [(contour.directional(calibrate(target, release), 500), 1)], 100, 1e-6
            ),
            1.02,
            rounding=2e-4,
        )
    for mu_target, delta in product((0.5, 5.0), (1e-5, 1e-10)):
        yield Row(
            "mu of votes, reciprocal",
            f"votes, normal noise, epsilon {mu_target:g}, delta {delta:g}",
            "mpmath",
            lambda row=(mu_target, delta): row[0],
            lambda row=(mu_target, delta): exact_gaussian(gaussian_mu(*row), row[1]),
            1 + 1e-6,
            rounding=EXACT,
            small=True,
        )


# ---- ceilings and memberships ---------------------------------------------------------------------------------------


def _ceilings() -> Iterator[Row]:
    for k0, sigma, count in product((1e-4, 0.01, 0.5), (1.0, 10.0), (1, 100)):
        yield Row(
            "ceiling",
            f"gaussian, full, k0 {k0:g}, sigma {sigma:g}, T {count}",
            "riskcal get_beta_from_gdp, mu = sqrt(T) / sigma: with the example against zero in its place",
            lambda row=(sigma, count, k0): _ceiling(_release("gaussian", "full", row[0], row[1], 1e-5), row[2]),
            lambda row=(sigma, count, k0): (
                1 - float(riskcal.analysis.get_beta_from_gdp(math.sqrt(row[1]) / row[0], row[2]))
            ),
            1 + 1e-6,
            rounding=1e-6,
            small=True,
        )
    for k0, (sigma, rate, count) in product((1e-3, 0.1, 0.5), ((1.0, 0.01, 100), (0.6, 0.1, 20), (3.0, 0.3, 300))):
        yield Row(
            "ceiling",
            f"gaussian, poisson q {rate:g}, k0 {k0:g}, sigma {sigma:g}, T {count}",
            "riskcal get_beta_from_plrvs on dp-accounting's PLD, the example goes",
            lambda row=(sigma, rate, count, k0): _ceiling(
                _release("gaussian", "poisson", row[0], row[2], 1e-5, rate=row[1]), row[3]
            ),
            lambda row=(sigma, rate, count, k0): _riskcal_ceiling(*row),
            1.005,
            rounding=PLD_ROUNDING,
            small=(k0, count) == (0.1, 100),
        )
    for k0, shift, count in product((0.01, 0.3), (0.1, 1.0), (1, 30)):
        yield Row(
            "ceiling",
            f"laplace, full, k0 {k0:g}, scale {1 / shift:g}, T {count}",
            "riskcal get_beta_from_pld on dp-accounting's PLD, L1 sensitivity clip_norm",
            lambda row=(shift, count, k0): _ceiling(_release("laplace", "full", 1 / row[0], row[1], 1e-5), row[2]),
            lambda row=(shift, count, k0): (
                1
                - float(
                    riskcal.analysis.get_beta_from_pld(
                        pld.from_laplace_mechanism(1 / row[0], value_discretization_interval=1e-3).self_compose(row[1]),
                        row[2],
                    )
                )
            ),
            1.005,
            rounding=PLD_ROUNDING,
            small=count == 30,
        )


def _ceiling(release: Release, k0: float) -> float:
    gamma = ceilings(release, [k0])[0].gamma
    return math.nan if gamma is None else gamma


def _riskcal_ceiling(sigma: float, rate: float, count: int, k0: float) -> float:
    # The pair of one direction; riskcal would take the worse of both, which no ceiling needs.
    loss = pld.from_gaussian_mechanism(sigma, sampling_prob=rate, value_discretization_interval=1e-3)
    one_way = replace(riskcal.analysis.pld_to_plrvs(loss.self_compose(count)), is_symmetric=True)
    return 1 - float(riskcal.analysis.get_beta_from_plrvs(one_way, k0))


def _memberships() -> Iterator[Row]:
    for epsilon, delta in product((0.0, 0.1, 1.0, 8.0), (0.0, 1e-5, 0.1)):
        yield Row(
            "membership advantage",
            f"epsilon {epsilon:g}, delta {delta:g}",
            "riskcal get_advantage_from_adp",
            lambda row=(epsilon, delta): membership_advantage(*row),
            lambda row=(epsilon, delta): float(riskcal.analysis.get_advantage_from_adp(*row)),
            1 + EXACT,
            rounding=EXACT,
            slack=1e-15,
            small=True,
        )


# ---- votes, answers, labels, memorisation ---------------------------------------------------------------------------


def _votes() -> Iterator[Row]:
    for sigma, answers, delta in product((10.0, 40.0), (1, 286, 10**5), (1e-5, 1e-10)):
        mu = math.sqrt(2 * answers) / sigma
        yield Row(
            "epsilon of votes",
            f"normal noise, one voter's votes become others, sigma {sigma:g}, {answers} answers, delta {delta:g}",
            "mpmath, sensitivity sqrt(2)",
            lambda row=(mu, delta): gaussian_votes_claim(*row).epsilon,
            lambda row=(mu, delta): exact_gaussian(*row),
            1 + EXACT,
            rounding=EXACT,
            small=True,
        )
    # Of one noisy maximum of two classes the truth is the divergence of two coins.
    for gap, noise, order in product((1, 10, 60), (5.0, 20.0), (2.0, 10.0, 40.0)):
        counts = (100 + gap, 100)
        yield Row(
            "Renyi cost of a vote",
            f"normal noise {noise:g}, counts {counts}, order {order:g}; a bound for any number of classes, so looser",
            "scipy, exact for the two ways in which a vote can change",
            lambda row=(order, counts, noise): float(unlikely_rdp(row[0], noisy_max_log_q(*row[1:]), row[2])),
            lambda row=(gap, noise, order): _coins(*row),
            math.inf,
            rounding=EXACT,
            slack=0.0,
            small=gap == 10,
        )


def _coins(gap: int, noise: float, order: float) -> float:
    """The divergence between the answers on these votes and on those with one vote more or less for the winner."""

    def log_chances(gap: float) -> np.ndarray:
        return np.asarray(scipy.special.log_ndtr(np.array([gap, -gap]) / (noise * math.sqrt(2))))

    here = log_chances(gap)
    there = [log_chances(gap + change) for change in (-2, 2)]
    return max(float(scipy.special.logsumexp(order * here + (1 - order) * each)) / (order - 1) for each in there)


def _sanitiser() -> Iterator[Row]:
    """Normal laws whose means are a smooth sensitivity apart, and whose deviations differ by exp(beta) either way."""
    for order, share, noise in product((2.0, 10.0, 24.0), (0.02, 0.1, 0.2, 0.4, 0.48), (1.0, 10.0)):
        beta = share / order
        yield Row(
            "Renyi cost of a sanitised figure",
            f"order {order:g}, beta {beta:.4g}, noise {noise:g}",
            "closed form of two normal laws (Mironov 2017, Gil et al. 2013), the larger of both variance ratios",
            lambda row=(order, beta, noise): float(gnss_rdp(*row)),
            lambda row=(order, beta, noise): max(_normals(*row, sign) for sign in (-1, 1)),
            math.inf,
            rounding=EXACT,
        )


def _normals(order: float, beta: float, noise: float, sign: int) -> float:
    """Renyi divergence of a normal law at noise sensitivities from one at noise exp(sign beta) of them."""
    other = math.exp(sign * beta)
    mixed = order * other**2 + 1 - order
    if mixed <= 0:
        return math.inf
    moved = min(1.0, other) / noise  # the figure moves by no more than either poll's smooth sensitivity
    return math.log(other) + math.log(other**2 / mixed) / (2 * (order - 1)) + order * moved**2 / (2 * mixed)


def _responses() -> Iterator[Row]:
    for epsilon, answers in product((0.1, 1.0, 8.0), (2, 10, 1000)):
        response = Response(epsilon, answers)
        yield Row(
            "epsilon of labels",
            f"one label becomes any other, epsilon {epsilon:g}, {answers} answers",
            "the largest log ratio of the law that labels are drawn by",
            lambda response=response: float(label_guarantee(response).pure_epsilon or math.nan),
            lambda response=response: math.log(response.keep / response.other),
            1 + EXACT,
            rounding=EXACT,
            small=True,
        )
        for k0 in (1 / answers, 0.7):
            yield Row(
                "ceiling of labels",
                f"epsilon {epsilon:g}, {answers} answers, best guess {k0:.3g}",
                "the trade-off of the law, by enumeration; reached where all truths are as likely",
                lambda row=(epsilon, k0): most_told(*row),
                lambda response=response, k0=k0: _label_success(response, k0),
                1 + EXACT if k0 == 1 / answers else math.inf,
                rounding=EXACT,
                small=True,
            )


def _label_success(response: Response, k0: float) -> float:
    """How often the best rule names the truth, one of which has the share k0 and the others the same each."""
    shares = np.full(response.answers, (1 - k0) / (response.answers - 1))
    shares[0] = k0
    matrix = np.full((response.answers, response.answers), response.other)
    np.fill_diagonal(matrix, response.keep)
    return float((shares[:, None] * matrix).max(axis=0).sum())


def _answers() -> Iterator[Row]:
    for law, count, delta in product(("gaussian", "pure"), (1, 20, 1000), (1e-5, 1e-9)):
        level = 0.1
        release = AnswerRelease(law, level, count, delta)
        yield Row(
            "epsilon of answers",
            f"{law}, level {level:g}, {count} answers, delta {delta:g}",
            "mpmath" if law == "gaussian" else "mpmath, the binomial sum of randomised responses",
            lambda release=release: float(answer_guarantee(release).epsilon or 0.0),
            lambda release=release: _answer_oracle(release),
            1 + 1e-6,
            rounding=EXACT,
            slack=1e-6,
            small=count == 20,
        )
    for count, target in product((10, 1000), (0.5, 4.0)):
        release = AnswerRelease("gaussian", 1.0, count, 1e-6)
        yield Row(
            "target epsilon over truth",
            f"answers with normal noise, {count} answers, delta 1e-06",
            "mpmath",
            lambda target=target: target,
            lambda release=release, target=target: exact_gaussian(
                calibrated_level(release, target) * math.sqrt(release.releases), 1e-6
            ),
            1 + 1e-6,
            rounding=EXACT,
            small=True,
        )


def _answer_oracle(release: AnswerRelease) -> float:
    if release.law == "gaussian":
        return exact_gaussian(release.level * math.sqrt(release.releases), release.delta)
    with mpmath.workdps(40):
        true, count = 1 / (1 + mpmath.exp(-mpmath.mpf(release.level))), release.releases
        lies = [mpmath.binomial(count, k) * true ** (count - k) * (1 - true) ** k for k in range(count + 1)]

        def delta(epsilon: mpmath.mpf) -> mpmath.mpf:
            factor = mpmath.exp(epsilon)
            return sum(max(0, lies[k] - factor * lies[count - k]) for k in range(count // 2 + 1))

        low, high = mpmath.mpf(0), count * mpmath.mpf(release.level)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if delta(middle) > release.delta else (low, middle)
        return float(low)


_SPACE = 10**6  # secrets


def _memorisation() -> Iterator[Row]:
    for epsilon, delta, copies in product((0.1, 1.0), (0.0, 1e-6), (1, 5)):
        statement = Statement(epsilon, delta)
        yield Row(
            "delta of several copies",
            f"epsilon {epsilon:g}, delta {delta:g}, {copies} copies",
            "mpmath, delta (e^(c epsilon) - 1) / (e^epsilon - 1)",
            lambda row=(statement, copies): of_copies(*row).delta,
            lambda row=(epsilon, delta, copies): float(
                row[1] * mpmath.expm1(row[2] * mpmath.mpf(row[0])) / mpmath.expm1(mpmath.mpf(row[0]))
            ),
            1 + EXACT,
            rounding=EXACT,
            small=True,
        )
        yield Row(
            "mean exposure",
            f"epsilon {epsilon:g}, delta {delta:g}, {_SPACE} secrets",
            "scipy quadrature of the chance of each exposure",
            lambda statement=statement: float(exposure_ceiling([statement], _SPACE) or math.nan),
            lambda statement=statement: scipy.integrate.quad(
                lambda bits: min(1.0, math.exp(statement.epsilon) * 2.0**-bits + statement.delta),
                *(0.0, math.log2(_SPACE)),
                limit=500,
                epsabs=1e-12,
            )[0],
            1 + 1e-6,
            rounding=1e-6,
            small=True,
        )
        yield Row(
            "chance of an exposure of 10 bits",
            f"epsilon {epsilon:g}, delta {delta:g}",
            "riskcal get_beta_from_adp at alpha = 2^-10",
            lambda statement=statement: rank_ceiling([statement], 10.0, _SPACE),
            lambda statement=statement: (
                1 - float(riskcal.analysis.get_beta_from_adp(statement.epsilon, statement.delta, 2.0**-10))
            ),
            1 + EXACT,
            rounding=EXACT,
            small=True,
        )


# ---- the audit ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Check all rows, or those with a word; print the worst ratios of each kind. 1: a row failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only rows whose kind, setting or oracle has one of these words")
    parser.add_argument("--verbose", action="store_true", help="print every row")
    options = parser.parse_args()
    chosen = [
        row
        for row in rows()
        if not options.words or any(word in f"{row.kind} {row.setting} {row.oracle}" for word in options.words)
    ]
    results, began = [], time.monotonic()
    for place, row in enumerate(chosen, 1):
        result = row.checked()
        results.append(result)
        if result.fault or options.verbose:
            print(result, flush=True)
        if place % 25 == 0 or place == len(chosen):
            print(f"{place} of {len(chosen)} rows, {time.monotonic() - began:.0f} s", flush=True)
    for kind in dict.fromkeys(row.kind for row in chosen):
        ratios = [result.ratio for result in results if result.row.kind == kind]
        print(f"{kind}: {len(ratios)} rows, ours over theirs from {min(ratios):.6f} to {max(ratios):.6f}")
    return int(any(result.fault for result in results))


if __name__ == "__main__":
    sys.exit(main())
