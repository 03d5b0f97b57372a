"""Public numbers of a vote: what is asked about, and how many teachers there are."""

import torch
from torch import Tensor

from fedpriv.algorithms.pate.settings import PateConfig
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.world import World


def asked_rows(world: World) -> Tensor:
    """Return the test images (Q,) that are spent on votes, drawn by the seed, in the order in which they are asked."""
    order = numpy_stream(world.experiment.seed, "questions").permutation(len(world.dataset.x_test))
    return torch.from_numpy(order[: PateConfig.required(world.experiment).queries])


def questions(world: World) -> Tensor:
    """Return the public images (Q, C, H, W), uint8, that teachers vote on."""
    return world.dataset.x_test[asked_rows(world)]


def teachers(world: World) -> int:
    """Return how many vote, if all clients do; a public number."""
    return world.experiment.federation.clients * PateConfig.required(world.experiment).teachers_per_client


def noise_of_votes(world: World) -> float:
    """Return the deviation of the noise on each count, in votes, where normal noise is on counts alone."""
    return PateConfig.required(world.experiment).sigma2 * teachers(world)


def votes_type(world: World) -> torch.dtype:
    """Return the numbers in which votes travel: the smallest that hold all classes."""
    return torch.uint8 if world.dataset.classes <= 256 else torch.int16
