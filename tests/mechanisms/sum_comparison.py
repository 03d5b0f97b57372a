"""Gradients of all kinds, and the comparison of two samples of sums of draws around them.

Compared are projections of the sums on gradients, on the mean and on others, the products of all pairs of these (for
the covariance) and the norms, each by a Kolmogorov-Smirnov test, and the means of all coordinates.
"""

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]


def gradients(case: str, examples: int, dimension: int) -> Floats:
    """Rows of different lengths, none of them 1."""
    rng = np.random.default_rng(41)
    rows = rng.standard_normal((examples, dimension)) * np.logspace(-1, 1, examples)[:, None]
    match case:
        case "duplicates":
            rows[1::2] = 2 * rows[0]
        case "opposite":
            rows[1] = -rows[0]
        case "zeros":
            rows[::2] = 0
        case "all-zero":
            rows[:] = 0
        case "plane":
            rows = rng.standard_normal((examples, 2)) @ rng.standard_normal((2, dimension))
        case "close":
            rows = rows[:1] + 1e-3 * rows
    return rows


def statistics(rows: Floats) -> Iterator[Callable[[Floats], Floats]]:
    rng = np.random.default_rng(42)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    mean = (rows / np.where(lengths > 0, lengths, 1)).sum(axis=0)
    axes = [rows[0], rows[-1], mean, *rng.standard_normal((3, rows.shape[1]))]
    axes = [axis for axis in axes if axis.any()]
    for axis in axes:
        yield lambda sums, axis=axis: sums @ axis / np.linalg.norm(axis)
    for left, right in combinations(axes, 2):
        yield lambda sums, left=left, right=right: (sums @ left) * (sums @ right)
    yield lambda sums: np.linalg.norm(sums, axis=1)


def smallest_pvalue(rows: Floats, left: Floats, right: Floats) -> float:
    """Of all comparisons, times their number: below p with probability at most p if the laws are the same.

    Args:
        rows: the gradients, (B, K).
        left: sums, (n, K).
        right: sums, (m, K).
    """
    # Rounded, because the norm of a single draw is 1 up to the last bits.
    found = [stats.ks_2samp(of(left).round(5), of(right).round(5)).pvalue for of in statistics(rows)]
    error = np.sqrt(left.var(axis=0) / len(left) + right.var(axis=0) / len(right))
    means = np.abs(left.mean(axis=0) - right.mean(axis=0)) / error
    found.append(2 * stats.norm.sf(means.max()) * len(means))
    return float(min(found) * len(found))
