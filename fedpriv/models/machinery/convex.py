"""The certified convex model: softmax regression on bounded features, trained until its gradient is proven small.

It minimises F(W) = (1/n) sum cross-entropy(W phi_i, y_i) + lambda/2 |W|^2 in float64, over weights alone: with a bias
that is not regularised it would not be strongly convex. What follows from the certificate is in
:mod:`fedpriv.service.proof` and :mod:`fedpriv.accounting.convex_models`.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special
from scipy.sparse.linalg import LinearOperator, cg

from fedpriv.accounting.convex_models import MOST_STEPS, descent_steps
from fedpriv.core.errors import InputError, RunFailedError

Array = NDArray[np.float64]

_NEWTON = 30
# Arithmetic in float64 is not exact: training stops at half of the tolerance that is claimed.
_STOP = 0.5


@dataclass(frozen=True, eq=False)
class ConvexModel:
    """A trained convex model."""

    weights: Array  # (classes, d) float64
    gradient_norm: float  # of F there, at most half of the tolerance. It depends on the data: it is for nobody outside


@dataclass(frozen=True, eq=False)
class Objective:
    """F, its gradient and its curvature."""

    features: Array  # (n, d) float64
    labels: NDArray[np.int64]  # (n,), from 0 to classes - 1
    classes: int  # C
    regularisation: float  # lambda, above 0
    offset: Array | None = None  # (C, d), of a term <offset, W> that is added to F; None: none is

    def value(self, weights: Array) -> float:
        """Return F at weights (C, d)."""
        logits = self.features @ weights.T
        top = logits.max(axis=1)
        losses = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top - logits[self._rows, self.labels]
        value = float(losses.mean() + self.regularisation / 2 * (weights**2).sum())
        return value if self.offset is None else value + float((self.offset * weights).sum())

    def gradient(self, weights: Array) -> Array:
        """Return dF/dW (C, d) at weights (C, d)."""
        off = special.softmax(self.features @ weights.T, axis=1)
        off[self._rows, self.labels] -= 1
        gradient: Array = off.T @ self.features / len(self.labels) + self.regularisation * weights
        return gradient if self.offset is None else gradient + self.offset

    def curvature(self, weights: Array, direction: Array) -> Array:
        """Return the second derivative of F at weights times a direction, both (C, d)."""
        shares = special.softmax(self.features @ weights.T, axis=1)
        moved = self.features @ direction.T
        moved = shares * (moved - (shares * moved).sum(axis=1, keepdims=True))
        return moved.T @ self.features / len(self.labels) + self.regularisation * direction

    @property
    def _rows(self) -> NDArray[np.int64]:
        return np.arange(len(self.labels))


def minimised(objective: Objective, norm: float, tolerance: float) -> ConvexModel:
    """Return the minimiser, up to a gradient of norm ``tolerance``.

    L-BFGS, then Newton steps for what its line search cannot see in float64, then gradient descent, which always gets
    there: F's smoothness is at most R^2 / 2 + lambda.
    """
    longest = float(np.sqrt((objective.features**2).sum(axis=1)).max())
    if not longest <= norm * (1 + 1e-12):
        raise InputError(f"features of length {longest:g}: at most {norm:g} is proven")
    shape = objective.classes, objective.features.shape[1]
    solution = optimize.minimize(
        lambda flat: objective.value(flat.reshape(shape)),
        np.zeros(math.prod(shape)),
        jac=lambda flat: objective.gradient(flat.reshape(shape)).ravel(),
        method="L-BFGS-B",
        options={"maxiter": 2000, "gtol": tolerance / 10, "ftol": 0.0},
    )
    weights: Array = solution.x.reshape(shape)
    for _ in range(_NEWTON):
        if np.linalg.norm(objective.gradient(weights)) <= _STOP * tolerance:
            break
        weights = _newton(objective, weights)
    # No worse than where it began: descent counts on weights that are not too long.
    origin = np.zeros(shape)
    if not objective.value(weights) <= objective.value(origin):
        weights = origin
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


def _descended(objective: Objective, weights: Array, norm: float, tolerance: float) -> ConvexModel:
    """Gradient descent to the end."""
    smoothness = norm**2 / 2 + objective.regularisation
    gradient = objective.gradient(weights)
    length = float(np.linalg.norm(gradient))
    needed = descent_steps(smoothness, objective.regularisation, length, tolerance)
    left = min(needed, MOST_STEPS)
    while length > _STOP * tolerance and left > 0:
        weights = weights - gradient / smoothness
        gradient, left = objective.gradient(weights), left - 1
        length = float(np.linalg.norm(gradient))
    if length > _STOP * tolerance:
        ended = f"after {MOST_STEPS:,} steps" if needed > MOST_STEPS else "float64 ends there"
        raise RunFailedError(
            f"the convex model's gradient stays at {length:.3g}, above the tolerance {tolerance:g}: {ended}; choose a "
            "larger tolerance or regularisation"
        )
    return ConvexModel(weights, length)
