"""The Flower ClientApp: answers who it is, and trains or votes when asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from fedpriv.clients.cohort import Cohort, CohortApp
from fedpriv.clients.knowledge import asked_about, masked_counts, teachers_votes
from fedpriv.clients.memory import check_data, check_question, own_secret, secret_for
from fedpriv.clients.raising import discreet
from fedpriv.clients.secure import give_shares, masked, masked_upload, offer_keys, share_secrets
from fedpriv.clients.training import answer_secret, local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.errors import RefusedError
from fedpriv.core.randomness import Secret
from fedpriv.core.seeds import kept_for
from fedpriv.core.threads import cpu_threads
from fedpriv.core.wire import pack, record_in, unpack
from fedpriv.core.world import State, World, build_world
from fedpriv.mechanisms.machinery.settings import NoiseAt
from fedpriv.shamir import least_survivors

__all__ = ["app", "client_app"]


def client_app(secret: Secret | None) -> CohortApp:
    """Return the app of a run.

    Args:
        secret: the run's, where all clients have one, as in a simulation. It reaches them with the app itself, and is
            in no message. ``None``: whatever this machine keeps of the run, and each client's noise has its own.
    """
    bound = CohortApp()

    @bound.train()
    def train(message: Message, context: Context) -> Message:
        """Train for one round from the parameters in the message and reply with the upload.

        The reply carries no training loss: measured on private data and sent without noise it would leak.

        Raises:
            RuntimeError: with a mechanism: whatever goes wrong, in words that say nothing of the data. Else the model's
                code wants to end the process; this client fails, and no other.
        """
        run = _Run(secret, bound.origin)
        world, upload, _ = _trained(message, context, run, bound.cohort, ("clients", "server"))
        if world.experiment.federation.secure_aggregation:
            raise ValueError("the settings say that uploads are masked; this one was asked for as it is")
        reply = RecordDict({"upload": pack(upload.parameters), "buffers": pack(upload.buffers)})
        reply["client"] = _trained_with(world, _partition(context))
        return Message(reply, reply_to=message)

    @bound.train("masked")
    def train_masked(message: Message, context: Context) -> Message:
        """Train as above, and reply with an upload of which the server can read the sum only."""
        run = _Run(secret, bound.origin)
        world, upload, own = _trained(message, context, run, bound.cohort, ("clients", "sum"))
        with _discreet(world.experiment, context):
            reply = masked_upload(message, context, world, upload, own)
        reply["client"] = _trained_with(world, _partition(context))
        return Message(reply, reply_to=message)

    @bound.train("votes")
    def vote(message: Message, context: Context) -> Message:
        """Train this client's teachers and reply with their votes on the images in the message (PATE)."""
        world, _, votes = _voted(message, context, _Run(secret, bound.origin))
        if world.experiment.pate_settings.noise_at == "clients":
            raise ValueError("the settings say that nobody sees votes; these were asked for as they are")
        reply = RecordDict({"upload": pack({"votes": votes})})
        reply["client"] = _about(world, _partition(context))
        return Message(reply, reply_to=message)

    @bound.train("masked_votes")
    def vote_masked(message: Message, context: Context) -> Message:
        """Vote as above, and reply with noisy counts of which the server can read the sum only."""
        world, own, votes = _voted(message, context, _Run(secret, bound.origin))
        if world.experiment.pate_settings.noise_at != "clients":
            raise ValueError("the settings say that the server adds the noise to votes; these were asked for masked")
        clients = world.experiment.federation.clients
        words = masked_counts(votes, world.dataset.classes, world.noise_of_votes, clients, own.stream("votes"))
        reply = masked(message, context, words, least_survivors(clients))
        reply["client"] = _about(world, _partition(context))
        return Message(reply, reply_to=message)

    bound.query()(identify)
    bound.query("keys")(offer_keys)
    bound.query("shares")(share_secrets)
    bound.query("unmask")(give_shares)
    return bound


def identify(message: Message, context: Context) -> Message:
    """Reply with the number of the partition that this client holds."""
    return Message(RecordDict({"client": MetricRecord({"partition": _partition(context)})}), reply_to=message)


class _Run(NamedTuple):
    """What clients of a simulation know with the app: the run's secret, and the digest of what is read from files."""

    secret: Secret | None
    origin: bytes | None


def _trained(
    message: Message, context: Context, run: _Run, cohort: Cohort, places: tuple[NoiseAt, ...]
) -> tuple[World, State, Secret | None]:
    """The experiment, what this client computes in the message's round, and the secret of that answer's noise.

    ``places`` is where the answer gets noise: a server that asks for it in another way than the mechanism needs gets
    none.
    """
    task = record_in(message.content, "task", ConfigRecord)
    before = cohort.sent(message)
    known = str(task["experiment"]), str(context.run_config.get("seed", ""))
    experiment, round_number = kept_for(*known, run.secret).experiment, int(str(task["round"]))
    experiment.mechanism.require_noise_at(*places)
    with _discreet(experiment, context):
        check_question(context, experiment, round_number)
        world = _own_world(context, *known, run)
        with cpu_threads(world.experiment.engine.threads):
            return world, *_answer(world, context, before, round_number, cohort, run.secret is not None)


@contextmanager
def _discreet(experiment: Experiment, context: Context) -> Iterator[None]:
    """Where noise protects the data, say nothing of what goes wrong inside but in the client's own log."""
    if experiment.protects:
        with discreet(_partition(context)):
            yield
        return
    try:
        yield
    except SystemExit as error:
        # A model's own code must not end the process: on Ray it serves other clients, too.
        raise RuntimeError(f"the model's code raises SystemExit: {error}") from None


def _voted(message: Message, context: Context, run: _Run) -> tuple[World, Secret, Tensor]:
    """The experiment, a secret of this answer alone, and the votes (t, Q) of this client's teachers."""
    task = record_in(message.content, "task", ConfigRecord)
    images = unpack(record_in(message.content, "questions", ArrayRecord))["images"]
    known = str(task["experiment"]), str(context.run_config.get("seed", ""))
    experiment, round_number = kept_for(*known, run.secret).experiment, int(str(task["round"]))
    with _discreet(experiment, context):
        check_question(context, experiment, round_number)
        world, client = _own_world(context, *known, run), _partition(context)
        if images.dtype != world.dataset.x_train.dtype or images.shape[1:] != world.dataset.shape:
            raise RefusedError(f"asked about {tuple(images.shape)} as {images.dtype}, which are no images of this run")
        asked = asked_about(world, images)
        shared = _shared_secret(world, run.secret is not None)
        own = answer_secret(secret_for(context, round_number, asked, shared), client, round_number, asked)
        with cpu_threads(experiment.engine.threads):
            return world, own, teachers_votes(world, client, images)


def _answer(
    world: World, context: Context, before: State, round_number: int, cohort: Cohort, is_simulated: bool
) -> tuple[State, Secret | None]:
    """Train, in a simulation maybe together with others; and the secret of noise that no other answer has, if any."""
    client, own, together = _partition(context), None, True
    if world.experiment.mechanism.protects:
        received = world.received(client, before)
        drawn = secret_for(context, round_number, received, _shared_secret(world, is_simulated))
        own, together = answer_secret(drawn, client, round_number, received), drawn == world.secret
    upload = cohort.upload(world, client, before, round_number) if together else None
    return local_upload(world, client, before, round_number, own) if upload is None else upload, own


def _about(world: World, client: int) -> MetricRecord:
    return MetricRecord({"partition": client, "examples": len(world.partitions[client])})


def _trained_with(world: World, client: int) -> MetricRecord:
    """What a client says of itself, with how often it holds each class after labels were changed, if it tells that."""
    about = _about(world, client)
    if world.experiment.surveys_labels:
        about["labels"] = world.class_counts_of(world.dataset.y_train, client)
    return about


def _shared_secret(world: World, is_simulated: bool) -> Secret | None:
    """The run's secret, where all clients have it; ``None``: each has its own."""
    return world.secret if is_simulated or not world.experiment.keeps_secret else None


def _own_world(context: Context, text: str, name: str, run: _Run) -> World:
    """The experiment, built, with this client's labels as it changed them."""
    world = _world(text, name, run, context.run_id)
    shared = _shared_secret(world, run.secret is not None)
    if run.origin is None:
        check_data(context, world.dataset.digest, shared)
    if shared is not None or not world.experiment.changes_labels:
        return world
    return _with_own_labels(text, name, run, context.run_id, _partition(context), own_secret(context, None))


@lru_cache(maxsize=2)
def _with_own_labels(text: str, name: str, run: _Run, run_id: int, client: int, own: Secret) -> World:
    return _world(text, name, run, run_id).with_labels_changed([client], own)


def _partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


@lru_cache(maxsize=2)
def _world(text: str, name: str, run: _Run, _: int) -> World:
    """Build the experiment once a run, whose number is the last argument; its text is a quicker key than the object.

    Raises:
        RefusedError: data or network are no longer those that the run began with.
    """
    world = build_world(*kept_for(text, name, run.secret))
    if run.origin is not None and world.origin != run.origin:
        raise RefusedError("the data, or the network, were changed after the run had begun")
    return world


app = client_app(None)
