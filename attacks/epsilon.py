"""Lower bounds on epsilon from the success of attacks.

Two kinds, each with what it needs to hold:

- Many independent runs: a hypothesis test between two neighbouring inputs, repeated with fresh randomness. Limits of
  Clopper and Pearson (1934) on its error rates give a lower bound on epsilon (Jagielski et al. 2020; Nasr et al. 2021).
- One run: each of m canaries is put in or left out by a coin of its own, and one model is trained (Steinke, Nasr and
  Jagielski 2023).

Candidates of one run whose membership was not drawn by coins satisfy neither: then the result is an estimate, not a
bound, and must be called that.

Every bound takes scores (N,), finite or infinite, higher where a trial or canary looks included; inside (N,), whether
it was; delta, from 0 to below 1, and for Gaussian mechanisms above 0; and a confidence between 0 and 1. Numbers out of
range, shapes that differ and a NaN among the scores raise ``InputError``.
"""

import math
from collections.abc import Callable

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from fedpriv import accounting
from fedpriv.accounting.gaussian_proof import GaussianProof
from fedpriv.attacks.intervals import binomial_lower, binomial_upper
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.figure import EpsilonBound

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# exp(50) is beyond what any number of trials can show.
MOST_EPSILON = 50.0
_MOST_MU = 20.0


def is_gaussian(experiment: Experiment) -> bool:
    """Whether a run is mu-Gaussian differentially private for some mu: normal noise, without amplification."""
    unsampled = experiment.mechanism.unit == "update" or experiment.training.sampling == "shuffled"
    return issubclass(experiment.mechanism.proof(), GaussianProof) and unsampled


def trials_epsilon(scores: Floats, inside: Bools, delta: float, confidence: float = 0.95) -> EpsilonBound:
    """Bound epsilon from the scores of independent trials of one hypothesis test.

    The best threshold and its side are chosen on every second trial of each kind, and the error rates are counted on
    the others. A private mechanism has P(S) <= exp(epsilon) Q(S) + delta. Limits on P(S) and on Q(S), which fail with
    probability (1 - confidence) / 2 each, thus give epsilon >= log((P(S) - delta) / Q(S)).

    Trials of one kind are independent, in an order that does not depend on scores; of each at least two are needed.
    """
    chosen, counted = _halves(scores, inside, delta, confidence)
    threshold, sign = _surest(*chosen, delta, confidence)
    epsilon = _at(threshold, sign, *counted, delta, confidence)
    return EpsilonBound(epsilon, delta, confidence, len(scores), "Clopper-Pearson limits of a hypothesis test")


def gaussian_epsilon(scores: Floats, inside: Bools, delta: float, confidence: float = 0.95) -> EpsilonBound:
    """Bound epsilon of a mechanism that is known to be mu-Gaussian differentially private for some mu.

    Its error rates satisfy mu >= Phi^-1(1 - FPR) - Phi^-1(FNR) (Dong, Roth and Su 2022, Definition 4). Limits of the
    rates give mu, and mu gives epsilon at delta by their Corollary 1 (Nasr et al. 2023, Section 4). Tight for the
    Gaussian mechanism; not a bound for a mechanism of another kind.
    """
    _need_delta(delta)
    chosen, counted = _halves(scores, inside, delta, confidence)

    def separation(threshold: float, with_it: Floats, without: Floats) -> float:
        hit, false_hit = _limits(threshold, 1, with_it, without, confidence)
        return float(scipy.stats.norm.ppf(hit) - scipy.stats.norm.ppf(false_hit)) if hit > 0 and false_hit < 1 else 0.0

    threshold = max(_thresholds(*chosen), key=lambda threshold: separation(threshold, *chosen))
    mu = max(0.0, separation(threshold, *counted))
    method = "Clopper-Pearson limits of a hypothesis test, Gaussian trade-off assumed"
    return _of_mu(mu, delta, confidence, len(scores), method)


def canary_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of at least ``right`` right guesses about canaries under (epsilon, delta).

    Steinke, Nasr and Jagielski 2023, Theorem 5.2: P[W >= v] <= f(v) + 2 m delta max_i (f(v - i) - f(v)) / i, with
    f(v) = P[Binomial(r, exp(epsilon) / (1 + exp(epsilon))) >= v]; with delta = 0 the tail f alone.

    Args:
        canaries: m, put in or left out by fair and independent coins.
        guesses: r, the number of guessed canaries, at most m.
        right: v, the number of right guesses.
        epsilon: at least 0.
        delta: from 0 to below 1.

    Raises:
        InputError: the counts do not satisfy 0 <= v <= r <= m.
    """
    if not 0 <= right <= guesses <= canaries:
        raise InputError(f"{right} right of {guesses} guesses about {canaries} canaries")
    tail = float(scipy.stats.binom.sf(right - 1, guesses, 1 / (1 + math.exp(-epsilon))))
    if not (delta and right):
        return min(1.0, tail)
    steps = np.arange(1, right + 1)
    between = scipy.stats.binom.pmf(right - steps, guesses, 1 / (1 + math.exp(-epsilon))).cumsum()
    return min(1.0, tail + 2 * canaries * delta * float((between / steps).max()))


def canary_epsilon(scores: Floats, inside: Bools, guesses: int, delta: float, confidence: float = 0.95) -> EpsilonBound:
    """Bound epsilon from one training run with canaries.

    The r / 2 canaries with the highest scores are guessed in, the r / 2 with the lowest out; the others are not
    guessed. Fix the number of guesses before you see the scores.

    Canaries are put in or left out by a fair coin each, under the adjacency that adds or removes one of them. The
    number of guesses is even, from 2 to theirs.
    """
    right = _right_guesses(scores, inside, guesses, delta, confidence)

    def refuted(epsilon: float) -> bool:
        return canary_p_value(len(scores), guesses, right, epsilon, delta) < 1 - confidence

    epsilon = _last_refuted(refuted, MOST_EPSILON)
    return EpsilonBound(epsilon, delta, confidence, len(scores), "one run, Steinke et al. 2023, Theorem 5.2")


def canary_tradeoff_refuted(
    canaries: int, guesses: int, right: int, errors: Callable[[float], float], chance: float
) -> bool:
    """Whether ``right`` right guesses have a probability below ``chance`` under a trade-off, for any guesses.

    Canary i is guessed right in two events: it is in and guessed in, or out and guessed out. Fix the other coins, and
    let E be the event that at least k of the other guesses are right. Let F(x) be the largest power of a test at level
    x, which is concave. Then P(i right, E) <= F(P(i wrong, E)). Summed over m canaries, with W right ones of r guesses,

        E[W; W > k] <= m F(E[r - W; W >= k] / m)   for each k.

    Of all distributions of W with P(W >= v) = chance that satisfy these, the one with the least total probability gives
    each count, from k = v - 1 down, the least probability that the inequality allows: by induction any other has no
    smaller P(W >= k) and E[W; W >= k]. If that total is more than 1, no such distribution exists (the bound of
    Mahloujifar, Melis and Chaudhuri 2025).

    Args:
        canaries: m, in by fair and independent coins.
        guesses: r, the exact number of guesses, at most m.
        right: v, from 0 to r.
        errors: the inverse of F, increasing: the least level at which a test has this power.
        chance: above 0 and below 1.
    """
    likely, hits, misses = chance, right * chance, (guesses - right) * chance
    for count in range(right - 1, -1, -1):
        least = max(0.0, canaries * errors(hits / canaries) - misses) / (guesses - count)
        likely, hits, misses = likely + least, hits + count * least, misses + (guesses - count) * least
        if likely > 1:
            return True
    return False


def canary_gaussian_epsilon(
    scores: Floats, inside: Bools, guesses: int, delta: float, confidence: float = 0.95
) -> EpsilonBound:
    """Bound epsilon from one run with canaries of a mechanism that is known to be mu-Gaussian differentially private.

    Guesses are those of :func:`canary_epsilon`; the largest mu that :func:`canary_tradeoff_refuted` refutes, with
    F(x) = Phi(Phi^-1(x) + mu), gives epsilon at delta. It is larger than the bound for any mechanism. It holds for
    normal noise without sampling, and is not a bound for a mechanism of another kind. Choose between the bounds before
    you see the scores.

    About a tenth of the canaries is a good number of guesses. Where uploads are observed, a score is the sum over
    rounds of their products with the canary's gradient.
    """
    _need_delta(delta)
    right = _right_guesses(scores, inside, guesses, delta, confidence)

    def refuted(mu: float) -> bool:
        def errors(power: float) -> float:
            return float(ndtr(ndtri(min(power, 1.0)) - mu))

        return canary_tradeoff_refuted(len(scores), guesses, right, errors, 1 - confidence)

    method = "one run, f-DP (Mahloujifar et al. 2025), Gaussian trade-off assumed"
    return _of_mu(_last_refuted(refuted, _MOST_MU), delta, confidence, len(scores), method)


def independent_canary_epsilon(
    scores: Floats, inside: Bools, threshold: float, delta: float, confidence: float = 0.95
) -> EpsilonBound:
    """Bound epsilon of a mu-Gaussian mechanism from one run with canaries whose scores are independent.

    Scores are independent given the coins if the canaries' gradients are orthogonal, the noise is normal and the same
    in all directions, and a score is the sum over rounds of the observation's product with the canary's own gradient.
    Then guesses by a fixed threshold are right independently of each other, with a probability of at most Phi(mu / 2),
    and its Clopper-Pearson limit gives mu. Not a bound where canaries affect each other's scores.

    Canaries with scores above the threshold are guessed in; fix it before you see the scores.
    """
    _check(scores, inside, delta, confidence)
    _need_delta(delta)
    right = int(((scores > threshold) == inside).sum())
    mu = max(0.0, 2 * float(ndtri(binomial_lower(right, len(scores), 1 - confidence))))
    method = "one run, independent scores, Gaussian trade-off assumed"
    return _of_mu(mu, delta, confidence, len(scores), method)


def _need_delta(delta: float) -> None:
    if not delta > 0:
        raise InputError(key="delta", given=delta, allowed="above 0: a Gaussian mechanism has no finite epsilon at 0")


def _of_mu(mu: float, delta: float, confidence: float, trials: int, method: str) -> EpsilonBound:
    """What follows from mu-Gaussian differential privacy (Dong, Roth and Su 2022, Corollary 1)."""
    return EpsilonBound(accounting.gaussian_epsilon(delta, mu), delta, confidence, trials, method)


def _right_guesses(scores: Floats, inside: Bools, guesses: int, delta: float, confidence: float) -> int:
    """How many guesses are right: in for the half with the highest scores, out for that with the lowest."""
    _check(scores, inside, delta, confidence)
    if not (2 <= guesses <= len(scores) and guesses % 2 == 0):
        raise InputError(key="guesses", given=guesses, allowed=f"an even number from 2 to the {len(scores)} canaries")
    order = np.argsort(scores, kind="stable")
    half = guesses // 2
    return int(inside[order[-half:]].sum() + (~inside[order[:half]]).sum())


def _check(scores: Floats, inside: Bools, delta: float, confidence: float) -> None:
    if scores.ndim != 1 or scores.shape != inside.shape:
        raise InputError(f"scores of shape {scores.shape} for truths of shape {inside.shape}; expected: (N,) for both")
    if np.isnan(scores).any():
        raise InputError("a score is NaN")
    if not 0 <= delta < 1:
        raise InputError(key="delta", given=delta, allowed="from 0 to below 1")
    if not 0 < confidence < 1:
        raise InputError(key="confidence", given=confidence, allowed="between 0 and 1")


Trials = tuple[Floats, Floats]


def _halves(scores: Floats, inside: Bools, delta: float, confidence: float) -> tuple[Trials, Trials]:
    """The scores with and without, once for choosing the test and once for counting its errors."""
    _check(scores, inside, delta, confidence)
    with_it, without = scores[inside], scores[~inside]
    if min(len(with_it), len(without)) < 2:
        raise InputError("at least two trials with and two without the example are needed")
    return (with_it[::2], without[::2]), (with_it[1::2], without[1::2])


def _thresholds(with_it: Floats, without: Floats) -> Floats:
    """Every distinct score would do; a few hundred quantiles lose next to nothing."""
    shares = np.linspace(0, 1, 401)
    return np.unique(np.quantile(np.concatenate([with_it, without]), shares, method="nearest"))


def _limits(threshold: float, sign: int, with_it: Floats, without: Floats, confidence: float) -> tuple[float, float]:
    """Limits of the rates of hits and false hits; sign 1 guesses "with it" above the threshold, -1 "without" below."""
    each = 1 - (1 + confidence) / 2
    hits, false_hits = int((with_it > threshold).sum()), int((without > threshold).sum())
    trials = len(with_it), len(without)
    if sign < 0:
        hits, false_hits = len(without) - false_hits, len(with_it) - hits
        trials = trials[::-1]
    return binomial_lower(hits, trials[0], each), binomial_upper(false_hits, trials[1], each)


def _at(threshold: float, sign: int, with_it: Floats, without: Floats, delta: float, confidence: float) -> float:
    hit, false_hit = _limits(threshold, sign, with_it, without, confidence)
    return max(0.0, math.log((hit - delta) / false_hit)) if hit > delta else 0.0


def _surest(with_it: Floats, without: Floats, delta: float, confidence: float) -> tuple[float, int]:
    tests = [(float(threshold), sign) for threshold in _thresholds(with_it, without) for sign in (1, -1)]
    return max(tests, key=lambda test: _at(test[0], test[1], with_it, without, delta, confidence))


def _last_refuted(refuted: Callable[[float], bool], most: float) -> float:
    """The largest number from 0 that is refuted, rounded down by 1e-6 at most; the bound is monotone up to there."""
    if not refuted(0.0):
        return 0.0
    low, high = (most, most) if refuted(most) else (0.0, most)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
