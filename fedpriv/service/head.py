"""The certified convex model: softmax regression on public features, trained until its gradient is proven small.

It minimises F(W) = (1/n) sum cross-entropy(W phi_i, y_i) + lambda/2 |W|^2 in float64, over weights alone: with a bias
that is not regularised it would not be strongly convex. What follows from the certificate is
in :mod:`fedpriv.accounting.answers`.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize
from scipy.sparse.linalg import LinearOperator, cg

from fedpriv.errors import InputError, RunFailedError
from fedpriv.service.policies import softmax

__all__ = ["Head", "Objective", "fit_head", "pooled_features"]

Array = NDArray[np.float64]

_NEWTON = 30
# Arithmetic in float64 is not exact: training stops at half of the tolerance that is claimed.
_STOP = 0.5


@dataclass(frozen=True, eq=False)
class Head:
    """A trained convex model.

    Attributes:
        weights: (classes, d) float64.
        gradient_norm: of F there, at most half of the tolerance. It depends on the data: it is for nobody outside.
    """

    weights: Array
    gradient_norm: float


@dataclass(frozen=True, eq=False)
class Objective:
    """F, its gradient and its curvature.

    Attributes:
        features: (n, d) float64.
        labels: (n,), from 0 to classes - 1.
        classes: C.
        regularisation: lambda, above 0.
    """

    features: Array
    labels: NDArray[np.int64]
    classes: int
    regularisation: float

    def value(self, weights: Array) -> float:
        """Return F at weights (C, d)."""
        logits = self.features @ weights.T
        top = logits.max(axis=1)
        losses = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top - logits[self._rows, self.labels]
        return float(losses.mean() + self.regularisation / 2 * (weights**2).sum())

    def gradient(self, weights: Array) -> Array:
        """Return dF/dW (C, d) at weights (C, d)."""
        off = softmax(self.features @ weights.T)
        off[self._rows, self.labels] -= 1
        gradient: Array = off.T @ self.features / len(self.labels) + self.regularisation * weights
        return gradient

    def curvature(self, weights: Array, direction: Array) -> Array:
        """Return the second derivative of F at weights times a direction, both (C, d)."""
        shares = softmax(self.features @ weights.T)
        moved = self.features @ direction.T
        moved = shares * (moved - (shares * moved).sum(axis=1, keepdims=True))
        curved: Array = moved.T @ self.features / len(self.labels) + self.regularisation * direction
        return curved

    @property
    def _rows(self) -> NDArray[np.int64]:
        return np.arange(len(self.labels))


def fit_head(objective: Objective, norm: float, tolerance: float) -> Head:
    """Return the minimiser, up to a gradient of norm ``tolerance``.

    L-BFGS, then Newton steps for what its line search cannot see in float64, then gradient descent, which always gets
    there: F's smoothness is at most R^2 / 2 + lambda.

    Args:
        objective: F.
        norm: R, the largest length of an example's features.
        tolerance: tau, at least 1e-12.

    Raises:
        InputError: an example's features are longer than R, or a number is not finite.
        RunFailedError: the tolerance is below what float64 can reach.
    """
    longest = float(np.sqrt((objective.features**2).sum(axis=1)).max())
    if not longest <= norm * (1 + 1e-12):
        raise InputError(f"features of length {longest:g}: at most service.feature_norm = {norm:g} is proven")
    shape = objective.classes, objective.features.shape[1]
    found = optimize.minimize(
        lambda flat: objective.value(flat.reshape(shape)),
        np.zeros(math.prod(shape)),
        jac=lambda flat: objective.gradient(flat.reshape(shape)).ravel(),
        method="L-BFGS-B",
        options={"maxiter": 2000, "gtol": tolerance / 10, "ftol": 0.0},
    )
    weights: Array = found.x.reshape(shape)
    for _ in range(_NEWTON):
        if np.linalg.norm(objective.gradient(weights)) <= _STOP * tolerance:
            break
        weights = _newton(objective, weights)
    return _descended(objective, weights, norm, tolerance)


def _newton(objective: Objective, weights: Array) -> Array:
    """One Newton step, or none where it does not make the gradient shorter."""
    gradient = objective.gradient(weights)
    operator = LinearOperator(
        (weights.size, weights.size),
        matvec=lambda flat: objective.curvature(weights, flat.reshape(weights.shape)).ravel(),
        dtype=np.float64,
    )
    step, _ = cg(operator, gradient.ravel(), rtol=1e-4, maxiter=500)
    moved: Array = weights - step.reshape(weights.shape)
    shorter = np.linalg.norm(objective.gradient(moved)) < np.linalg.norm(gradient)
    return moved if shorter else weights


def _descended(objective: Objective, weights: Array, norm: float, tolerance: float) -> Head:
    """Gradient descent to the end; (smoothness / lambda) log(gradient / tolerance) steps are enough."""
    smoothness = norm**2 / 2 + objective.regularisation
    gradient = objective.gradient(weights)
    length = float(np.linalg.norm(gradient))
    left = smoothness / objective.regularisation * math.log(max(smoothness * length / tolerance, 1) * 1e3) + 1
    while length > _STOP * tolerance and left > 0:
        weights = weights - gradient / smoothness
        gradient, left = objective.gradient(weights), left - 1
        length = float(np.linalg.norm(gradient))
    if length > _STOP * tolerance:
        raise RunFailedError(
            f"the convex model's gradient stays at {length:.3g}, above service.tolerance = {tolerance:g}: float64 ends "
            "there; choose a larger tolerance"
        )
    return Head(weights, length)


def pooled_features(images: Array, size: int | None, norm: float) -> Array:
    """Return public features (n, d) of images: pixels, averaged over squares, scaled to one length.

    Args:
        images: (n, C, H, W) on [0, 1].
        size: of the averaged image's sides; ``None``: as the images are.
        norm: the length of each example's features; a black image's are zero.

    Raises:
        InputError: the sides are not multiples of ``size``.
    """
    count, channels, height, width = images.shape
    if size is not None:
        if height % size or width % size:
            raise InputError(f"service.features = 'pooled:{size}': images of {height} x {width} are no multiple of it")
        squares = images.reshape(count, channels, size, height // size, size, width // size)
        images = squares.mean(axis=(3, 5))
    flat = images.reshape(count, -1)
    lengths = np.sqrt((flat**2).sum(axis=1, keepdims=True))
    features: Array = norm * flat / np.where(lengths > 0, lengths, 1)
    return features
