"""Inner products of random releases with given vectors, drawn in the space that these span."""

import numpy as np
from numpy.typing import NDArray

from fedpriv.mechanisms.machinery.cosine import draw_cosines

Array = NDArray[np.float64]

_NEGLIGIBLE = 1e-13  # of the largest eigenvalue: what rounding leaves of a direction that is not there


def normal_products(gram: Array, variance: float, sources: NDArray[np.int64], rng: np.random.Generator) -> Array:
    """Return inner products of N(e_i, variance) with all e_j, (draws, N).

    Args:
        gram: (N, N), of the e.
        sources: i of each draw, (draws,).
    """
    coordinates = _coordinates(gram)
    noise = rng.standard_normal((len(sources), coordinates.shape[1]))
    products: Array = gram[sources] + np.sqrt(variance) * noise @ coordinates.T
    return products


def directional_products(
    gram: Array, kappa: float, dimension: int, length: float, sources: NDArray[np.int64], rng: np.random.Generator
) -> Array:
    """Return inner products of von Mises-Fisher draws around e_i / |e_i| with all e_j, (draws, N).

    A draw is t u + sqrt(1 - t^2) w, w uniform across u. In the span of the e, w is a normal vector without its part
    along u, divided by its length; the part of that length outside the span is chi-squared.

    Args:
        gram: (N, N), of the e, none of which is zero.
        sources: i of each draw, (draws,).
    """
    coordinates = _coordinates(gram)
    directions = coordinates / np.linalg.norm(coordinates, axis=1, keepdims=True)
    drawn = draw_cosines(kappa, dimension, len(sources), rng)
    mean, across = directions[sources], rng.standard_normal((len(sources), coordinates.shape[1]))
    across -= (across * mean).sum(axis=1, keepdims=True) * mean
    outside = dimension - coordinates.shape[1]
    squared = (across**2).sum(axis=1) + (rng.chisquare(outside, len(sources)) if outside > 0 else 0.0)
    sines = drawn.sine / np.sqrt(np.maximum(squared, np.finfo(float).tiny))
    products: Array = length * (drawn.cosine[:, None] * mean + sines[:, None] * across) @ coordinates.T
    return products


def _coordinates(gram: Array) -> Array:
    """Vectors (N, r) with these inner products."""
    values, vectors = np.linalg.eigh(gram)
    kept = values > _NEGLIGIBLE * max(float(values[-1]), 0.0)
    coordinates: Array = vectors[:, kept] * np.sqrt(values[kept])
    return coordinates
