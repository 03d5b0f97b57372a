"""Recover the exact probabilities behind Algorithm 1 of Lu et al. 2022 from two answers to one question.

An answer is the softmax of logits of which one, drawn at random, has noise. Up to one shift the others are exact. Two
answers agree in all logits but the two that were drawn, and each has the one that the other lacks.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# What rounding of probabilities in float64 leaves of equal logits.
_EQUAL = 1e-6


def exact_logits(one: Array, two: Array) -> Array:
    """Return the logits, (classes,), up to a shift: exact unless both answers drew the same class.

    Of the two logits in which the answers differ either may be the noisy one of the first: the pair that lies
    closer to the middle of all others is believed, since noise of any use throws a logit far out. No better choice
    is possible where logits are normal: both readings take the same amounts of noise, with other signs. Logarithms
    of probabilities tell more than these, which float64 takes for 0 where noise made another one large.
    """
    first, second = one, two
    finite = np.isfinite(first) & np.isfinite(second)
    if not finite.any():
        return first
    shift = float(np.median(first[finite] - second[finite]))
    second = second + shift
    equal = finite & (np.abs(np.where(finite, first, 0) - np.where(finite, second, 0)) < _EQUAL)
    differ = ~equal
    middle = float(first[equal].mean()) if equal.any() else 0.0
    choices = [_mixed(first, second, differ, at) for at in np.flatnonzero(differ).tolist()] or [first]
    return min(choices, key=lambda logits: float(np.square(logits - middle)[differ].sum()))


def _mixed(first: Array, second: Array, differ: NDArray[np.bool_], at: int) -> Array:
    """Take the one logit from the second answer, and all others in which they differ from the first."""
    logits = first.copy()
    logits[at] = second[at]
    return logits
