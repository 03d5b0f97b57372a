"""Answer a message: read its settings, open the client's data, draw the secret of its noise, and stay discreet.

Where noise protects the data, nothing that goes wrong may reach the server in words: they would depend on the data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from flwr.app import ConfigRecord, Context, Message, MetricRecord

from fedpriv.clients.cohort import Cohort
from fedpriv.clients.memory import check_data, check_question, own_secret, secret_for
from fedpriv.clients.model_errors import discreet
from fedpriv.clients.training import answer_secret, local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.errors import RefusedError
from fedpriv.core.randomness import Secret
from fedpriv.core.seeds import kept_for
from fedpriv.core.threads import cpu_threads
from fedpriv.core.wire import record_in
from fedpriv.core.world import State, World, build_world
from fedpriv.mechanisms.machinery.base import NoiseAt


class _RunKey(NamedTuple):
    """A run as a client knows it; the text of the settings is a quicker key than the object."""

    text: str  # the settings
    seed: str  # the name under which the seed is kept
    secret: Secret | None  # the run's, in a simulation
    origin: bytes | None  # digest of what is read from files, in a simulation
    run_id: int


@dataclass(frozen=True)
class ClientTask:
    """What a message asks for."""

    experiment: Experiment  # the settings
    run: _RunKey  # whose these are
    round_number: int  # the round, from 1


@dataclass(frozen=True)
class Answering:
    """What all clients of a process answer with."""

    secret: Secret | None  # the run's, where all clients have one, as in a simulation; `None`: each has its own
    # origin of the run, where clients may read none but the server's data; `None`: each client has its own data
    origin: bytes | None
    cohort: Cohort  # those that are asked at once

    def question(self, message: Message, context: Context) -> ClientTask:
        """Read what a message asks for."""
        task = record_in(message.content, "task", ConfigRecord)
        text, seed = str(task["experiment"]), str(context.run_config.get("seed", ""))
        run = _RunKey(text, seed, self.secret, self.origin, context.run_id)
        return ClientTask(kept_for(text, seed, self.secret).experiment, run, int(str(task["round"])))

    @contextmanager
    def opened(self, question: ClientTask, context: Context) -> Iterator[World]:
        """Check a question, and compute its answer inside: with the experiment, built, with this client's labels."""
        with self.silent(question.experiment, context):
            check_question(context, question.experiment, question.round_number)
            world = self._own_world(context, question.run)
            with cpu_threads(question.experiment.engine.threads):
                yield world

    @contextmanager
    def silent(self, experiment: Experiment, context: Context) -> Iterator[None]:
        """Where noise protects the data, say nothing of what goes wrong inside but in the client's own log."""
        if experiment.protects:
            with discreet(partition_of(context)):
                yield
            return
        try:
            yield
        except SystemExit as error:
            # A model's own code must not end the process: on Ray it serves other clients, too.
            raise RuntimeError(f"the model's code raises SystemExit: {error}") from None

    def trained(
        self, message: Message, context: Context, places: tuple[NoiseAt, ...]
    ) -> tuple[World, State, Secret | None]:
        """Return the experiment, what this client computes in a round, and the secret of its noise at ``places``."""
        before = self.cohort.sent(message)
        question = self.question(message, context)
        question.experiment.mechanism.require_noise_at(*places)
        with self.opened(question, context) as world:
            return world, *self._upload(world, context, before, question.round_number)

    def _upload(self, world: World, context: Context, before: State, round_number: int) -> tuple[State, Secret | None]:
        """Train, in a simulation maybe together with others; and the secret of noise that no other answer has."""
        client, own, together = partition_of(context), None, True
        if world.experiment.mechanism.protects:
            drawn, own = self.secrets(world, context, round_number, world.received(client, before))
            together = drawn == world.secret
        upload = self.cohort.upload(world, client, before, round_number) if together else None
        return local_upload(world, client, before, round_number, own) if upload is None else upload, own

    def secrets(self, world: World, context: Context, round_number: int, received: bytes) -> tuple[Secret, Secret]:
        """Return the secret that an answer's own is derived from, and that one."""
        drawn = secret_for(context, round_number, received, self._shared_secret(world))
        return drawn, answer_secret(drawn, partition_of(context), round_number, received)

    def _shared_secret(self, world: World) -> Secret | None:
        """The run's secret, where all clients have it; ``None``: each has its own."""
        return world.secret if self.secret is not None or not world.experiment.keeps_secret else None

    def _own_world(self, context: Context, run: _RunKey) -> World:
        """The experiment, built, with this client's labels as it changed them."""
        world = _world(run)
        shared = self._shared_secret(world)
        if run.origin is None:
            check_data(context, world.dataset.digest, shared)
        if shared is not None or not world.experiment.prepares_data:
            return world
        return _with_own_labels(run, partition_of(context), own_secret(context, None))


def about(world: World, client: int) -> MetricRecord:
    """What a client says of itself."""
    return MetricRecord({"partition": client, "examples": len(world.partitions[client])})


def trained_with(world: World, client: int) -> MetricRecord:
    """What a client says of itself, with how often it holds each class after labels were changed, if it tells that."""
    told = about(world, client)
    if world.experiment.counts_classes:
        told["labels"] = world.class_counts_of(world.dataset.y_train, client)
    return told


def partition_of(context: Context) -> int:
    """The number of the partition that a client holds."""
    return int(context.node_config["partition-id"])


@lru_cache(maxsize=2)
def _with_own_labels(run: _RunKey, client: int, own: Secret) -> World:
    return _world(run).prepared([client], own)


@lru_cache(maxsize=2)
def _world(run: _RunKey) -> World:
    """Build the experiment, once a run."""
    world = build_world(*kept_for(run.text, run.seed, run.secret))
    if run.origin is not None and world.origin != run.origin:
        raise RefusedError("the data, or the network, were changed after the run had begun")
    return world
