"""The price of choosing: what is proven of the best of several private trials.

A trial draws one of the settings uniformly, trains with them, and is scored. The best of K such trials is as private as
one of them only nearly, if K is drawn from a law with a heavy tail (Papernot and Steinke 2022); of a fixed number of
trials all that is known is that each of them may have been released. Settings that differ in their noise are taken at
the worst of them at each Renyi order: which of them were drawn says nothing about the data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from fedpriv.accounting.renyi import ORDERS, rdp_to_epsilon

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Selection:
    """What is proven of the best of so many trials, by how their number came about."""

    number: str  # how many trials there are, in words
    epsilon: float  # at the trials' delta
    theorem: str


def selections(trials: Sequence[Array], delta: float) -> tuple[Selection, ...]:
    """Return what is proven of the best of trials, given each one's Renyi privacy at ORDERS, at this delta."""
    mean, worst = len(trials), np.max(trials, axis=0)

    def at(rdp: Array) -> float:
        return rdp_to_epsilon(ORDERS, rdp, delta)

    fixed = f"{mean}, as in this sweep, each of which may be released"
    found = [Selection(fixed, at(np.sum(trials, axis=0)), "Renyi privacy adds up (Mironov 2017, Prop. 1)")]
    if mean == 1:
        return tuple(found)
    return (
        *found,
        Selection(f"drawn from a Poisson law of mean {mean}", at(best_of_poisson(worst, mean)), _POISSON),
        Selection(f"drawn from a geometric law of mean {mean}", at(best_of_truncated(worst, mean, 1.0)), _TRUNCATED),
        Selection(f"drawn from a logarithmic law of mean {mean}", at(best_of_truncated(worst, mean, 0.0)), _TRUNCATED),
    )


_POISSON = "Papernot and Steinke 2022, Theorem 6"
_TRUNCATED = "Papernot and Steinke 2022, Theorem 2"


def best_of_poisson(rdp: Array, mean: float) -> Array:
    """Return the Renyi privacy at ORDERS of the best of K trials with ``rdp`` there, K from a Poisson law."""
    within = np.log1p(1 / (ORDERS - 1))  # an epsilon, at which each trial has a delta
    logs = (ORDERS - 1) * (rdp - within[:, None]) + (ORDERS - 1) * np.log1p(-1 / ORDERS) - np.log(ORDERS)
    deltas = np.exp(np.minimum(logs.min(axis=1), 0.0))  # Canonne, Kamath and Steinke 2020, Prop. 12
    return np.asarray(rdp + mean * deltas + math.log(mean) / (ORDERS - 1))


def best_of_truncated(rdp: Array, mean: float, shape: float) -> Array:
    """Return the same for K from a negative binomial law that is at least 1: shape 1 geometric, 0 logarithmic."""
    chance = 1 / mean if shape == 1 else _logarithmic(mean)
    beside = float(np.min((1 - 1 / ORDERS) * rdp - math.log(chance) / ORDERS))
    return np.asarray(rdp + (1 + shape) * beside + math.log(mean) / (ORDERS - 1))


def _logarithmic(mean: float) -> float:
    """The parameter gamma of the logarithmic law of this mean, (1 / gamma - 1) / log(1 / gamma)."""
    return math.exp(-scipy.optimize.brentq(lambda x: math.expm1(x) / x - mean, 1e-9, 700.0))
