"""What the sum of a batch's von Mises-Fisher draws takes of random numbers beside the normal ones."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedpriv.mechanisms.machinery.cosine import Floats, draw_cosines, draw_uniform_cosines


class SmallDraws(NamedTuple):
    """What is drawn for G groups of b examples in R^K beside the normal numbers, r dimensions inside the spans.

    Attributes:
        cosine: of each draw with its direction, (G, b).
        sine: that belongs to it, (G, b).
        outside: squared lengths outside the spans, (G, b), from chi^2(K - r).
        turns: cosines of uniform directions in R^(K - r), (G, b - 1); none where that has no dimension.
    """

    cosine: Floats
    sine: Floats
    outside: Floats
    turns: Floats


def draw_small(kappa: float, dimension: int, rank: int, shape: tuple[int, int], rng: np.random.Generator) -> SmallDraws:
    """Draw all numbers of the size of the batch but the normal ones."""
    free, (groups, examples) = dimension - rank, shape
    cosines = draw_cosines(kappa, dimension, groups * examples, rng)
    outside = rng.chisquare(free, shape) if free else np.zeros(shape)
    turns = draw_uniform_cosines(free, groups * (examples - 1), rng) if free and examples else np.zeros(0)
    return SmallDraws(cosines.cosine.reshape(shape), cosines.sine.reshape(shape), outside, turns.reshape(groups, -1))


def draw_small_each(
    kappa: float, dimension: int, rank: int, shape: tuple[int, int], rngs: Sequence[np.random.Generator]
) -> SmallDraws:
    """Draw them for each of M batches of G groups from a generator of its own, (M G, ...); as :func:`draw_small`."""
    each = [draw_small(kappa, dimension, rank, shape, rng) for rng in rngs]
    return SmallDraws(*(np.concatenate(values) for values in zip(*each, strict=True)))
