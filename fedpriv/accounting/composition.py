"""Composition of pure differential privacy, exactly: T releases that are epsilon-DP each.

Every epsilon-DP mechanism is a function of the answer of randomised response, which tells the truth with probability
exp(epsilon) / (1 + exp(epsilon)), so T adaptive releases are no worse than T answers, and those are the worst case
(Kairouz, Oh and Viswanath 2017, Theorem 3.3). Of T answers only the number of lies matters, which is binomial.
"""

import math

import numpy as np
import scipy

LARGEST_COUNT = 10_000_000  # releases; the time goes with the root of it

_LOG_LEFT_OUT = 46.0  # the probability of fewer lies than are looked at is below exp(-46) delta = 1e-20 delta
_ALLOWANCE = 1e-10  # relative, above the rounding of the binomial probabilities; it keeps the result an upper bound


def pure_composition_epsilon(epsilon: float, count: int, delta: float) -> float:
    """Return the smallest epsilon' such that any ``count`` epsilon-DP releases are (epsilon', delta)-DP together.

    With i lies among T answers the privacy loss is (T - 2 i) epsilon. So delta at epsilon' is A_k - exp(epsilon') B_k,
    where k is the largest number of lies with a loss above epsilon', A_k and B_k are the probabilities of at most k
    lies under the one and the other data.

    Infinity for a count above 10 million.
    """
    if count > LARGEST_COUNT:
        return math.inf
    if count == 0 or epsilon == 0:
        return 0.0
    first, last = _window(epsilon, count, delta)
    lies = np.arange(first, last + 1, dtype=np.float64)
    # From one number of lies to the next, in logs: both probabilities have the binomial coefficients in common.
    ratios = np.log((count - lies[:-1]) / lies[1:])
    log_a = _log_binomial(first, count, epsilon) + np.concatenate([[0.0], np.cumsum(ratios - epsilon)])
    log_b = log_a - (count - 2 * lies) * epsilon
    at_most_a = np.exp(np.logaddexp.accumulate(log_a)) * (1 + _ALLOWANCE)
    at_most_b = np.logaddexp.accumulate(log_b) - _ALLOWANCE
    # delta at the loss of k + 1 lies, which grows with k: the first k at which it is too large is the one.
    losses = (count - 2 * (lies + 1)) * epsilon
    decided = (at_most_a - np.exp(np.minimum(losses + at_most_b, 0.0)) > delta) | (losses <= 0)
    k = int(np.argmax(decided))
    if not decided[k]:
        return count * epsilon
    if at_most_a[k] <= delta:
        return 0.0
    epsilon_there = math.log(at_most_a[k] - delta) - float(at_most_b[k])
    return min(max(epsilon_there, 0.0), count * epsilon)


def _window(epsilon: float, count: int, delta: float) -> tuple[int, int]:
    """Return numbers of lies between which the answer is decided."""
    mean = count * float(scipy.special.expit(-epsilon))
    # Chernoff: at most mean - t lies have a probability below exp(-t^2 / (2 mean)).
    first = max(0, math.floor(mean - math.sqrt(2 * mean * (_LOG_LEFT_OUT - math.log(delta)))))
    if epsilon * count <= 1:
        return first, max(first, count // 2)
    # Hoeffding: more than mean + t lies have a probability below exp(-2 t^2 / count), here (1 - delta) / 2. At j lies
    # more than that the first (1 + delta) / 2 of the probability counts for 1 - exp(-2 j epsilon) or more.
    likely = math.ceil(mean + math.sqrt(count / 2 * (math.log(2) - math.log1p(-delta))))
    more = math.ceil((math.log1p(delta) - math.log1p(-delta)) / (2 * epsilon)) + 1
    return first, max(first, min(likely + more, count // 2))


def _log_binomial(lies: int, count: int, epsilon: float) -> float:
    """The log-probability of so many lies, by Stirling's formula with remainders (Loader 2000, equation 3)."""
    truths = count - lies
    if lies == 0 or truths == 0:
        return -lies * epsilon - count * float(np.logaddexp(0.0, -epsilon))
    lie, truth = float(scipy.special.expit(-epsilon)), float(scipy.special.expit(epsilon))
    remainders = _stirling_remainder(count) - _stirling_remainder(lies) - _stirling_remainder(truths)
    deviances = _deviance(lies, count * lie) + _deviance(truths, count * truth)
    return remainders - deviances + 0.5 * math.log(count / (2 * math.pi * lies) / truths)


def _stirling_remainder(n: int) -> float:
    """Return log n! less Stirling's (n + 1/2) log n - n + log(2 pi) / 2, for n >= 1."""
    if n < 20:
        return math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi)
    square = float(n) ** 2
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / square) / square) / square) / n


def _deviance(x: float, mean: float) -> float:
    """Return x log(x / mean) + mean - x, whose parts nearly cancel where x is close to the mean."""
    off = (x - mean) / mean
    return mean * ((1 + off) * math.log1p(off) - off)
