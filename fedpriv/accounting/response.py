"""Randomised response: each answer is true with a public probability, else any other one (Warner 1965).

Of K answers the true one is given with probability p = e^eps / (e^eps + K - 1) and each other with
q = 1 / (e^eps + K - 1) = e^-eps p (Kairouz, Oh and Viswanath 2016, Eq. 7), so that no answer is more than e^eps times
as likely under one truth as under another: pure epsilon of each answer, whoever collects it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.proofs import Claim, stated
from fedpriv.core.errors import InputError
from fedpriv.core.names import LEAST_LABEL_EPSILON, MOST_LABEL_EPSILON, Adjacency
from fedpriv.core.records import Guarantee

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Response:
    """The law of one answer."""

    epsilon: float  # from 1e-9 to 20
    answers: int  # K, at least 2

    def __post_init__(self) -> None:
        if not LEAST_LABEL_EPSILON <= self.epsilon <= MOST_LABEL_EPSILON:
            raise InputError(
                key="epsilon",
                given=self.epsilon,
                allowed=f"allowed is from {LEAST_LABEL_EPSILON:g} to {MOST_LABEL_EPSILON:g}",
            )
        _check_answers(self.answers)

    @property
    def keep(self) -> float:
        """p, how likely the true answer is given."""
        return 1 / (1 + (self.answers - 1) * math.exp(-self.epsilon))

    @property
    def other(self) -> float:
        """q, how likely one certain other answer is given."""
        return math.exp(-self.epsilon) * self.keep

    def shares(self, counts: Sequence[int]) -> tuple[Array, Array]:
        """Estimate how frequent each true answer is, and the standard errors.

        The estimates have no bias, sum to 1, and may lie below 0 or above 1. The errors are those of a survey: of
        people drawn at random. Of the shares among these very people they are larger than needed, if anything.

        They are (c/n - q) / (p - q) and sqrt(a (1 - a) / n) / (p - q) with a = c/n, (K,) each, of counts c (K,).
        """
        number = sum(counts)
        given = np.asarray(counts, dtype=np.float64) / number
        told = self.keep - self.other
        return (given - self.other) / told, np.sqrt(given * (1 - given) / number) / told

    def standard_error(self, share: float, examples: int) -> float:
        """Return the standard error of one estimated share of n examples whose true share is this."""
        given = self.other + share * (self.keep - self.other)
        return math.sqrt(given * (1 - given) / examples) / (self.keep - self.other)

    def best_decisions(self, shares: Sequence[float]) -> list[int]:
        """Return for each given answer the likeliest truth, by shares (K,), of which negative ones count as 0."""
        return [int(np.argmax(column)) for column in self._joint(shares).T]

    def success(self, shares: Sequence[float]) -> float:
        """Return how often anybody names the truth behind one answer, at most: sum_z max_y pi_y T(y, z)."""
        return float(self._joint(shares).max(axis=0).sum())

    def _joint(self, shares: Sequence[float]) -> Array:
        """Probabilities of truth (rows) and given answer (columns)."""
        matrix = np.full((self.answers, self.answers), self.other)
        np.fill_diagonal(matrix, self.keep)
        return np.clip(np.asarray(shares, dtype=np.float64), 0, None)[:, None] * matrix


def _check_answers(answers: int) -> None:
    if answers < 2:
        raise InputError(key="answers", given=answers, allowed="allowed are whole numbers from 2")


def kept_response(keep: float, answers: int) -> Response:
    """Return the law that gives the true one of K answers with this probability, above 1/K."""
    _check_answers(answers)
    if not 1 / answers < keep < 1:
        raise InputError(
            key="keep", given=keep, allowed=f"with {answers} answers allowed is above 1 / {answers}, below 1"
        )
    return Response(math.log(keep * (answers - 1) / (1 - keep)), answers)


def coin_response(heads: float, answers: int) -> Response:
    """Return the law of a truth with this probability, else any of K answers: ln(1 + K heads / (1 - heads))."""
    if not 0 < heads < 1:
        raise InputError(key="coin", given=heads, allowed="allowed is above 0, below 1")
    return Response(math.log1p(answers * heads / (1 - heads)), answers)


def most_told(epsilon: float, baseline: float) -> float:
    """Return how often anything is told of what epsilon-DP protects, at most: the odds of a guess grow by e^epsilon."""
    return baseline / (baseline + (1 - baseline) * math.exp(-epsilon))


def label_guarantee(response: Response, notes: Sequence[str] = ()) -> Guarantee:
    """Return the line of the ledger about labels that a client changed once."""
    theorem = (
        "randomised response, once for each label (Warner 1965; Kairouz, Oh and Viswanath 2016); all that follows is "
        "post-processing of changed labels and of features"
    )
    adjacency = Adjacency.REPLACE_LABEL.worded(
        "one example's label is replaced by any other; its features stay, and may be known"
    )
    claim = Claim(response.epsilon, theorem)
    return stated(
        adjacency, 1, 0.0, claim, claim, Claim(math.inf, "there is no other figure than the proven one"), notes
    )
