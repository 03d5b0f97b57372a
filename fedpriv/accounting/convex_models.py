"""Private empirical risk minimisation: what one example moves, and how much noise hides that.

J(w) = (1/n) sum loss(w; phi_i, y_i) + lambda/2 |w|^2 with |phi| <= 1. With two classes the loss is the logistic one:
its gradient has length L <= 1 and its curvature is c <= 1/4. With K it is the cross entropy of a softmax: L <= sqrt(2),
c <= 1/2. Neighbouring data sets differ in one example (replace-one), n is public.

- Output perturbation: J is lambda-strongly convex, so replacing an example moves the minimum by 2 L / (n lambda) at
  most (Chaudhuri, Monteleoni and Sarwate 2011, Corollary 8), and a point where the gradient has length tau by
  2 tau / lambda more. Without the term lambda/2 |w|^2 there is no such bound. Noise of density exp(-|b| / scale) gives
  pure epsilon, normal noise (epsilon, delta).
- Objective perturbation (the same, Algorithm 2 and Theorem 9; two classes): J + <b, w> / n is minimised, b of density
  exp(-epsilon' |b| / 2). The theorem is about the exact minimum: its proof needs b to follow from the minimum and the
  data. Where a solver stops does not determine b, and however small its tolerance, two data sets can lead to points
  that the other one never leads to. So noise on the weights covers the solver's error, with its own part of epsilon
  (approximate minima perturbation, Iyengar et al. 2019, Algorithm 1; here with a pure epsilon): given the exact
  minimum, the solver's point is a function of the data within tau / lambda of it, so that it moves by 2 tau / lambda.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from typing_extensions import override

from fedpriv.accounting.composition import pure_composition_epsilon
from fedpriv.accounting.gaussian import analytic_sigma, gaussian_epsilon
from fedpriv.accounting.proofs import CLIENTS, Claim, Proof
from fedpriv.core.errors import InputError

MOST_STEPS = 10_000_000
"""Of gradient descent: a problem that may need more is not solved."""

ModelLaw = Literal["gaussian", "laplace"]
"""Of noise on a model. gaussian: normal. laplace: of density exp(-length / scale), for pure epsilon."""

SOLVER_TAIL = 1e-30
"""How often, at most, a term of noise may be longer than what the solver is checked for."""

_CHOSEN = "Choosing lambda by looking at results is not accounted for."
_CONVERGED = (
    "That the solver reaches its tolerance follows from convexity and is checked beforehand for float64, whatever the "
    "data; what rounding does to the released numbers is outside the theorem."
)
_EXACT = (
    "The theorem is about the exact minimum; the solver stops at a gradient of length erm.tolerance, and noise on the "
    "weights covers that, with a part of epsilon. That the solver gets there is checked beforehand for float64, for "
    "all noise but the longest, of probability 1e-30: then the model may be zero, and the claim holds but for that "
    "probability. What rounding does to the released numbers is outside the theorem."
)


@dataclass(frozen=True)
class Problem:
    """The public sizes of one client's problem."""

    examples: int  # n, at least 1
    features: int  # d, the constant 1 among them
    classes: int  # K, at least 2
    regularisation: float  # lambda, above 0
    tolerance: float = 0.0  # tau, the largest length of J's gradient at the end

    def __post_init__(self) -> None:
        for name, least in (("examples", 1), ("features", 1), ("classes", 2)):
            if (value := getattr(self, name)) < least:
                raise InputError(key=name, given=value, allowed=f"allowed are whole numbers from {least}")
        if not 0 < self.regularisation < math.inf:
            raise InputError(
                key="regularisation",
                given=self.regularisation,
                allowed="allowed are finite numbers above 0; without it one example may move the minimum as "
                "far as it likes",
            )
        if not 0 <= self.tolerance < math.inf:
            raise InputError(key="tolerance", given=self.tolerance, allowed="allowed are finite numbers from 0")

    @property
    def rows(self) -> int:
        """How many vectors of weights there are: one for two classes, else one a class."""
        return 1 if self.classes == 2 else self.classes

    @property
    def dimension(self) -> int:
        """How many numbers are released."""
        return self.rows * self.features

    @property
    def lipschitz(self) -> float:
        """L, the largest length of the gradient of one example's loss."""
        return 1.0 if self.classes == 2 else math.sqrt(2)

    @property
    def curvature(self) -> float:
        """C, the largest eigenvalue of the second derivative of one example's loss."""
        return 0.25 if self.classes == 2 else 0.5

    @property
    def sensitivity(self) -> float:
        """How far replacing one example moves the weights."""
        return 2 * self.lipschitz / (self.examples * self.regularisation) + 2 * self.tolerance / self.regularisation

    @property
    def longest(self) -> float:
        """The largest length of the minimum: lambda/2 |w|^2 <= J(w) <= J(0) = log K."""
        return math.sqrt(2 * math.log(self.classes) / self.regularisation) + self.tolerance / self.regularisation


def least_tolerance(problem: Problem, tilt: float = 0.0) -> float:
    """Return a tolerance that the solver of the convex model reaches in float64 whatever the data.

    The computed gradient is off by at most delta, to first order in the rounding error u of one operation (Higham 2002,
    Section 3.1): sums over n examples and K classes give (n + K) u L, logits d u |w| times the curvature c, the terms
    lambda w and b/n a few u times their lengths. |w| is bounded by J(w) <= J(0) = log K. A step of descent of 1/s,
    s = c + lambda, along a gradient g that is off by delta lowers J by (|g|^2 - delta^2) / (2 s); that the new weights
    are rounded counts as s u |w| more of delta. So while |g| >= 2 delta, J's excess over its minimum falls by a factor
    of 1 - 3 lambda / (4 s) at least, until |g| <= tau / 4 if that is above 2 delta. Training stops at a computed
    gradient of tau / 2 >= tau / 4 + delta: tau = 8 delta is enough. L and c are those of softmax regression, as which
    two classes are trained, and u is taken twice as large as it is.
    """
    longest = math.sqrt(2 * math.log(problem.classes) / problem.regularisation) + 2 * tilt / problem.regularisation
    sums = (problem.examples + problem.classes + 8) * math.sqrt(2)
    logits = (problem.features + 8) * longest / 2
    terms = 8 * (problem.regularisation * longest + tilt)
    return 8 * sys.float_info.epsilon * (sums + logits + terms)


def most_steps(problem: Problem, tilt: float = 0.0) -> float:
    """Return how many steps may be needed from log K + tilt^2 / (2 lambda) above the least, whatever the data."""
    smoothness = 0.5 + 2 * problem.regularisation  # two classes are trained as two rows with 2 lambda
    excess = math.log(problem.classes) + tilt**2 / (2 * problem.regularisation)
    return descent_steps(smoothness, problem.regularisation, math.sqrt(2 * smoothness * excess), problem.tolerance)


def is_solvable(problem: Problem, tilt: float = 0.0) -> bool:
    """Whether the solver reaches the tolerance, whatever the data: in float64, and within ``MOST_STEPS``."""
    return least_tolerance(problem, tilt) <= problem.tolerance and most_steps(problem, tilt) <= MOST_STEPS


def output_scale(problem: Problem, epsilon: float, law: ModelLaw, delta: float) -> float:
    """Return the scale of the noise on the weights: a deviation for normal noise, else that of exp(-length / scale)."""
    return problem.sensitivity * (analytic_sigma(epsilon, delta) if law == "gaussian" else 1 / epsilon)


@dataclass(frozen=True)
class ObjectiveTerms:
    """What is added to the objective, and to the weights at which the solver stops."""

    regularisation: float  # of the perturbed objective, at least lambda
    epsilon: float  # epsilon', what is left for the noise in the objective
    scale: float  # 2 / epsilon', of the density exp(-|b| / scale) of b
    cover: float  # of density exp(-length / cover), for the solver's error; 0: none is needed


def objective_terms(problem: Problem, epsilon: float) -> ObjectiveTerms:
    """Return the terms of Algorithm 2 of Chaudhuri, Monteleoni and Sarwate 2011, and the noise for the solver's error.

    Of epsilon, the exact minimum takes epsilon / (1 + s) and the solver's error the rest, s = sqrt(n tau). In one
    dimension the two kinds of noise on the weights, 2 / (n lambda epsilon_1) and 2 tau / (lambda epsilon_2), are
    together least then. Both are pure and add up.
    """
    if problem.classes > 2:
        raise InputError(
            f"objective perturbation is proven for two classes, and these data have {problem.classes}; use output "
            "perturbation"
        )
    part = math.sqrt(problem.examples * problem.tolerance)
    exact, solver = epsilon / (1 + part), epsilon * part / (1 + part)
    regularisation = problem.regularisation
    left = exact - 2 * math.log1p(problem.curvature / (problem.examples * regularisation))
    if left <= 0:
        left = exact / 2
        regularisation = problem.curvature / (problem.examples * math.expm1(exact / 4))
    cover = 2 * problem.tolerance / (regularisation * solver) if solver else 0.0
    return ObjectiveTerms(regularisation, left, 2 / left, cover)


class _ModelProof(Proof):
    """About models that a client releases: once in a run, unless a server asks for another one."""

    theorem: ClassVar[str]  # what one release rests on

    @override
    def pure(self) -> Claim:
        return Claim(self.release.participations * self.noise, self.theorem)

    @override
    def cheap_claims(self) -> list[Claim]:
        times = self.release.participations
        if times < 2:
            return [self.pure()]
        words = f"{self.theorem}, {times} times, by optimal composition (Kairouz, Oh and Viswanath 2017)"
        return [self.pure(), Claim(pure_composition_epsilon(self.noise, times, float(self.release.delta)), words)]

    @property
    @override
    def no_reference(self) -> str:
        return f"a ceiling is not derived for {self.release.mechanism}: the claim is its epsilon"


class OutputProof(_ModelProof):
    """Noise on the minimum. The release's noise is the epsilon of one release, and its law that of the noise."""

    theorem: ClassVar[str] = (
        "noise on the minimum of a strongly convex objective, of sensitivity 2 L / (n lambda) + 2 tau / lambda "
        "(Chaudhuri, Monteleoni and Sarwate 2011, Corollary 8 and Theorem 6)"
    )

    @property
    def _is_normal(self) -> bool:
        if self.release.law not in get_args(ModelLaw):
            raise ValueError(f"noise on a model has the law {self.release.law!r}")
        return self.release.law == "gaussian"

    @override
    def pure(self) -> Claim:
        return Claim(math.inf, "normal noise has no finite pure epsilon") if self._is_normal else super().pure()

    @override
    def cheap_claims(self) -> list[Claim]:
        if not self._is_normal:
            return super().cheap_claims()
        delta, times = float(self.release.delta), self.release.participations
        words = f"{self.theorem}; normal noise, converted exactly (Balle and Wang 2018)"
        if times == 1:
            return [Claim(self.noise, words)]
        return [Claim(gaussian_epsilon(delta, math.sqrt(times) / analytic_sigma(self.noise, delta)), words)]

    @override
    def notes(self) -> tuple[str, ...]:
        return (CLIENTS, _CONVERGED, _CHOSEN)


class ObjectiveProof(_ModelProof):
    """Noise in the objective. The release's noise is the epsilon of one release."""

    theorem: ClassVar[str] = (
        "objective perturbation (Chaudhuri, Monteleoni and Sarwate 2011, Algorithm 2 and Theorem 9), and noise on "
        "the weights for the solver's error (after Iyengar et al. 2019, Algorithm 1)"
    )

    @override
    def notes(self) -> tuple[str, ...]:
        return (CLIENTS, _EXACT, _CHOSEN)


def refuse_unsolvable(
    problem: Problem, section: str, about: str, solved: Callable[[Problem], tuple[Problem, float]]
) -> None:
    """Refuse public sizes with which the solver might end early: a refusal once data are seen would tell of them."""
    given, tilt = solved(problem)
    if is_solvable(given, tilt):
        return
    if least_tolerance(given, tilt) > given.tolerance:
        key, most, reason = "tolerance", 1.0, "float64 may end above it"
    else:
        key, most = "regularisation", 1e9
        reason = f"the solver may take {most_steps(given, tilt):.0e} steps, {MOST_STEPS:,} are allowed"
    value = getattr(problem, key)
    while value <= most and not is_solvable(*solved(replace(problem, **{key: value}))):
        value = float(f"{1.2 * value:.1e}")
    way = f"set {section}.{key} to {value:.1e} or more" if value <= most else f"raise {section}.regularisation too"
    raise InputError(key=f"{section}.{key}", given=getattr(problem, key), allowed=f"{reason}, for {about}; {way}")


def descent_steps(smoothness: float, regularisation: float, length: float, tolerance: float) -> float:
    """Return how many steps of gradient descent are enough.

    Each step takes 3 lambda / (4 smoothness) off F's excess at least (:func:`least_tolerance`), which starts below
    length^2 / (2 lambda), and below (tolerance / 4)^2 / (2 smoothness) the gradient is short enough.
    """
    ratio = smoothness / regularisation
    return 1.5 * ratio * math.log(max(32 * ratio * (length / tolerance) ** 2, 32)) + 1


# The formulas of Lu, Asghar, Kaafar, Webb and Dickinson, IEEE TIFS 2022 (arXiv 2204.01049), which prove nothing:
# reproduced for comparison with what is measured and proven. They are functions of public sizes alone and are no
# bounds: a network with the "convexified" loss is not convex, and where the loss is convex one example may weigh more
# than 1/n.


@dataclass(frozen=True)
class ClaimedSensitivity:
    """What the paper claims of a network with one hidden layer of tanh units, without biases."""

    inputs: int  # m, features of an example
    hidden: int  # h, hidden units
    classes: int  # C
    examples: int  # n
    regularisation: float  # lambda

    @property
    def weights(self) -> int:
        """|W| = m h + h C."""
        return self.hidden * (self.inputs + self.classes)

    @property
    def lipschitz(self) -> float:
        """rho of Proposition 1, with the largest neuron 1: (C - 1) sqrt(m h) / (C h)."""
        return (self.classes - 1) * math.sqrt(self.inputs * self.hidden) / (self.classes * self.hidden)

    @property
    def weight(self) -> float:
        """Delta omega of Eq. 18: 2 rho / (lambda n sqrt(|W|))."""
        return 2 * self.lipschitz / (self.regularisation * self.examples * math.sqrt(self.weights))

    @property
    def model(self) -> float:
        """The claimed distance of two models, Theorem 4: 2 rho / (lambda n)."""
        return 2 * self.lipschitz / (self.regularisation * self.examples)

    @property
    def logit(self) -> float:
        """Delta z of Corollary 1: h Delta omega."""
        return self.hidden * self.weight

    @property
    def probability(self) -> float:
        """Delta p of Corollary 2: exp(2 Delta z) - 1, at most 1."""
        return min(math.expm1(2 * self.logit), 1.0)
