"""Ledger and warnings of runs of convex models (private ERM)."""

import numpy as np

from fedpriv.algorithms.erm.settings import ErmConfig
from fedpriv.algorithms.erm.training import client_problem
from fedpriv.core.plan import Plan
from fedpriv.core.world import World
from fedpriv.mechanisms.model_noise import ModelNoiseSettings


def model_noise(world: World, plan: Plan) -> float | None:
    """Return the noise in a client's releases, for its line of the ledger; of a model its scale on the weights."""
    if not isinstance(plan.config, ModelNoiseSettings):
        return plan.config.noise
    return plan.config.scale(client_problem(world, plan.client))


def erm_warnings(world: World) -> tuple[str, ...]:
    """Return a line for each setting without effect, one where rows tell the features' length, one for long noise."""
    config = world.experiment.mechanism
    if not isinstance(config, ModelNoiseSettings):
        return _without_effect(world)
    return (*_without_effect(world), *_length_of_rows(world), *_long_noise(world, config))


def _without_effect(world: World) -> tuple[str, ...]:
    training = world.experiment.training
    return tuple(
        f"training.{key} is set, but erm trains to the minimum and does not read it"
        for key, field in type(training).model_fields.items()
        if getattr(training, key) != field.default
    )


def _length_of_rows(world: World) -> tuple[str, ...]:
    data, erm = world.experiment.data, ErmConfig.required(world.experiment)
    if erm.clip_norm is not None or data.table is None or data.table.test_path:
        return ()
    return (
        "erm.clip_norm is unset: it is the median length of test rows, which are rows of data.path, and no epsilon "
        "covers it; set erm.clip_norm, or of a CSV file a public data.table.test_path",
    )


def _long_noise(world: World, config: ModelNoiseSettings) -> tuple[str, ...]:
    problems = [client_problem(world, client) for client in np.unique(world.sizes, return_index=True)[1].tolist()]
    worst = max(problems, key=lambda problem: config.shift(problem, 0.5))
    if config.shift(worst, 0.5) <= worst.longest:
        return ()
    return (
        f"mechanism.target_epsilon = {config.target_epsilon:g} with erm.regularisation = {worst.regularisation:g}: a "
        f"client of {worst.examples} examples adds noise that may be longer than any model; fewer clients, a larger "
        "epsilon or a larger regularisation leave more",
    )
