"""Bounds of a table's numbers under differential privacy, from noisy histograms with powers of two as edges.

The approximate bounds of Wilson, Zhang, Lam, Desfontaines, Simmons-Marengo and Gipson: Differentially Private SQL with
Bounded User Contribution, PoPETs 2020, section 5.1. Numbers far from zero, such as years, are then counted once more,
by their distance from the fullest of many equal bins. The noise on counts is discrete, so that no floating point leaks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.randomness import Secret

if TYPE_CHECKING:
    from fedpriv.data.schema import Schema

SMALLEST, LARGEST = -10, 50  # exponents of the edges
_POSITIVE = 2.0 ** np.arange(SMALLEST, LARGEST + 1)
EDGES: NDArray[np.float64] = np.concatenate([-_POSITIVE[::-1], [0.0], _POSITIVE])
"""Of the bins: (edge, next edge], the first one closed; numbers beyond the last edges count for the last bins."""

FALSE_ALARMS = 0.01  # chance that any empty bin of a column is taken for one that is not
SHARES = (1 / 2, 1 / 4, 1 / 4)  # of a column's epsilon: bounds, the fullest of equal bins, distances from it
_SENSITIVITY = 2  # replacing a row takes one from a count and adds one to another
_EQUAL_BINS = 256
_FAR = 4  # times the smaller bound: the larger one of numbers far from zero, or less
_CLOSE = 4  # times narrower, at the least, are bounds by distance: in narrow ones the outer bins have few rows


@dataclass(frozen=True)
class PrivateBounds:
    """An estimate of the low and high that nobody has told."""

    low_high: Mapping[str, tuple[float, float]]  # of columns, by name
    left_out: Mapping[str, str]  # why other columns have none
    section: str  # [data.table] with them and with all else that lacks


def private_bounds(schema: "Schema", epsilon: float, secret: Secret, before: float = 0.0) -> PrivateBounds:
    """Estimate untold low and high of numbers, epsilon-DP for replacing a row; ``before``: told estimates."""
    advice = schema.advice()
    numbers = schema.open_numbers(advice)
    if not numbers:
        raise InputError(f"{schema.train.where}: every column of numbers has its low and high already")
    bounds = estimated_bounds(numbers, epsilon, secret)
    section = schema.section(advice, bounds, bounds_epsilon=before + epsilon)
    return PrivateBounds(bounds, schema.left_out(advice), section)


def estimated_bounds(
    numbers: Mapping[str, NDArray[np.float64]], epsilon: float, secret: Secret
) -> dict[str, tuple[float, float]]:
    """Return low and high of each column, epsilon-DP all together, for replacing a row."""
    bounds = {}
    for place, (name, values) in enumerate(numbers.items()):
        draws = secret.stream("bounds", place).numpy()
        found = _bounds(values[~np.isnan(values)], epsilon / len(numbers), draws)
        if found is None:
            raise InputError(
                key="epsilon",
                given=epsilon,
                allowed=f"too little for so few rows: the bounds of {name!r} are lost in noise",
                hint="give low and high, or allow more",
            )
        bounds[name] = found
    return bounds


def _bounds(values: NDArray[np.float64], epsilon: float, draws: np.random.Generator) -> tuple[float, float] | None:
    coarse, equal, near = (share * epsilon for share in SHARES)
    full = _full(values, coarse, draws)
    if not len(full):
        return None
    low, high = float(EDGES[full[0]]), float(EDGES[full[-1] + 1])
    if max(abs(low), abs(high)) > _FAR * min(abs(low), abs(high)) or low * high <= 0:
        return _rounded(low, high)
    edges = np.linspace(low, high, _EQUAL_BINS + 1)
    centre = float(edges[_noisy(_counts(values, edges), equal, draws).argmax()])
    full = _full(values - centre, near, draws)
    if not len(full):
        return _rounded(low, high)
    first, last = max(full[0] - 1, 0), min(full[-1] + 2, len(EDGES) - 1)  # one bin more on each side
    closer = max(low, centre + float(EDGES[first])), min(high, centre + float(EDGES[last]))
    return _rounded(*(closer if 0 < closer[1] - closer[0] <= (high - low) / _CLOSE else (low, high)))


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Bounds as a person would write them, no narrower."""
    places = 1 - math.floor(math.log10(high - low))
    unit = 10.0**-places
    return round(math.floor(low / unit) * unit, max(places, 0)), round(math.ceil(high / unit) * unit, max(places, 0))


def _full(values: NDArray[np.float64], epsilon: float, draws: np.random.Generator) -> NDArray[np.int64]:
    """The bins between powers of two whose noisy counts stand out."""
    counts = _noisy(_counts(values, EDGES), epsilon, draws)
    # P(noise >= t) < exp(-t / scale) for each of the bins.
    return np.flatnonzero(counts > threshold(epsilon))


def threshold(epsilon: float) -> float:
    """Return what the noise on no count of :data:`EDGES` exceeds, but for one time in 1 / FALSE_ALARMS."""
    return _SENSITIVITY / epsilon * math.log((len(EDGES) - 1) / FALSE_ALARMS)


def _counts(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    places = np.searchsorted(edges, values, side="left") - 1
    return np.bincount(places.clip(0, len(edges) - 2), minlength=len(edges) - 1)


def _noisy(counts: NDArray[np.int64], epsilon: float, draws: np.random.Generator) -> NDArray[np.int64]:
    return counts + _geometric(len(counts), epsilon / _SENSITIVITY, draws)


def _geometric(count: int, epsilon: float, draws: np.random.Generator) -> NDArray[np.int64]:
    """Two-sided geometric noise: P(k) proportional to exp(-epsilon |k|); the difference of two geometric numbers."""
    success = -math.expm1(-epsilon)
    return draws.geometric(success, count) - draws.geometric(success, count)
