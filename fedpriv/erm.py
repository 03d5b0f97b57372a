"""Empirical risk minimisation of one client: bounded features, the certified minimum, and a mechanism's noise.

The network is one linear layer. Its inputs x get a constant feature 1, are divided by a public length and shortened to
length 1 where they are longer; a shorter vector of features points the same way and so names the same class. With two
classes one vector w is trained (logistic regression), and the network's two rows are -w/2 and w/2.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.accounting.erm import Problem, is_solvable, least_tolerance, most_steps
from fedpriv.convex import MOST_STEPS, Objective, minimised
from fedpriv.core.config.erm import ErmConfig
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.data.datasets import Dataset
from fedpriv.gradients import Vector
from fedpriv.mechanisms import MechanismSettings
from fedpriv.mechanisms.machinery.model_noise import ModelNoiseSettings, Weights

__all__ = [
    "bounded_features",
    "longest_parameters",
    "problem_of",
    "refuse_unsolvable",
    "trained_parameters",
    "usual_length",
]

_LOG = logging.getLogger(__name__)


def problem_of(erm: ErmConfig, dataset: Dataset, examples: int) -> Problem:
    """Return the public sizes of the problem of a client who holds so many examples of a data set."""
    features = math.prod(dataset.shape) + 1
    return Problem(examples, features, dataset.classes, erm.regularisation, erm.tolerance)


def refuse_unsolvable(
    problem: Problem, section: str, about: str, solved: Callable[[Problem], tuple[Problem, float]]
) -> None:
    """Refuse public sizes with which the solver might end early, for some data only.

    A model that is not trained to its tolerance may be further from its neighbour's than is proven, and a refusal once
    the data are seen would tell something of them.

    Args:
        problem: the public sizes.
        section: of the settings, that has the keys ``tolerance`` and ``regularisation``.
        about: whose problem it is, in words.
        solved: what the solver is given for such a problem: sizes with features of length 1, and the length of a term.

    Raises:
        InputError: naming the key and, where there is one, a value that is allowed.
    """
    given, tilt = solved(problem)
    if is_solvable(given, tilt):
        return
    if least_tolerance(given, tilt) > given.tolerance:
        key, most, reason = "tolerance", 1.0, "float64 may end above it"
    else:
        key, most = "regularisation", 1e9
        reason = f"the solver may take {most_steps(given, tilt):.0e} steps, {MOST_STEPS:,} are allowed"
    value = getattr(problem, key)
    while value <= most and not is_solvable(*solved(replace(problem, **{key: value}))):
        value = float(f"{1.2 * value:.1e}")
    way = f"set {section}.{key} to {value:.1e} or more" if value <= most else f"raise {section}.regularisation too"
    raise InputError(f"{section}.{key} = {getattr(problem, key):g}: {reason}, for {about}; {way}")


def usual_length(inputs: Tensor) -> float:
    """Return the median length of inputs (n, C, H, W) with a constant feature 1, n at least 1."""
    lengths = (inputs.flatten(1).double().square().sum(dim=1) + 1).sqrt()
    return float(lengths.median())


def bounded_features(inputs: Tensor, length: float) -> NDArray[np.float64]:
    """Return features (n, d) of length 1 at most; the last one was constant.

    Args:
        inputs: (n, C, H, W), as the network is fed.
        length: that features are divided by, above 0.
    """
    flat = inputs.flatten(1).double().cpu()
    features = torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1).div_(length)
    # A hair below 1, so that rounding leaves none of them longer.
    bounded: NDArray[np.float64] = (features / features.norm(dim=1, keepdim=True).mul_(1 + 1e-12).clamp_(min=1)).numpy()
    return bounded


def trained_parameters(
    problem: Problem,
    features: NDArray[np.float64],
    labels: NDArray[np.int64],
    mechanism: MechanismSettings,
    noise: np.random.Generator | None,
    length: float,
    like: Vector,
) -> Vector:
    """Train one client's model and release it as the network's parameters.

    Args:
        problem: the client's public sizes.
        features: (n, d), of :func:`bounded_features`.
        labels: (n,).
        mechanism: whose noise is added.
        noise: what it draws from, used for nothing else; ``None``: nothing protects the model.
        length: that features were divided by.
        like: the network's weight (K, d - 1) and bias (K,), for names and types.

    Raises:
        RunFailedError: without noise: float64 ends above the tolerance. With noise the model counts as zero then: a
            refusal would tell something of the data. Settings with which that could happen are refused beforehand
            (:func:`refuse_unsolvable`).
    """

    def fit(regularisation: float, offset: Weights | None) -> Weights:
        try:
            return _minimum(problem, features, labels, regularisation, offset)
        except RunFailedError as error:
            if noise is None:
                raise
            _LOG.warning("the model counts as zero: %s", error)
            return np.zeros((problem.rows, problem.features))

    if noise is None or not isinstance(mechanism, ModelNoiseSettings):
        weights = fit(problem.regularisation, None)
    else:
        weights = mechanism.released(problem, fit, noise)
    rows = np.concatenate([-weights / 2, weights / 2]) if problem.rows == 1 else weights
    layer = torch.from_numpy(rows / length)
    parts = (layer[:, :-1], layer[:, -1])
    return {name: part.to(value).reshape(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}


def longest_parameters(problem: Problem, mechanism: ModelNoiseSettings, length: float, tail: float) -> float:
    """Return a length that the released parameters of the network exceed with probability ``tail`` at most."""
    halves = math.sqrt(0.5) if problem.rows == 1 else 1.0
    return halves * mechanism.longest(problem, tail) / length


def _minimum(
    problem: Problem,
    features: NDArray[np.float64],
    labels: NDArray[np.int64],
    regularisation: float,
    offset: Weights | None,
) -> Weights:
    """The minimum of the objective, (rows, d); of two classes from two opposite rows, each with half the vector.

    In terms of w such an objective has twice the regularisation, and its gradient is shorter by sqrt(2).
    """
    if problem.rows > 1:
        return minimised(
            Objective(features, labels, problem.classes, regularisation, offset), 1.0, problem.tolerance
        ).weights
    tilt = None if offset is None else np.concatenate([-offset, offset])
    pair = minimised(Objective(features, labels, 2, 2 * regularisation, tilt), 1.0, problem.tolerance).weights
    return pair[1:] - pair[:1]
