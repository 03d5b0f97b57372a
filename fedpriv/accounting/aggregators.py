"""From votes to an answer, privately: one vote a voter, noise on the counts, and what all answers together prove.

An aggregator is its public parameters. It decides single questions with random numbers that nobody else may have, and
says what any number of answers costs. PATE asks it, and an endpoint that answers by votes.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from fedpriv.accounting.calibration import calibrate
from fedpriv.accounting.composition import pure_composition_epsilon
from fedpriv.accounting.guarantees import guarantee
from fedpriv.accounting.proofs import Claim, stated
from fedpriv.accounting.release import Release
from fedpriv.accounting.votes import gaussian_mu, gaussian_votes_claim
from fedpriv.core.errors import InputError
from fedpriv.core.names import Adjacency
from fedpriv.core.records import Guarantee

MOST_ANSWERS = 10_000_000

SENSITIVITY = math.sqrt(2)
"""By how much counts of votes move (Euclidean norm) if one voter names another class."""

ROUNDED = "Shares are rounded, and cut off at 9 deviations, before they are masked, which the theorem does not cover."
"""What a ledger says of counts that are summed under masks."""

_LEAST_NOISE, _MOST_NOISE = 1e-9, 1e12  # votes


class Aggregator(ABC):
    """What turns counts of votes into an answer."""

    title: ClassVar[str]  # for people

    @abstractmethod
    def decide(self, counts: ArrayLike, generator: np.random.Generator) -> int | None:
        """Return the class, from 0, of one question by its votes (K,); ``None``: no answer."""

    @abstractmethod
    def spent(self, asked: int, answered: int) -> float:
        """What answers cost where one voter changes its vote in every question: mu, or for Laplace epsilon."""

    def claim(self, asked: int, answered: int, delta: float, votes: int = 1) -> Claim:
        """What is proven of answers at ``delta``, in (0, 1)."""
        return gaussian_votes_claim(votes * self.spent(asked, answered), delta)


@dataclass(frozen=True)
class NoisyMax(Aggregator):
    """The class whose count is the largest after normal noise (GNMax, Papernot et al. 2018)."""

    sigma: float  # deviation of the noise on each count, in votes, from 1e-9 to 1e12

    title: ClassVar[str] = "noisy maximum, normal noise"

    def __post_init__(self) -> None:
        _check("sigma", self.sigma)

    @override
    def decide(self, counts: ArrayLike, generator: np.random.Generator) -> int | None:
        known = _checked(counts)
        return int(np.argmax(known + generator.normal(0.0, self.sigma, len(known))))

    @override
    def spent(self, asked: int, answered: int) -> float:
        _check_counts(asked, answered)
        return math.sqrt(2 * answered) / self.sigma


@dataclass(frozen=True)
class ConfidentMax(Aggregator):
    """The noisy maximum, where the largest count with noise of its own reaches a threshold (Confident-GNMax, 2018)."""

    threshold: float  # T, in votes
    sigma1: float  # deviation of the noise on the largest count that is compared with T, in votes, from 1e-9 to 1e12
    sigma2: float  # deviation of the noise on each count, in votes, from 1e-9 to 1e12

    title: ClassVar[str] = "confident noisy maximum, normal noise"

    def __post_init__(self) -> None:
        if not math.isfinite(self.threshold):
            raise InputError(key="threshold", given=self.threshold, allowed="allowed are finite numbers")
        _check("sigma1", self.sigma1)
        _check("sigma2", self.sigma2)

    @override
    def decide(self, counts: ArrayLike, generator: np.random.Generator) -> int | None:
        known = _checked(counts)
        if known.max() + generator.normal(0.0, self.sigma1) < self.threshold:
            return None
        return NoisyMax(self.sigma2).decide(known, generator)

    @override
    def spent(self, asked: int, answered: int) -> float:
        _check_counts(asked, answered)
        return math.sqrt(asked / self.sigma1**2 + 2 * answered / self.sigma2**2)


@dataclass(frozen=True)
class LaplaceMax(Aggregator):
    """The class whose count is the largest after Laplace noise (LNMax, Papernot et al. 2017)."""

    scale: float  # of the noise on each count, in votes, from 1e-9 to 1e12; its deviation is sqrt(2) scale

    title: ClassVar[str] = "noisy maximum, Laplace noise"

    def __post_init__(self) -> None:
        _check("scale", self.scale)

    @override
    def decide(self, counts: ArrayLike, generator: np.random.Generator) -> int | None:
        known = _checked(counts)
        return int(np.argmax(known + generator.laplace(0.0, self.scale, len(known))))

    @override
    def spent(self, asked: int, answered: int) -> float:
        _check_counts(asked, answered)
        return 2 * answered / self.scale  # a vote moves two counts

    @override
    def claim(self, asked: int, answered: int, delta: float, votes: int = 1) -> Claim:
        _check_counts(asked, answered)
        theorem = (
            "Laplace noise on counts of votes, pure 2 / scale an answer and vote, composed exactly (Kairouz, Oh and "
            "Viswanath 2017, Thm 3.3)"
        )
        return Claim(pure_composition_epsilon(2 * votes / self.scale, answered, delta), theorem)


def most_answers(aggregator: Aggregator, epsilon: float, delta: float, votes: int = 1) -> int:
    """Return how many questions may be answered within (epsilon, delta), 10 million at most."""
    gaussian_mu(epsilon, delta)  # says what is out of range
    counts = range(1, MOST_ANSWERS + 1)
    return bisect_right(counts, epsilon, key=lambda count: aggregator.claim(count, count, delta, votes).epsilon)


def least_sigma(answers: int, epsilon: float, delta: float, votes: int = 1) -> float:
    """Return the least noise of :class:`NoisyMax` with which so many answers are (epsilon, delta)-DP."""
    return votes * math.sqrt(2 * answers) / gaussian_mu(epsilon, delta)


def votes_guarantee(
    aggregator: Aggregator, claim: Claim, asked: int, delta: float, votes: int, changed: str, notes: Sequence[str]
) -> Guarantee:
    """Return the ledger's line about ``asked`` questions in which all vote; ``changed``: a neighbour, in words."""
    pure = Claim(math.inf, "normal noise has no finite pure epsilon")
    if isinstance(aggregator, LaplaceMax):
        pure = Claim(votes * aggregator.spent(asked, asked), claim.theorem)
    best = claim if asked else replace(claim, theorem="no participation: no answer was given")
    adjacency = Adjacency.REPLACE_ONE_CLIENT.worded(changed)
    return stated(adjacency, asked, delta, pure, best, Claim(math.inf, "none is claimed"), notes)


@dataclass(frozen=True)
class SampledUse:
    """Normal noise on sums to which few examples, drawn afresh without replacement, contribute a part each."""

    sensitivity: float  # Euclidean, of one contribution; sqrt(2) for a vote and for a probability vector
    rate: float  # the share of the examples that is drawn, from 1e-12 to 1
    uses: int  # how many sums are released
    delta: float  # in (0, 1)

    def __post_init__(self) -> None:
        self._release(1.0)

    def least_sigma(self, epsilon: float) -> float:
        """Return the least deviation of the noise with which all uses are (epsilon, delta)-DP."""
        return calibrate(epsilon, self._release(1.0)) * self.sensitivity / 2

    def guarantee(self, sigma: float) -> Guarantee:
        """Return what is proven of noise of deviation ``sigma``."""
        proven = guarantee(self._release(2 * sigma / self.sensitivity))
        meaning = f"sensitivity {self.sensitivity:.4g} stands for 2 clip_norm here; "
        return replace(proven, theorem={**proven.theorem, "epsilon": meaning + proven.theorem["epsilon"]}, notes=())

    def _release(self, noise: float) -> Release:
        return Release("gaussian", "example", "fixed", self.rate, self.uses, (1,), noise, self.delta)


def _checked(counts: ArrayLike) -> NDArray[np.float64]:
    known = np.asarray(counts, np.float64)
    if known.ndim != 1 or len(known) < 2 or not np.isfinite(known).all():
        raise ValueError(f"counts of shape {known.shape}: expected finite votes (K,) of two classes or more")
    return known


def _check_counts(asked: int, answered: int) -> None:
    if not 0 <= answered <= asked:
        raise ValueError(f"{answered} answers to {asked} questions: expected 0 <= answered <= asked")


def _check(name: str, value: float) -> None:
    if not _LEAST_NOISE <= value <= _MOST_NOISE:
        raise InputError(key=name, given=value, allowed=f"allowed is from {_LEAST_NOISE:g} to {_MOST_NOISE:g}")
