"""The Flower ClientApp: answers who it is, and trains when asked, or does what an algorithm adds."""

from functools import partial
from typing import TYPE_CHECKING

from flwr.app import Context, Message, MetricRecord, RecordDict

from fedpriv.clients.answering import Answering, about, partition_of
from fedpriv.clients.cohort import CohortApp
from fedpriv.clients.secure import give_shares, masked_upload, offer_keys, share_secrets
from fedpriv.clients.training import local_upload
from fedpriv.core.randomness import Secret
from fedpriv.core.registry import ALGORITHMS
from fedpriv.core.wire import pack
from fedpriv.core.world import State, World
from fedpriv.mechanisms.machinery.base import NoiseAt

if TYPE_CHECKING:
    from fedpriv.core.algorithm import Handler


def client_app(secret: Secret | None) -> CohortApp:
    """Return the app of a run."""
    bound = CohortApp()

    def answer(handler: "Handler", message: Message, context: Context) -> Message:
        return handler(Answering(secret, bound.origin, bound.cohort), message, context)

    bound.train()(partial(answer, train))
    bound.train("masked")(partial(answer, train_masked))
    for algorithm in ALGORITHMS.values():
        for kind, handler in algorithm().client_handlers().items():
            bound.train(kind)(partial(answer, handler))
    bound.query()(identify)
    bound.query("keys")(offer_keys)
    bound.query("shares")(share_secrets)
    bound.query("unmask")(give_shares)
    return bound


def train(answering: Answering, message: Message, context: Context) -> Message:
    """Train for one round from the parameters in the message and reply with the upload.

    The reply carries no training loss: measured on private data and sent without noise it would leak.
    """
    world, upload, _ = _trained(answering, message, context, ("clients", "server"))
    if world.experiment.federation.secure_aggregation:
        raise ValueError("the settings say that uploads are masked; this one was asked for as it is")
    reply = RecordDict({"upload": pack(upload.parameters), "buffers": pack(upload.buffers)})
    reply["client"] = _trained_with(world, partition_of(context))
    return Message(reply, reply_to=message)


def train_masked(answering: Answering, message: Message, context: Context) -> Message:
    """Train as above, and reply with an upload of which the server can read the sum only."""
    world, upload, own = _trained(answering, message, context, ("clients", "sum"))
    with answering.silent(world.experiment, context):
        reply = masked_upload(message, context, world, upload, own)
    reply["client"] = _trained_with(world, partition_of(context))
    return Message(reply, reply_to=message)


def identify(message: Message, context: Context) -> Message:
    """Reply with the number of the partition that this client holds."""
    return Message(RecordDict({"client": MetricRecord({"partition": partition_of(context)})}), reply_to=message)


def _trained(
    answering: Answering, message: Message, context: Context, places: tuple[NoiseAt, ...]
) -> tuple[World, State, Secret | None]:
    """The experiment, what this client computes in the message's round, and the secret of that answer's noise.

    ``places`` is where the answer gets noise: a server that asks for it in another way than the mechanism needs gets
    none.
    """
    before = answering.cohort.sent(message)
    question = answering.question(message, context)
    question.experiment.mechanism.require_noise_at(*places)
    with answering.opened(question, context) as world:
        return world, *_answer(answering, world, context, before, question.round_number)


def _answer(
    answering: Answering, world: World, context: Context, before: State, round_number: int
) -> tuple[State, Secret | None]:
    """Train, in a simulation maybe together with others; and the secret of noise that no other answer has, if any."""
    client, own, together = partition_of(context), None, True
    if world.experiment.mechanism.protects:
        drawn, own = answering.secrets(world, context, round_number, world.received(client, before))
        together = drawn == world.secret
    upload = answering.cohort.upload(world, client, before, round_number) if together else None
    return local_upload(world, client, before, round_number, own) if upload is None else upload, own


def _trained_with(world: World, client: int) -> MetricRecord:
    """What a client says of itself, with how often it holds each class after labels were changed, if it tells that."""
    told = about(world, client)
    if world.experiment.counts_classes:
        told["labels"] = world.class_counts_of(world.dataset.y_train, client)
    return told


app = client_app(None)
