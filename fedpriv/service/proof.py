"""What is proven about answers: noise on a convex model, on each of its answers, or on votes of separate models.

The convex model minimises F(W) = (1/n) sum cross-entropy(W phi_i, y_i) + lambda/2 |W|^2 with |phi| <= R, and stops at a
gradient of norm at most tau. Neighbouring data sets differ in one example (replace-one), n is public, and questions may
depend on earlier answers.

F is lambda-strongly convex, and replacing an example changes its gradient by at most 2 sqrt(2) R / n anywhere. The two
models differ by at most Delta = 2 sqrt(2) R / (lambda n) + 2 tau / lambda (Chaudhuri, Monteleoni and Sarwate 2011,
Lemma 7, with an inexact minimum). Logits at a question move by at most Delta R in length, and the difference of two of
them by at most sqrt(2) Delta R.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import scipy

from fedpriv.accounting.composition import pure_composition_epsilon
from fedpriv.accounting.gaussian import analytic_sigma, gaussian_epsilon
from fedpriv.accounting.proofs import Claim, smallest, stated
from fedpriv.accounting.renyi import ORDERS, laplace_rdp, rdp_to_epsilon
from fedpriv.core.errors import InputError
from fedpriv.core.records import Guarantee, shown_epsilon
from fedpriv.service.policies import EXAMPLE

Law = Literal["gaussian", "pure", "range", "range-laplace"]
"""gaussian: normal noise, of mu = sensitivity / deviation. pure: epsilon-DP. range: the log ratio of any two answers'
probabilities moves by at most epsilon (bounded range), as of the exponential mechanism. range-laplace: one of these and
one Laplace release, of half of epsilon each."""

REPRODUCIBLE = (
    "noise = 'reproducible': the noise follows from the seed, and anyone who knows or guesses the seed can subtract "
    "it; the proof holds against everybody else"
)


@dataclass(frozen=True)
class AnswerRelease:
    """Answers of one kind, all of them together."""

    law: Law  # what one release is
    level: float  # of one release: mu for normal noise, else epsilon; infinity: nothing is added
    releases: int  # how many compose: the number of answers, or 1 where all of them come from one release
    delta: float  # of the statement; 0: pure figures only
    # which two data sets must look alike, in words
    adjacency: str = EXAMPLE
    theorem: str = ""  # where the level is from
    notes: tuple[str, ...] = ()  # what a reader must know with the figures

    def __post_init__(self) -> None:
        if not self.level >= 0 or self.releases < 0:
            raise ValueError(f"level = {self.level}, releases = {self.releases}; allowed are numbers from 0")


def head_sensitivity(norm: float, regularisation: float, examples: int, tolerance: float) -> float:
    """Return Delta, how far replacing one example moves the weights of the convex model."""
    return 2 * math.sqrt(2) * norm / (regularisation * examples) + 2 * tolerance / regularisation


def model_break_even(classes: int, features: int) -> float:
    """Return from how many answers on noise on the model beats noise on each: sqrt((C d + 1) / (C + 1))."""
    return math.sqrt((classes * features + 1) / (classes + 1))


def answer_guarantee(release: AnswerRelease) -> Guarantee:
    """Return what is proven about all answers together.

    - Normal noise: T releases of mu are one of mu sqrt(T), converted exactly (Dong, Roth and Su 2022; Balle and Wang
      2018).
    - Others: the sum of pure figures, their optimal composition (Kairouz et al. 2017), and Renyi accounting, in which a
      release of bounded range epsilon counts as epsilon^2 / 8-zCDP (Cesar and Rogers 2021); the smallest.
    """
    best = _best(release)
    best = replace(best, theorem=f"{best.theorem}; {release.theorem}" if release.theorem else best.theorem)
    nominal = Claim(math.inf, "there is no other figure than the proven ones")
    return stated(release.adjacency, release.releases, release.delta, _pure(release), best, nominal, release.notes)


def with_run(answers: Guarantee, run: Guarantee) -> Guarantee:
    """Return what is proven of answers and of the run together whose network gives the convex model's features.

    Both are about one example that becomes another one. For every network that the run may have released the answers
    keep to their figures, since its features are scaled to R like others. So epsilons and deltas add up (basic
    composition of two releases, the second chosen after the first: Dwork et al. 2006).
    """
    if run.epsilon is None:
        raise ValueError("nothing is proven of the run whose network gives the features")
    if answers.epsilon is None:
        return answers
    delta = answers.delta + run.delta
    if delta >= 1:
        raise InputError(
            f"service.delta = {answers.delta:g} and the delta of service.features = 'run:DIR', {run.delta:g}, add up "
            "to 1 or more: nothing is proven then"
        )
    pure = None
    if answers.pure_epsilon is not None and run.pure_epsilon is not None:
        pure = answers.pure_epsilon + run.pure_epsilon
    unpure = answers.theorem if answers.pure_epsilon is None else run.theorem
    told = (
        f"epsilon {shown_epsilon(run.epsilon)} at delta {run.delta:g} of it is of the run whose network gives the "
        f"features ({run.sampling}; {run.participations} uses of an example); service.target_epsilon, and what other "
        "notes say of answers, is of the answers alone",
    )
    return replace(
        answers,
        sampling=f"{answers.sampling}; features: {run.sampling}",
        participations=answers.participations + run.participations,
        pure_epsilon=pure,
        epsilon=answers.epsilon + run.epsilon,
        delta=delta,
        theorem={
            "nominal_epsilon": answers.theorem["nominal_epsilon"],
            "pure_epsilon": unpure["pure_epsilon"] if pure is None else _sum(answers, run, "pure_epsilon"),
            "epsilon": _sum(answers, run, "epsilon"),
        },
        notes=(*answers.notes, *told, *(f"the features' run: {note}" for note in run.notes)),
    )


def _sum(answers: Guarantee, run: Guarantee, figure: str) -> str:
    return (
        f"{answers.theorem[figure]}; plus that of the run whose network gives the features "
        f"({run.theorem[figure]}), by sequential composition (Dwork et al. 2006)"
    )


def calibrated_level(release: AnswerRelease, target: float) -> float:
    """Return the largest level at which all answers together have an epsilon of at most ``target``."""
    if release.law == "gaussian":
        if release.delta == 0:
            raise InputError("normal noise proves nothing at delta = 0; use distribution = 'laplace'")
        return 1 / (analytic_sigma(target, release.delta) * math.sqrt(max(release.releases, 1)))
    if release.delta == 0 or release.releases <= 1:
        return target / max(release.releases, 1)

    def excess(level: float) -> float:
        return _best(replace(release, level=level)).epsilon - target

    low, high = target / release.releases, target
    level: float = scipy.optimize.bisect(excess, low, high, xtol=low * 1e-9, rtol=1e-9) if excess(high) > 0 else high
    # Bisection may end a hair above the target.
    while excess(level) > 0:
        level *= 1 - 1e-9
    return level


def _pure(release: AnswerRelease) -> Claim:
    if release.releases == 0 or release.level == 0:
        return Claim(0.0, "nothing that depends on the data was released")
    if release.law == "gaussian":
        return Claim(math.inf, "normal noise has no finite pure epsilon")
    if math.isinf(release.level):
        return Claim(math.inf, "no noise: nothing is proven")
    many = f", {release.releases} times" if release.releases > 1 else ""
    return Claim(release.releases * release.level, f"pure epsilon {release.level:.6g}{many}: {release.theorem}")


def _best(release: AnswerRelease) -> Claim:
    pure = _pure(release)
    if pure.epsilon == 0 or release.delta == 0:
        return pure
    if math.isinf(release.level):
        return Claim(math.inf, "no noise: nothing is proven")
    return smallest([pure, *(claim(release) for claim in _CLAIMS[release.law])])


def _gaussian(release: AnswerRelease) -> Claim:
    mu = release.level * math.sqrt(release.releases)
    return Claim(gaussian_epsilon(release.delta, mu), f"normal noise, mu = {mu:.6g} of all, converted exactly")


def _optimal(release: AnswerRelease) -> Claim:
    # An answer of two halves is two releases of half its level.
    halves = 2 if release.law == "range-laplace" else 1
    epsilon = pure_composition_epsilon(release.level / halves, release.releases * halves, release.delta)
    return Claim(epsilon, "optimal composition of pure figures (Kairouz, Oh and Viswanath 2017)")


def _renyi(release: AnswerRelease) -> Claim:
    share = release.level / 2 if release.law == "range-laplace" else release.level
    rdp = release.releases * ORDERS * share**2 / 8
    if release.law == "range-laplace":
        rdp = rdp + release.releases * laplace_rdp(ORDERS, share)
    return Claim(
        rdp_to_epsilon(ORDERS, rdp, release.delta), "Renyi accounting of bounded range (Cesar and Rogers 2021)"
    )


_CLAIMS: dict[Law, tuple[Callable[[AnswerRelease], Claim], ...]] = {
    "gaussian": (_gaussian,),
    "pure": (_optimal,),
    "range": (_optimal, _renyi),
    "range-laplace": (_optimal, _renyi),
}
