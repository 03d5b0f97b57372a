"""Bounds of a table's numbers under differential privacy, from noisy histograms with powers of two as edges.

The approximate bounds of Wilson, Zhang, Lam, Desfontaines, Simmons-Marengo and Gipson: Differentially Private SQL with
Bounded User Contribution, PoPETs 2020, section 5.1. The noise on counts is discrete, so that no floating point leaks.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.randomness import Secret

SMALLEST, LARGEST = -10, 50  # exponents of the edges
_POSITIVE = 2.0 ** np.arange(SMALLEST, LARGEST + 1)
EDGES: NDArray[np.float64] = np.concatenate([-_POSITIVE[::-1], [0.0], _POSITIVE])
"""Of the bins: (edge, next edge], the first one closed; numbers beyond the last edges count for the last bins."""

FALSE_ALARMS = 0.01  # chance that any empty bin of a column is taken for one that is not
_SENSITIVITY = 2  # replacing a row takes one from a count and adds one to another


def estimated_bounds(
    numbers: Mapping[str, NDArray[np.float64]], epsilon: float, secret: Secret
) -> dict[str, tuple[float, float]]:
    """Return low and high of each column, epsilon-DP all together, for replacing a row.

    Args:
        numbers: name of a column -> (N,), NaN where a cell is empty.
    """
    each = epsilon / len(numbers)
    scale = _SENSITIVITY / each
    bins = len(EDGES) - 1
    # P(noise >= t) < exp(-t / scale) for each of the bins.
    threshold = scale * math.log(bins / FALSE_ALARMS)
    bounds = {}
    for place, (name, values) in enumerate(numbers.items()):
        counts = _counts(values) + _geometric(bins, each / _SENSITIVITY, secret.stream("bounds", place).numpy())
        full = np.flatnonzero(counts > threshold)
        if not len(full):
            raise InputError(
                f"epsilon = {epsilon:g} is too little for so few rows: the bounds of {name!r} are lost "
                "in noise; tell low and high, or allow more"
            )
        bounds[name] = float(EDGES[full[0]]), float(EDGES[full[-1] + 1])
    return bounds


def _counts(values: NDArray[np.float64]) -> NDArray[np.int64]:
    known = values[~np.isnan(values)]
    places = np.searchsorted(EDGES, known, side="left") - 1
    counts: NDArray[np.int64] = np.bincount(places.clip(0, len(EDGES) - 2), minlength=len(EDGES) - 1)
    return counts


def _geometric(count: int, epsilon: float, draws: np.random.Generator) -> NDArray[np.int64]:
    """Two-sided geometric noise: P(k) proportional to exp(-epsilon |k|); the difference of two geometric numbers."""
    success = -math.expm1(-epsilon)
    noise: NDArray[np.int64] = draws.geometric(success, count) - draws.geometric(success, count)
    return noise
