"""A client as a teacher (PATE, Papernot et al. 2017): it trains models at home and votes on public images.

What leaves is one class number an image and teacher, or, where nobody may see votes, the counts of its votes with its
share of the noise, under a mask. A teacher is trained alone, on data that no other teacher has; one on whose data the
model raises votes for class 0 everywhere, because a refusal would tell what no noise hides.
"""

import logging
from collections.abc import Iterator
from functools import partial
from hashlib import sha256

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from torch import Tensor

from fedpriv.algorithms.pate.settings import PateConfig
from fedpriv.algorithms.pate.teachers import noise_of_votes, teach, votes_type
from fedpriv.clients.answering import Answering, about, partition_of
from fedpriv.clients.model_errors import unless_raised
from fedpriv.core.algorithm import SharedNoise, sums
from fedpriv.core.errors import RefusedError
from fedpriv.core.randomness import Secret, numpy_stream, seeded_generators, torch_stream
from fedpriv.core.wire import pack, record_in, unpack
from fedpriv.core.world import World

_LOG = logging.getLogger(__name__)
_BATCH = 1000


def vote(answering: Answering, message: Message, context: Context) -> Message:
    """Train this client's teachers and reply with their votes on the images in the message."""
    world, _, votes = _voted(answering, message, context)
    if PateConfig.required(world.experiment).noise_at == "clients":
        raise ValueError("the settings say that nobody sees votes; these were asked for as they are")
    reply = RecordDict({"upload": pack({"votes": votes})})
    reply["client"] = about(world, partition_of(context))
    return Message(reply, reply_to=message)


def vote_masked(answering: Answering, message: Message, context: Context) -> Message:
    """Vote as above, and reply with noisy counts of which the server can read the sum only."""
    world, own, votes = _voted(answering, message, context)
    if PateConfig.required(world.experiment).noise_at != "clients":
        raise ValueError("the settings say that the server adds the noise to votes; these were asked for masked")
    clients = world.experiment.federation.clients
    noise = SharedNoise(noise_of_votes(world), clients, own.stream("votes"))
    reply = sums().votes_reply(message, context, votes, world.dataset.classes, noise)
    reply["client"] = about(world, partition_of(context))
    return Message(reply, reply_to=message)


HANDLERS = {"votes": vote, "masked_votes": vote_masked}
"""What clients do with messages, by their kinds."""


def _voted(answering: Answering, message: Message, context: Context) -> tuple[World, Secret, Tensor]:
    """The experiment, a secret of this answer alone, and the votes (t, Q) of this client's teachers."""
    images = unpack(record_in(message.content, "questions", ArrayRecord))["images"]
    question = answering.question(message, context)
    with answering.opened(question, context) as world:
        if images.dtype != world.dataset.x_train.dtype or images.shape[1:] != world.dataset.shape:
            raise RefusedError(f"asked about {tuple(images.shape)} as {images.dtype}, which are no images of this run")
        _, own = answering.secrets(world, context, question.round_number, asked_about(world, images))
        return world, own, teachers_votes(world, partition_of(context), images)


def asked_about(world: World, images: Tensor) -> bytes:
    """Return the digest of all that a client's votes depend on: the images, its data, the code and the settings."""
    asked = sha256(f"{images.dtype} {tuple(images.shape)}\n".encode() + images.contiguous().numpy().tobytes())
    return sha256(asked.digest() + world.built_from).digest()


def teachers_votes(world: World, client: int, images: Tensor) -> Tensor:
    """Train this client's teachers and have them vote on public images (Q, C, H, W), uint8: classes (t, Q)."""
    own = world.experiment.model.is_own
    passed = () if own else (MemoryError, torch.OutOfMemoryError)
    votes = []
    for number, positions in enumerate(_shares(world, client)):
        classes = unless_raised(partial(_taught, world, client, number, positions, images), *passed)
        if classes is None:
            _LOG.warning("client %d: the model raises in teacher %d, which votes for class 0", client, number)
            classes = torch.zeros(len(images), dtype=torch.int64)
        votes.append(classes)
    return torch.stack(votes).to(votes_type(world))


def _shares(world: World, client: int) -> Iterator[np.ndarray]:
    """For each teacher the positions of its examples in the partition: by place alone, never by what is there."""
    count, teachers = len(world.partitions[client]), PateConfig.required(world.experiment).teachers_per_client
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
        epochs = PateConfig.required(experiment).local_epochs
        teach(world.model, inputs, labels, experiment.training, epochs, stream, world.autocast)
        with torch.no_grad():
            seen = [world.model(world.network_input(part)).argmax(1).cpu() for part in images.split(_BATCH)]
    return torch.cat(seen)
