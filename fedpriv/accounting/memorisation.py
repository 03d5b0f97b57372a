"""What differential privacy says about secrets in training data: ceilings of exposure, for any training and any attack.

A canary's secret z is uniform among |R|, and c sequences of one client hold it. Let mu_z be the law of the model, nu
that of the model with anything else in their place (replace-one), or with sequences that add nothing (zero-out), which
does not depend on z. From (epsilon, delta) for one sequence follows for c of them
(c epsilon, delta (e^(c epsilon) - 1) / (e^epsilon - 1)), by induction over the copies (Vadhan 2017, Lemma 2.2, before
it is rounded up); where whole clients are protected, all copies that one client holds count once. The event that z has
rank k or less among all secrets has under nu on average the probability k / |R|, so that

    P[rank <= k] <= e^epsilon k / |R| + delta,    P[exposure >= t] <= e^epsilon 2^-t + delta

with exposure = log2 |R| - log2 rank (Carlini et al. 2019), and the mean exposure is at most the integral of the latter,
cut off at 1, from 0 to log2 |R|. With epsilon = delta = 0 it is 1 / ln 2 = 1.44 bits, the mean of a uniform rank. Where
m other secrets are drawn that are all different, z is uniform among |R| - m, whatever the others are, which is as if
epsilon were larger by ln(|R| / (|R| - m)).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import scipy

from fedpriv.accounting.gaussian import check_statement
from fedpriv.core.errors import InputError


class Statement(NamedTuple):
    """(epsilon, delta)-differential privacy."""

    epsilon: float
    delta: float


def of_copies(statement: Statement, copies: int) -> Statement:
    """Return what a statement about one sequence says about several together."""
    epsilon, delta = statement
    check_statement(epsilon, delta)
    if not copies >= 1:
        raise InputError(key="copies", given=copies, allowed="allowed is from 1")
    if not delta:
        return Statement(copies * epsilon, 0.0)
    # Sum of e^(i epsilon) over i < copies, the largest taken out so that nothing overflows.
    shrunk = math.fsum(math.exp(-number * epsilon) for number in range(copies))
    logarithm = math.log(delta) + (copies - 1) * epsilon + math.log(shrunk)
    return Statement(copies * epsilon, math.exp(min(0.0, logarithm)))


def among_others(statement: Statement, space: int, others: int) -> Statement:
    """Return the statement about a secret that differs from others, from which its rank among all has its ceilings."""
    return statement._replace(epsilon=statement.epsilon + math.log(space / (space - others)))


def rank_ceiling(statements: Iterable[Statement], bits: float, space: int) -> float:
    """Return the largest probability that a secret has an exposure of at least so many bits; 1 without statements."""
    if bits > math.log2(space):
        return 0.0
    return min((_at_least(statement, bits) for statement in statements), default=1.0)


def exposure_ceiling(statements: Iterable[Statement], space: int) -> float | None:
    """Return what the mean exposure is at most, in bits; ``None``: nothing is proven, or no less than log2 |R|."""
    most = math.log2(space)
    smallest = min((_mean(statement, most) for statement in statements), default=most)
    return smallest if smallest < most else None


def guessed_exposure(space: int) -> float:
    """Return the mean exposure in bits of a secret that is not known: of log2 |R| - log2 k over k = 1..|R|."""
    if space > 1 << 50:  # the difference of two large numbers has no digits left
        return 1 / math.log(2)
    return math.log2(space) - float(scipy.special.gammaln(space + 1)) / (space * math.log(2))


def _at_least(statement: Statement, bits: float) -> float:
    exponent = statement.epsilon - bits * math.log(2)
    return min(1.0, math.exp(min(0.0, exponent)) + statement.delta) if exponent < 0 else 1.0


def _mean(statement: Statement, most: float) -> float:
    """The integral of min(1, e^epsilon 2^-t + delta) over t from 0 to ``most``."""
    epsilon, delta = statement
    if delta >= 1:
        return most
    flat = (epsilon - math.log1p(-delta)) / math.log(2)
    if flat >= most:
        return most
    falling = math.exp(epsilon - flat * math.log(2)) - math.exp(epsilon - most * math.log(2))
    return flat + falling / math.log(2) + delta * (most - flat)
