"""Votes: what noisy answers prove, and what they cost on the votes at hand (Papernot et al. 2017 and 2018).

Voters name one class each, and a neighbour is a poll in which one voter names any other class: two counts move by one.

- For any votes: normal noise of deviation sigma on all counts has sensitivity sqrt(2), so an answer is Gaussian
  differential privacy of mu = sqrt(2) / sigma; normal noise on the largest count alone has sensitivity 1.
- For these votes: where most voters agree, an answer costs far less, but the figure is as private as the votes. Only
  the cost plus noise scaled to its smooth sensitivity may be shown (Nissim, Raskhodnikova and Smith 2007; 2018, B).

Costs are Renyi divergences, by Papernot et al. 2018 (arXiv 1802.08908, theorem 6 and propositions 7, 8 and 10).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from fedpriv.accounting.gaussian import analytic_sigma, gaussian_epsilon
from fedpriv.accounting.proofs import RENYI_TO_EPSILON, Claim
from fedpriv.accounting.renyi import ORDERS, gaussian_rdp, rdp_to_epsilon
from fedpriv.core.errors import InputError

Array = NDArray[np.float64]

_SQRT2 = math.sqrt(2.0)
_HALVINGS = 200  # of an interval of log probabilities: more than a double has digits


# ---- what is proven for any votes ----------------------------------------------------------------------------------


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu of Gaussian differential privacy that is (epsilon, delta)-DP."""
    return 1 / analytic_sigma(epsilon, delta)


def gaussian_votes_claim(mu: float, delta: float) -> Claim:
    """Return the (epsilon, delta) of noisy answers that are Gaussian differential privacy of ``mu`` together."""
    theorem = (
        "normal noise on counts of votes, sensitivity sqrt(2) an answer and 1 a threshold, composed exactly (Dong, "
        "Roth and Su 2022, Cor. 3.3), converted exactly (Balle and Wang 2018, Thm 8)"
    )
    return Claim(gaussian_epsilon(delta, mu), theorem)


# ---- one answer on these votes -------------------------------------------------------------------------------------


def noisy_max_log_q(counts: ArrayLike, sigma: float) -> Array:
    """Return the log of sum Phi(-gap / (sigma sqrt 2)), at most log(1 - 1/K): normal noise changes the winner."""
    gaps = _gaps(counts)
    chances = scipy.special.logsumexp(scipy.special.log_ndtr(-gaps / (sigma * _SQRT2)), axis=-1)
    return np.minimum(chances, math.log1p(-1 / (gaps.shape[-1] + 1)))


def unlikely_rdp(order: ArrayLike, log_q: ArrayLike, sigma: float) -> Array:
    """Return the Renyi cost of an answer that is likeliest but for a probability q (2018, Thm 6 and Prop. 10)."""
    orders, log_q = np.broadcast_arrays(np.asarray(order, np.float64), np.asarray(log_q, np.float64))
    free = gaussian_rdp(orders, sigma / _SQRT2)
    mu2 = sigma * np.sqrt(-log_q)
    mu1, cost2 = mu2 + 1, mu2 / sigma**2
    with np.errstate(divide="ignore", invalid="ignore"):
        small = (mu2 - 1) * cost2 - mu2 * (np.log(mu1 / (mu1 - 1)) + np.log(mu2 / (mu2 - 1)))
        holds = (orders <= mu1) & (mu2 > 1) & (log_q <= small) & (log_q + cost2 < 0)
    # Where the theorem is silent its formula is evaluated at some place where it is not, and thrown away.
    safe_q, safe2 = np.where(holds, log_q, -100.0 - 100 / sigma**2), np.where(holds, mu2, 2.0)
    safe1, cost1 = safe2 + 1, (safe2 + 1) / sigma**2
    likely = np.log1p(-np.exp(safe_q))
    ratio = likely - np.log1p(-np.exp(np.minimum((safe_q + safe2 / sigma**2) * (1 - 1 / safe2), -1e-300)))
    rest = cost1 - safe_q / (safe1 - 1)
    bound = np.logaddexp(likely + (orders - 1) * ratio, safe_q + (orders - 1) * rest) / (orders - 1)
    return np.where(holds, np.clip(bound, 0.0, free), free)


def threshold_rdp(order: ArrayLike, largest: ArrayLike, threshold: float, sigma: float) -> Array:
    """Return the Renyi cost of learning whether the largest count with noise reaches a threshold: data-dependent."""
    z = (np.asarray(largest, np.float64) - threshold) / sigma
    # The likelier of the two outcomes is the one; the other has probability Phi(-|z|).
    return unlikely_rdp(order, scipy.special.log_ndtr(-np.abs(z)), sigma * _SQRT2)


def _gaps(counts: ArrayLike) -> Array:
    """How far the other classes (..., K - 1) are below the largest count."""
    ordered = np.sort(np.asarray(counts, np.float64), axis=-1)
    if ordered.shape[-1] < 2:
        raise ValueError("votes are between two classes or more")
    return ordered[..., -1:] - ordered[..., :-1]


# ---- how much the cost can differ nearby ---------------------------------------------------------------------------


def noisy_max_cost(counts: ArrayLike, sigma: float, order: float) -> Array:
    """Return the data-dependent Renyi cost (...) of noisy maxima on counts (..., K); from q0 on that of any votes."""
    return _capped(noisy_max_log_q(counts, sigma), sigma, order)


def noisy_max_local_sensitivity(counts: Sequence[int], voters: int, sigma: float, order: float) -> Array:
    """Return by how much the cost of a noisy maximum can change with one more vote, d votes away from these.

    The cost grows with q, and from q0 on it is the one of any votes, which may be a jump. A vote changes q to no more
    than B_U(q) and no less than B_L(q); the change is largest between q1 = B_L(q0) and q0, where it is taken for that
    from q1 to q0, jump included. Elsewhere the poll d votes away is taken whose q is nearest to that range (2018,
    Appendix B). It holds where :func:`is_smooth`. For d = 0 to M - 1.
    """
    classes = len(counts)
    log_q0 = _log_q0(sigma, order)
    log_q1 = _log_q1(sigma, order, classes)
    # B_U(q1) = q0 but for rounding, so that the cost at q0 is named and not computed from q1.
    largest = gaussian_rdp(order, sigma / _SQRT2) - unlikely_rdp(order, log_q1, sigma)
    sensitivity = np.full(voters, float(largest))
    log_q = float(noisy_max_log_q(counts, sigma))
    if log_q1 <= log_q <= log_q0:
        return sensitivity
    path = _towards_agreement(counts, voters) if log_q > log_q0 else _towards_a_tie(counts, voters)
    log_qs = noisy_max_log_q(path, sigma)
    arrived = (log_qs <= log_q0) if log_q > log_q0 else (log_qs >= log_q1)
    outside = min(int(np.argmax(arrived)) if arrived.any() else len(path), voters)
    sensitivity[:outside] = _step(log_qs[:outside], sigma, order, classes)
    return sensitivity


def threshold_local_sensitivity(
    counts: Sequence[int], voters: int, threshold: float, sigma: float, order: float
) -> Array:
    """Return by how much the cost of a threshold can change with one more vote, d votes away from these, d from 0."""
    least, most = math.ceil(voters / len(counts)), voters
    costs = threshold_rdp(order, np.arange(least, most + 1), threshold, sigma)
    steps = np.abs(np.diff(costs))
    # At each largest count: a vote more, or a vote less.
    around = np.maximum(np.append(steps, 0.0), np.append(0.0, steps))
    place = min(max(int(max(counts)), least), most) - least
    distances = np.arange(voters)
    up = np.maximum.accumulate(around[place:])
    down = np.maximum.accumulate(around[place::-1])
    return np.maximum(up[np.minimum(distances, len(up) - 1)], down[np.minimum(distances, len(down) - 1)])


def smooth_sensitivity(local: Array, beta: float) -> float:
    """Return the largest exp(-beta d) LS(d) (Nissim, Raskhodnikova and Smith 2007)."""
    return float(np.max(np.exp(-beta * np.arange(len(local))) * local))


def is_smooth(sigma: float, order: float, classes: int) -> bool:
    """Whether :func:`noisy_max_local_sensitivity` holds: its two conditions, verified on a grid of q from 1e-300 on.

    The cost grows with q up to q0, and up to q1 a vote changes it the more the larger q is (2018, conditions C5 and
    C6). At q1 the change has the jump at q0 and is no smaller than before it. A grid is no proof.
    """
    log_q0, log_q1 = _log_q0(sigma, order), _log_q1(sigma, order, classes)
    cost = unlikely_rdp(order, _grid(log_q0), sigma)
    up = _step_up(_grid(log_q1), sigma, order, classes)
    rounding = 1e-13 * order / sigma**2
    return bool(np.all(np.diff(cost) >= -rounding) and np.all(np.diff(up[:-1]) >= -rounding))


def _grid(log_q: float) -> Array:
    return np.linspace(min(-690.0, 2 * log_q), log_q, 20_001)


@lru_cache(maxsize=64)
def _log_q0(sigma: float, order: float) -> float:
    """The log of q0: up to it the cost is below that of any votes, and the theorem's conditions are known to hold."""
    free = float(gaussian_rdp(order, sigma / _SQRT2))
    # Of the paper's authors, who check them there: above it they could fail and hold again.
    high = -(max(1 + 1 / sigma, (order - 0.99) / sigma) ** 2)
    low = high
    while float(unlikely_rdp(order, low, sigma)) >= free:
        high, low = low, 2 * low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if float(unlikely_rdp(order, middle, sigma)) < free else (low, middle)
    return low


def _log_q1(sigma: float, order: float, classes: int) -> float:
    """The log of q1, a hair lower: a poll whose neighbour is at q0 but for rounding counts as one that reaches it."""
    return float(_below(np.array(_log_q0(sigma, order)), sigma, classes)) * (1 + 1e-12)


def _below(log_q: Array, sigma: float, classes: int) -> Array:
    """The log of B_L(q), which q is at least after one more vote."""
    return _shifted(log_q, _SQRT2 / sigma, classes)


def _shifted(log_q: Array, by: float, classes: int) -> Array:
    """The log of q after each of K - 1 equal gaps has changed by two votes."""
    others = math.log(classes - 1)
    return others + scipy.special.log_ndtr(scipy.special.ndtri_exp(np.minimum(log_q - others, -1e-300)) - by)


def _step(log_q: Array, sigma: float, order: float, classes: int) -> Array:
    """How much one vote can change the cost at q."""
    down = _capped(log_q, sigma, order) - _capped(_below(log_q, sigma, classes), sigma, order)
    return np.maximum(_step_up(log_q, sigma, order, classes), down)


def _step_up(log_q: Array, sigma: float, order: float, classes: int) -> Array:
    """By how much one vote can raise the cost at q."""
    return _capped(np.minimum(_shifted(log_q, -_SQRT2 / sigma, classes), 0.0), sigma, order) - _capped(
        log_q, sigma, order
    )


def _capped(log_q: Array, sigma: float, order: float) -> Array:
    """The cost as :func:`noisy_max_cost` has it: that of any votes from q0 on."""
    free = gaussian_rdp(order, sigma / _SQRT2)
    return np.where(log_q >= _log_q0(sigma, order), free, unlikely_rdp(order, log_q, sigma))


def _towards_a_tie(counts: Sequence[int], voters: int) -> NDArray[np.int64]:
    """Polls (D, K) in which 0, 1, ... voters of the largest class name the second instead: q is largest there."""
    ordered = np.sort(np.asarray(counts, np.int64))[::-1]
    distances = np.arange(min(voters, (int(ordered[0]) - int(ordered[1])) // 2 + 2))
    path = np.repeat(ordered[None], len(distances), axis=0)
    path[:, 0] -= distances
    path[:, 1] += distances
    return path


def _towards_agreement(counts: Sequence[int], voters: int) -> NDArray[np.int64]:
    """Polls (D, K) in which 0, 1, ... voters of the largest other class name the largest one: q is least there."""
    poll = np.sort(np.asarray(counts, np.int64))[::-1]
    path = [poll.copy()]
    while len(path) < voters and poll[1:].max() > 0:
        poll[1 + int(np.argmax(poll[1:]))] -= 1
        poll[0] += 1
        path.append(poll.copy())
    return np.stack(path)


# The mechanism is that of Papernot et al. 2018 (arXiv 1802.08908, appendix B); the sensitivities are those of
# :mod:`fedpriv.accounting.votes`. Its cost is the exact divergence. Their Theorem 23 states less than that once 2 order
# beta exceeds about 0.6.


def gnss_rdp(order: ArrayLike, beta: float, noise: float) -> Array:
    """Return what a figure costs with normal noise scaled to its smooth sensitivity, in Renyi divergence: exactly.

    In units of one neighbour's smooth sensitivity the two laws are N(0, noise^2) and N(m, (r noise)^2) with
    exp(-beta) <= r <= exp(beta) and |m| <= min(1, r), since both smooth sensitivities bound the difference. Their
    divergence (Gil, Alajaji and Linder 2013, Table 2) grows with |m|. At |m| = min(1, r) it falls in r up to r = 1;
    from there on it falls and then grows. So it is largest at an end of the range of r, and there it is

        order m^2 / (2 noise^2 v) + log r - log(v / r^2) / (2 (order - 1)),   v = order r^2 + 1 - order.

    It is infinite where v is not positive. The other direction is the same with 1/r.
    """
    orders = np.asarray(order, np.float64)
    return np.maximum(_divergence(orders, -beta, noise), _divergence(orders, beta, noise))


def _divergence(orders: Array, log_ratio: float, noise: float) -> Array:
    """The divergence at one end of the range of r, from v / r^2 without cancellation near order 1."""
    less = -(orders - 1) * math.expm1(-2 * log_ratio)  # v / r^2 = 1 + less
    shift = min(1.0, math.exp(-log_ratio))  # |m| / r
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        means = orders * np.square(shift / noise) / (2 * (1 + less))
        found = means + log_ratio - np.log1p(less) / (2 * (orders - 1))
    return np.where(less > -1, found, np.inf)


@dataclass(frozen=True)
class Sanitiser:
    """How a data-dependent cost is made fit to be shown: settings that are fixed before any vote is seen."""

    order: float  # of the Renyi divergence, above 1
    beta: float  # how fast the sensitivity may fall with distance; order < 1 / (2 beta)
    noise: float  # deviation of the noise, in smooth sensitivities

    def __post_init__(self) -> None:
        if not (self.order > 1 and self.beta > 0 and self.noise > 0 and 2 * self.beta * self.order < 1):
            raise InputError(
                f"order = {self.order:g}, beta = {self.beta:g}, noise = {self.noise:g}: allowed are an order above 1 "
                "and below 1 / (2 beta), and noise above 0"
            )

    @property
    def cost(self) -> float:
        """What showing the figure itself costs, in Renyi divergence."""
        return float(gnss_rdp(self.order, self.beta, self.noise))

    def shown_with(self, mu: float, delta: float) -> Claim:
        """What is proven of answers that are Gaussian differential privacy of ``mu``, and the figure beside them."""
        rdp = ORDERS * mu**2 / 2 + gnss_rdp(ORDERS, self.beta, self.noise)
        theorem = (
            "normal noise on counts of votes, and a sanitised figure shown with the answers (normal noise scaled to a "
            "smooth sensitivity, Papernot et al. 2018, appendix B, by the exact Renyi divergence of two normal laws), "
            f"Renyi accounting{RENYI_TO_EPSILON}"
        )
        return Claim(rdp_to_epsilon(ORDERS, rdp, delta), theorem)

    def epsilon(self, cost: float, sensitivity: float, delta: float, normal: float) -> float:
        """Return the sanitised epsilon, its own cost included; an estimate, which may be below the true one."""
        shown = max(cost + sensitivity * self.noise * normal, 0.0) + self.cost
        return rdp_to_epsilon([self.order], [shown], delta)
