"""Label noise at the client: each label is changed once, by randomised response, before anything else is done."""

import torch
from torch import Tensor

from fedpriv.accounting.response import Response, label_guarantee
from fedpriv.algorithms.labels.settings import LabelSettings
from fedpriv.core.randomness import NoiseStream
from fedpriv.core.records import Guarantee
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


def label_claim(world: World) -> Guarantee:
    """Return the ledger's line about labels."""
    notes = [
        "About labels alone. An image often shows its class: anyone who has the image, from its owner or from an "
        "upload that nothing else protects, needs no label.",
        "It is separate from the mechanism's claim and is never added to it: changing labels before training keeps "
        "neighbouring data sets neighbours.",
    ]
    if world.experiment.noise == "reproducible":
        notes.append("noise = 'reproducible': anyone who guesses the seed knows which labels were changed.")
    return label_guarantee(response_of(world), [*notes, *world.taken_as_public])
