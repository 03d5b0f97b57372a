"""The von Mises-Fisher distribution the slow way: numerical integration for its cosine, and one draw an example in R^K.

Nothing here is shared with the package: the cosine is drawn by inverting its distribution function, the sum by adding.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@cache
def angle_law(kappa: float, dimension: int) -> tuple[Floats, Floats]:
    """Angles to the mean direction, and the distribution function there, for dimension >= 2.

    The density of the angle is proportional to exp(kappa cos(angle)) sin(angle)^(dimension - 2).
    """
    d = dimension - 2
    mode = np.arccos(2 * kappa / (d + np.hypot(d, 2 * kappa))) if d + kappa > 0 else np.pi / 2
    curvature = kappa * np.cos(mode) + d / max(np.sin(mode) ** 2, 1e-300) if d else kappa
    width = 40 / np.sqrt(curvature) if curvature > 0 else np.pi
    angles = np.linspace(max(0.0, mode - width), min(np.pi, mode + width), 400_001)
    height = kappa * (np.cos(angles) - 1)
    if d:
        with np.errstate(divide="ignore"):
            height = height + d * np.log(np.sin(angles))
    density = np.exp(height - height.max())
    steps = (density[1:] + density[:-1]) / 2
    cumulative = np.concatenate([[0.0], np.cumsum(steps)])
    cumulative /= cumulative[-1]
    for shared in (angles, cumulative):
        shared.flags.writeable = False
    return angles, cumulative


def draw_sums(gradients: Floats, kappa: float, count: int, rng: np.random.Generator) -> Floats:
    """``count`` sums, (count, K), of one draw for each row of ``gradients`` (B, K), K >= 2."""
    dimension = gradients.shape[1]
    angles, cumulative = angle_law(kappa, dimension)
    total = np.zeros((count, dimension))
    for gradient in gradients:
        length = np.linalg.norm(gradient)
        free = rng.standard_normal((count, dimension))
        if length == 0:
            total += free / np.linalg.norm(free, axis=1, keepdims=True)
            continue
        direction = gradient / length
        free -= np.outer(free @ direction, direction)
        free /= np.linalg.norm(free, axis=1, keepdims=True)
        angle = np.interp(rng.random(count), cumulative, angles)[:, None]
        total += np.cos(angle) * direction + np.sin(angle) * free
    return total
