"""Empirical risk minimisation of one client: bounded features, the certified minimum, and a mechanism's noise.

The network is one linear layer. Its inputs x get a constant feature 1, are divided by a public length and shortened to
length 1 where they are longer; a shorter vector of features points the same way and so names the same class. With two
classes one vector w is trained (logistic regression), and the network's two rows are -w/2 and w/2.
"""

import logging
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.accounting.convex_models import Problem
from fedpriv.algorithms.erm.settings import ErmConfig
from fedpriv.core.config import Experiment
from fedpriv.core.errors import RunFailedError
from fedpriv.core.world import World
from fedpriv.data.datasets import Dataset
from fedpriv.gradients import Vector
from fedpriv.mechanisms import MechanismSettings
from fedpriv.mechanisms.model_noise import ModelNoiseSettings, Weights
from fedpriv.models.machinery.convex import Objective, minimised

_LOG = logging.getLogger(__name__)
_PUBLIC_LENGTHS = 1000  # test images whose lengths say what features are divided by


def problem_of(experiment: Experiment, dataset: Dataset, examples: int) -> Problem:
    """Return the public sizes of the problem of a client who holds so many examples of a data set."""
    erm, features = ErmConfig.required(experiment), math.prod(dataset.shape) + 1
    return Problem(examples, features, dataset.classes, erm.regularisation, erm.tolerance)


def feature_length(world: World) -> float:
    """Return what features are divided by; public."""
    return world.kept(_feature_length)


def _feature_length(world: World) -> float:
    given = ErmConfig.required(world.experiment).clip_norm
    return usual_length(world.network_input(world.dataset.x_test[:_PUBLIC_LENGTHS])) if given is None else given


def client_problem(world: World, client: int) -> Problem:
    """Return the public sizes of the problem that a client solves."""
    return problem_of(world.experiment, world.dataset, int(world.sizes[client]))


def usual_length(inputs: Tensor) -> float:
    """Return the median length of inputs (n, C, H, W) with a constant feature 1, n at least 1."""
    lengths = (inputs.flatten(1).double().square().sum(dim=1) + 1).sqrt()
    return float(lengths.median())


def bounded_features(inputs: Tensor, length: float) -> NDArray[np.float64]:
    """Return features (n, d) of length 1 at most of inputs (n, C, H, W); the last one was constant."""
    flat = inputs.flatten(1).double().cpu()
    features = torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1).div_(length)
    # A hair below 1, so that rounding leaves none of them longer.
    return (features / features.norm(dim=1, keepdim=True).mul_(1 + 1e-12).clamp_(min=1)).numpy()


def trained_parameters(
    problem: Problem,
    features: NDArray[np.float64],
    labels: NDArray[np.int64],
    mechanism: MechanismSettings,
    noise: np.random.Generator | None,
    length: float,
    like: Vector,
) -> Vector:
    """Train one client's model on bounded features (n, d) and release it as the network's parameters."""

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
