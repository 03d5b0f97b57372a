"""A client as a teacher (PATE, Papernot et al. 2017): it trains models at home and votes on public images.

What leaves is one class number an image and teacher, or, where nobody may see votes, the counts of its votes with its
share of the noise, under a mask. A teacher is trained alone, on data that no other teacher has; one on whose data the
model raises votes for class 0 everywhere, because a refusal would tell what no noise hides.
"""

import logging
import math
from collections.abc import Iterator
from functools import partial
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.clients.raising import unless_raised
from fedpriv.core.randomness import NoiseStream, numpy_stream, seeded_generators, torch_stream
from fedpriv.core.world import World
from fedpriv.masking import Words, flat, quantised, votes_limit
from fedpriv.shamir import least_survivors
from fedpriv.teaching import teach

__all__ = ["asked_about", "masked_counts", "noisy_counts", "teachers_votes"]

_LOG = logging.getLogger(__name__)
_BATCH = 1000


def asked_about(world: World, images: Tensor) -> bytes:
    """Return the digest of all that a client's votes depend on: the images, its data, the code and the settings."""
    asked = sha256(f"{images.dtype} {tuple(images.shape)}\n".encode() + images.contiguous().numpy().tobytes())
    return sha256(asked.digest() + world.built_from).digest()


def teachers_votes(world: World, client: int, images: Tensor) -> Tensor:
    """Train this client's teachers and have them vote.

    Args:
        world: the experiment, built.
        client: the partition's number, from 0.
        images: public ones (Q, C, H, W), uint8.

    Returns:
        Classes (t, Q), uint8 or int16, as :meth:`~fedpriv.core.world.World.votes_type` says.
    """
    own = world.experiment.model.is_own
    passed = () if own else (MemoryError, torch.OutOfMemoryError)
    votes = []
    for number, positions in enumerate(_shares(world, client)):
        classes = unless_raised(partial(_taught, world, client, number, positions, images), *passed)
        if classes is None:
            _LOG.warning("client %d: the model raises in teacher %d, which votes for class 0", client, number)
            classes = torch.zeros(len(images), dtype=torch.int64)
        votes.append(classes)
    return torch.stack(votes).to(world.votes_type)


def noisy_counts(votes: Tensor, classes: int, sigma: float, clients: int, noise: NoiseStream) -> Tensor:
    """Return a client's votes as counts, with its share of the noise.

    The sum of as many clients as secure aggregation guarantees has noise of deviation ``sigma``, or more.

    Args:
        votes: (t, Q).
        classes: K.
        sigma: deviation of the noise on each count of the sum, in votes.
        clients: who are asked.
        noise: of this answer, used for nothing else.

    Returns:
        (Q, K), float64.
    """
    counts = functional.one_hot(votes.long(), classes).sum(0).double()
    share = sigma / math.sqrt(least_survivors(clients))
    return counts + torch.from_numpy(noise.numpy().normal(0.0, share, tuple(counts.shape)))


def masked_counts(votes: Tensor, classes: int, sigma: float, clients: int, noise: NoiseStream) -> Words:
    """Return :func:`noisy_counts` as whole numbers to be masked, laid end to end."""
    counts = noisy_counts(votes, classes, sigma, clients, noise)
    return quantised(flat({"counts": counts}), votes_limit(len(votes), sigma, clients))


def _shares(world: World, client: int) -> Iterator[np.ndarray]:
    """For each teacher the positions of its examples in the partition: by place alone, never by what is there."""
    count, teachers = len(world.partitions[client]), world.experiment.pate_settings.teachers_per_client
    order = numpy_stream(world.experiment.seed, "teachers", client).permutation(count)
    yield from np.array_split(order, teachers)


def _taught(world: World, client: int, number: int, positions: np.ndarray, images: Tensor) -> Tensor:
    """The classes (Q,) that one teacher sees."""
    experiment = world.experiment
    inputs, labels = world.examples(client, positions)
    world.initial.load_into(world.model)
    seed = torch_stream(experiment.seed, "teacher-noise", client, number).initial_seed()
    with seeded_generators(seed, world.device):
        stream = numpy_stream(experiment.seed, "teacher", client, number)
        epochs = experiment.pate_settings.local_epochs
        teach(world.model, inputs, labels, experiment.training, epochs, stream, world.autocast)
        with torch.inference_mode():
            seen = [world.model(world.network_input(part)).argmax(1).cpu() for part in images.split(_BATCH)]
    return torch.cat(seen)
