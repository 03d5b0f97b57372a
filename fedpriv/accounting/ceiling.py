"""Ceilings: success rates that no attack exceeds, for any network and any background knowledge.

Let z be the secret, independent of all else that the adversary knows, y all that it sees of it in a run, mu_z the law
of y, and S the success of an attack R. Nobody who guesses without y succeeds with a probability above the baseline k0.
Let nu be any law of y that does not depend on z, and (P, Q) a pair with H_l(mu_z || nu) <= H_l(P || Q) for all z and
l = exp(epsilon) >= 0, where H_l(P || Q) = delta(epsilon) = sup over events of P - l Q. Then

    P[S(z, R(y))] <= gamma = sup{P(E): Q(E) <= k0} = min over epsilon of exp(epsilon) k0 + delta(epsilon).

Proof. E_z = {y: S(z, R(y))}; mu_z(E_z) <= l nu(E_z) + H_l for every l. On average over z nu(E_z) is at most k0, because
nu does not depend on z. What is made of y (sums, secure aggregation, training) and adaptive parameters change nothing.

Prior art: reconstruction robustness, in the Renyi form (Balle, Cherubin and Hayes 2022); the blow-up function (Hayes,
Mahloujifar and Balle 2023); gamma from the trade-off (Kaissis et al. 2023, arXiv 2307.03928; Kulynych et al. 2025, also
for re-identification and attributes); several people at once (Swanberg et al. 2025); Bayes' capacity of directional
noise, the limit of small k0 (Biswas, Dras, Faustini et al. 2025). Directional noise is compared with uniform directions
here, and composed exactly.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial, reduce

import numpy as np
import scipy
from numpy.typing import NDArray

from fedpriv.accounting.amplification import amplified_pure, tagged_rdp
from fedpriv.accounting.gaussian import check_statement
from fedpriv.accounting.numerical import LossDistribution
from fedpriv.accounting.pairs import GaussianPair, Pair, before_sampling
from fedpriv.accounting.proofs import Proof
from fedpriv.accounting.references import (
    LARGEST_LOSS,
    MOST_CELLS,
    SHARE_OF_SPREAD,
    CeilingReference,
    ReferencePair,
    batch_loss,
    grid,
    grid_interval,
    joined_loss,
    repeated_loss,
    rounded_loss,
)
from fedpriv.accounting.release import Release
from fedpriv.accounting.renyi import ORDERS
from fedpriv.core.errors import InputError
from fedpriv.core.records import Ceiling, MembershipBound
from fedpriv.core.registry import MECHANISMS

Array = NDArray[np.float64]
Bound = tuple[Callable[[float], float], str]
"""Gamma as a function of k0, and what it rests on besides the pair."""

_FINEST = 1e-6  # on finer grids differences of deltas drown in rounding
_RARE_LOSS = 40.0  # one below its opposite has a probability below exp(-40)
# The Fourier transform rounds absolutely, by about 1e-17 a release.
_ROUNDING, _ROUNDING_PER_RELEASE = 1e-12, 1e-15
_MOST_COMPOSED = 10**12
_BEYOND_ENDS = 1e-15  # at least the probability of a single loss that lies outside the ends of its pair
_SEARCHED = 2001
_MANY, _DEVIATIONS = 100, 40.0
# A loss of a step with the secret: the noise hides nothing, and the loss cannot be computed exactly.
_TELLS_ALL = 5000.0

_BLOW_UP = "sup P(E) where Q(E) <= k0 (Hayes, Mahloujifar and Balle 2023; Kaissis et al. 2023, arXiv 2307.03928)"
_NORMAL = f"{_BLOW_UP}, T participations as one of sqrt(T) times the distance (Dong, Roth and Su 2022, Cor. 3.3)"
_NORMAL_TEST = (
    "the best test of two normal laws (Neyman and Pearson), T releases as one of sqrt(T) times the distance (Dong, "
    "Roth and Su 2022, Cor. 3.3)"
)
_COMPOSED = ", privacy-loss distributions composed numerically with pessimistic rounding"
_TAKING_PART = "a step with the secret tells it, the others do not depend on it"
_RENYI = "Renyi form, (k0 exp(D_a))^((a - 1) / a) (Balle, Cherubin and Hayes 2022)"
_TAGGED = "; who took part is told the adversary, because it does not depend on the secret"
_HIDDEN = "; batches of a fixed size hide who took part (Balle, Barthe and Gaboardi 2018, Thm 2)"


def ceilings(release: Release, baselines: Iterable[float]) -> tuple[Ceiling, ...]:
    """Return the smallest proven ceiling for each baseline.

    Args:
        release: all that one client releases in a run; its delta and its adjacency are ignored.
        baselines: k0, in (0, 1).

    Raises:
        InputError: a baseline out of range.
    """
    checked = [check_baseline(baseline) for baseline in baselines]
    proof: Proof = MECHANISMS[release.mechanism].proof()(release)
    reference = proof.reference()
    if reference is None:
        return tuple(Ceiling(k0, None, f"no ceiling: {proof.no_reference}") for k0 in checked)
    if release.participations == 0:
        return tuple(Ceiling(k0, k0, "no participation: nothing that depends on it was released") for k0 in checked)
    bounds = _bounds(release)
    return tuple(_smallest(bounds, reference, k0) for k0 in checked)


def check_baseline(baseline: float, key: str = "k0") -> float:
    """Return a baseline, or another probability between 0 and 1, as a float; others are refused under their key."""
    if not 0 < baseline < 1:
        raise InputError(key=key, given=baseline, allowed="allowed is between 0 and 1, both excluded")
    return float(baseline)


def quick_ceiling(release: Release, k0: float) -> float:
    """Return a ceiling within milliseconds, never below :func:`ceilings`'s; 1 where there is none."""
    proof: Proof = MECHANISMS[release.mechanism].proof()(release)
    reference = proof.reference()
    if reference is None:
        return 1.0
    rate = 1.0 if reference.is_hidden else _rate(release)
    return max(_renyi(int(release.participations) * tagged_rdp(ORDERS, reference.rdp(ORDERS), rate), k0), k0)


def _smallest(bounds: Iterable[Bound], reference: CeilingReference, k0: float) -> Ceiling:
    gamma, how = min(((bound(k0), how) for bound, how in bounds), key=lambda claim: claim[0])
    return Ceiling(k0, min(max(gamma, k0), 1.0), f"{how}: {reference.theorem}")


@lru_cache(maxsize=4)
def _bounds(release: Release) -> tuple[Bound, ...]:
    """All that is proven; kept, because most clients of a run share one release, with baselines of their own."""
    proof = MECHANISMS[release.mechanism].proof()(release)
    return tuple(_proven(proof, proof.reference()))


def _proven(proof: Proof, reference: CeilingReference) -> Iterator[Bound]:
    count, rate = int(proof.release.participations), 1.0 if reference.is_hidden else _rate(proof.release)
    tagged = _TAGGED if rate < 1 else ""
    first, number = reference.parts[0]
    sole = first if number == len(reference.parts) == 1 else None
    if reference.spread == 0:
        yield lambda k0: k0, _BLOW_UP
        return
    if sole is not None and rate == 1 and sole.is_normal:
        yield lambda k0: float(scipy.special.ndtr(scipy.special.ndtri(k0) + sole.spread * math.sqrt(count))), _NORMAL
        return
    if sole is not None and reference.is_hidden:
        yield partial(_taking_part, float(proof.release.rate), count), _TAKING_PART
        if first.largest > _TELLS_ALL:
            return
    yield partial(_renyi, count * tagged_rdp(ORDERS, reference.rdp(ORDERS), rate)), f"{_RENYI}{tagged}"
    if sole is not None and count == 1:
        yield partial(_single, sole, rate), f"{_BLOW_UP}{tagged}"
    if count * reference.pieces > _MOST_COMPOSED or _is_certain(reference, count * rate):
        return
    if proof.is_sampled:
        yield _hidden(proof, reference), f"{_BLOW_UP}{_COMPOSED}{_HIDDEN}"
        if reference.batch_spread < 1:  # what holds where it is known who took part is never less, but for its grid
            return
    if sole is None or count > 1:
        yield _composed(reference, count, rate), f"{_BLOW_UP}{_COMPOSED}{tagged}"


def _taking_part(rate: float, count: int, k0: float) -> float:
    """Return gamma where each batch with the secret tells it, and the others are those of a run without it."""
    return 1 - math.exp(count * math.log1p(-rate)) * (1 - k0)


def _is_certain(reference: CeilingReference, participations: float) -> bool:
    """Whether so many participations tell so much that composition, which takes long then, gives 1 like the others."""
    return participations >= _MANY and reference.batch_spread * math.sqrt(participations) > _DEVIATIONS


def _renyi(divergences: Array, k0: float) -> float:
    """Return the least (k0 exp(D_a))^((a - 1) / a) over the orders a of the ledger."""
    return math.exp(min(float(np.min((math.log(k0) + divergences) * (ORDERS - 1) / ORDERS)), 0.0))


def _single(pair: ReferencePair, rate: float, k0: float) -> float:
    """Return gamma of a single release by one pair, without a grid."""

    def claims(epsilons: Array) -> Array:
        tagged = rate * pair.deltas(epsilons) + (1 - rate) * np.maximum(-np.expm1(epsilons), 0.0)
        return np.exp(epsilons) * k0 + tagged

    lowest = max(pair.smallest, -LARGEST_LOSS)
    # From -log(k0) on a claim is at least 1.
    if lowest >= -math.log(k0):
        return 1.0
    grid = np.linspace(lowest, min(pair.largest, -math.log(k0)), _SEARCHED)
    known = claims(grid)
    best = int(np.argmin(known))
    around = (grid[max(best - 1, 0)], grid[min(best + 1, _SEARCHED - 1)])
    least = scipy.optimize.minimize_scalar(
        lambda epsilon: float(claims(np.array([epsilon]))[0]), bounds=around, options={"xatol": 1e-9}
    )
    return min(float(least.fun), float(known[best])) + _BEYOND_ENDS


def _composed(reference: CeilingReference, count: int, rate: float) -> Callable[[float], float]:
    """Return gamma by the loss of a whole run."""
    pair, number = reference.parts[0]
    if rate == 1 and len(reference.parts) == 1:
        whole = repeated_loss(rounded_loss(pair, reference.interval), number * count)
    else:
        whole = repeated_loss(batch_loss(reference).tagged(rate), count)
    return partial(_success, whole, count * reference.pieces)


def _hidden(proof: Proof, reference: CeilingReference) -> Callable[[float], float]:
    """Return gamma of batches of a fixed size, of which it is not known who took part.

    Let A be the law of a batch without z, M and M' those with it and with something in its place, so that mu = (1 - q)
    A + q M and nu = (1 - q) A + q M'. With v = 1 + q (l - 1) and b = v / l, l >= 1 (advanced joint convexity, Balle,
    Barthe and Gaboardi 2018, Theorem 2)

        H_v(mu || nu) <= q [(1 - b) H_l(M || A) + b H_l(M || M')],      H_v(nu || mu) <= q H_l(M' || M).

    M and A are neighbours under replace-one, M and M' have the reference pair. What is known without hiding holds, too.
    """
    rate, count = float(proof.release.rate), int(proof.release.participations)
    batch = batch_loss(reference)
    replaced = proof.batch_pair()
    highest = min(amplified_pure(max(replaced.largest, float(batch.losses[-1])), rate), LARGEST_LOSS)
    lowest = amplified_pure(min(-float(batch.losses[0]), _RARE_LOSS), rate)
    spread = rate * math.sqrt(math.expm1(min(reference.batch_spread, 1.0) ** 2))
    interval = max(SHARE_OF_SPREAD * spread, (highest + lowest) / MOST_CELLS, _FINEST)
    above, below = (grid(0, math.ceil(end / interval), interval) for end in (highest, lowest))
    exponents = before_sampling(above, rate)
    share = rate + (1 - rate) * np.exp(-exponents)  # b
    forward = rate * ((1 - share) * replaced.deltas(exponents) + share * batch.deltas_at(exponents))
    forward = np.minimum(forward, rate * batch.deltas_at(above))
    # H_v(mu || nu) = 1 - v + v H_(1/v)(nu || mu), and so for M and M'.
    exponents = before_sampling(below, rate)
    odds = np.minimum(exponents, LARGEST_LOSS)
    backward = rate * (np.exp(odds) * batch.deltas_at(-odds) - np.expm1(odds))
    deltas = -np.expm1(-below) + np.exp(-below) * np.maximum(backward, 0.0)
    step = LossDistribution.under(1 - below.size, np.concatenate([deltas[:0:-1], forward]), interval)
    return partial(_success, repeated_loss(step, count), count * reference.pieces)


def _success(law: LossDistribution, releases: int, k0: float) -> float:
    return law.success(k0) + max(_ROUNDING, _ROUNDING_PER_RELEASE * releases)


def _rate(release: Release) -> float:
    return float(release.rate) if release.sampling in ("fixed", "poisson") else 1.0


# ---- membership -----------------------------------------------------------------------------------------------------


def membership_bound(release: Release, rates: Iterable[float] = ()) -> MembershipBound:
    """Return how well any test can infer a record's membership from all releases, under the release's adjacency.

    Args:
        release: all that one client releases in a run; its delta is ignored.
        rates: false positive rates, in (0, 1).

    Raises:
        InputError: a rate out of range, or no dominating pair of the mechanism is known.
    """
    checked = [check_baseline(rate, "fpr") for rate in rates]
    proof: Proof = MECHANISMS[release.mechanism].proof()(release)
    if type(proof).dominating_pairs is Proof.dominating_pairs:
        known = [
            name for name, kind in MECHANISMS.items() if kind.proof().dominating_pairs is not Proof.dominating_pairs
        ]
        allowed = f"no pair of laws is known that dominates it; allowed: {', '.join(known)}"
        raise InputError(key="mechanism", given=release.mechanism, allowed=allowed)
    if release.participations == 0:
        return MembershipBound(0.0, tuple((rate, rate) for rate in checked), "no participation", proof.adjacency)
    pair, number = proof.tightest_runs()[0][0]
    if isinstance(pair, GaussianPair) and number == 1:
        advantage = 2 * float(scipy.special.ndtr(pair.mu / 2)) - 1
        powers = [float(scipy.special.ndtr(scipy.special.ndtri(rate) + pair.mu)) for rate in checked]
        return MembershipBound(advantage, tuple(zip(checked, powers, strict=True)), _NORMAL_TEST, proof.adjacency)
    laws, rounding = _run_laws(release), max(_ROUNDING, _ROUNDING_PER_RELEASE * release.participations)
    slack = rounding + (proof.delta_of_sampling if proof.is_allocated else 0.0)
    advantage = max(float(law.deltas_at(np.zeros(1))[0]) for law in laws) + slack
    powers = [min(max(law.success(rate) for law in laws) + slack, 1.0) for rate in checked]
    found = tuple(zip(checked, powers, strict=True))
    return MembershipBound(min(advantage, 1.0), found, proof.tightest_theorem, proof.adjacency)


@lru_cache(maxsize=4)
def _run_laws(release: Release) -> tuple[LossDistribution, ...]:
    """The loss of a whole run, for each order of the neighbours; kept, because a target asks for one many times."""
    return tuple(map(_run_law, MECHANISMS[release.mechanism].proof()(release).tightest_runs()))


def _run_law(parts: tuple[tuple[Pair, int], ...]) -> LossDistribution:
    count = sum(number for _, number in parts)
    spread = math.sqrt(sum(number * pair.spread**2 for pair, number in parts) / count)
    largest = min(max(pair.largest for pair, _ in parts), LARGEST_LOSS)
    interval = grid_interval(spread, largest, largest, max(pair.finest for pair, _ in parts))
    laws = (repeated_loss(LossDistribution.of(pair, interval, largest), number) for pair, number in parts)
    return reduce(joined_loss, (law.narrowed(LARGEST_LOSS) for law in laws))


def membership_advantage(epsilon: float, delta: float) -> float:
    """Return what true minus false positive rate is at most: (e^epsilon - 1 + 2 delta) / (e^epsilon + 1)."""
    check_statement(epsilon, delta)
    return float(1 - 2 * (1 - delta) * scipy.special.expit(-epsilon))


def membership_auc(epsilon: float, delta: float) -> float:
    """Return what the area under the curve is at most: (e^epsilon + delta) / (1 + e^epsilon)."""
    check_statement(epsilon, delta)
    return float(1 - (1 - delta) * scipy.special.expit(-epsilon))
