"""A client that trains a convex model to its minimum and releases it once (private empirical risk minimisation)."""

import numpy as np

from fedpriv.core.randomness import Secret
from fedpriv.core.world import State, World
from fedpriv.erm import bounded_features, trained_parameters
from fedpriv.gradients import Vector

__all__ = ["model_change"]


def model_change(world: World, client: int, before: State, secret: Secret | None) -> Vector:
    """Return the released model minus the one that the server sent, on the CPU.

    Args:
        world: the experiment, built.
        client: the partition's number, from 0.
        before: what the server sent.
        secret: what the noise of this answer is keyed by, and of no other; ``None``: nothing protects the model.
    """
    inputs, labels = world.examples(client, np.arange(len(world.partitions[client])))
    released = trained_parameters(
        world.erm_problem(client),
        bounded_features(inputs, world.feature_length),
        labels.cpu().numpy(),
        world.plans[client].config,
        None if secret is None else secret.stream("noise").numpy(),
        world.feature_length,
        before.parameters,
    )
    return {name: value - before.parameters[name] for name, value in released.items()}
