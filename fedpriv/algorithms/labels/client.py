"""Label noise at the client: each label is changed once, by randomised response, before anything else is done."""

import torch
from torch import Tensor

from fedpriv.accounting.response import Response
from fedpriv.algorithms.labels.settings import LabelSettings
from fedpriv.core.randomness import NoiseStream
from fedpriv.core.world import World


def response_of(world: World) -> Response:
    """Return how clients change their labels."""
    epsilon = LabelSettings.of(world.experiment).epsilon
    if epsilon is None:
        raise ValueError("clients use labels as they are")
    return Response(epsilon, world.dataset.classes)


def changed_labels(labels: Tensor, response: Response, noise: NoiseStream) -> Tensor:
    """Return labels (n,), int64, from 0 to K - 1, of which each is the given one with probability p, else any other."""
    kept = noise.uniform(len(labels)) < response.keep
    steps = 1 + (noise.uniform(len(labels)) * (response.answers - 1)).long().clamp(max=response.answers - 2)
    return torch.where(kept, labels, (labels + steps) % response.answers)
