"""The distinguishing game: can a server that sees all that a client answers tell two neighbouring data sets apart?

A game is an experiment (any that a client can be sent: mechanism, sampling, unit, algorithm, own model, engine
settings), two neighbouring data sets, and what the server sends. Its releases go through the client's own code path: a
Flower message in, a Flower message or an error out, by the inline engine's grid. What the adversary makes of an answer
are numbers, from everything that it can see: whether there is an upload and what an error says, bytes, counts, numbers
that are not finite, lengths of blocks, projections on gradients. The module ``bounds`` picks the best of them and
compares a lower limit on epsilon with what the ledger of the client's own plan prints.

A new mechanism needs one game::

    game = Game(BRIGHT_OR_BLANK, {"mechanism": {"name": "new", "sigma": 8.0}})
    assert not play_game(game).violation
    assert play_game(game, noise=0.1).violation

Runs are told apart by their rounds: the noise and the batches of one round are independent of those of another, so that
one experiment gives as many independent runs as are wanted. All of a run's rounds lie in one stretch that begins with a
fresh pass over the data.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from flwr.app import Message
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedpriv.accounting import guarantee
from fedpriv.algorithms.secure_aggregation.server import ask_for_sum
from fedpriv.clients.app import client_app
from fedpriv.core.config import Experiment
from fedpriv.core.errors import RunFailedError
from fedpriv.core.plan import Plan
from fedpriv.core.randomness import Secret
from fedpriv.core.threads import cpu_threads
from fedpriv.core.wire import unpack
from fedpriv.core.world import State, World, build_world
from fedpriv.engines.inline import InlineGrid, assume_server_identity
from fedpriv.gradients import Vector
from fedpriv.mechanisms.machinery.base import Mechanism
from fedpriv.server.exchange import Federation, question
from tests.privacy.bounds import DELTAS, Claims, Scores, Verdict, play

__all__ = [
    "Adversary",
    "Answer",
    "Examples",
    "Game",
    "Neighbours",
    "Parameters",
    "Table",
    "claims",
    "play_game",
    "release",
    "zeros",
]

BASE: dict[str, Any] = {
    "federation": {"clients": 1, "rounds": 1_000_000},
    "adversary": {"attacks": []},
    "engine": {"name": "inline", "device": "cpu", "threads": 1},
}
CLIP_NORM = 0.5
RUN_ID = 1
# One for all games, so that they repeat; the noise of two rounds, or of two questions, is independent all the same.
SECRET = Secret(bytes(range(32)))


# ---- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Examples:
    """A training set: images (N, H, W), uint8, and labels (N,), 0 or 1."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    @cached_property
    def path(self) -> str:
        """Where the set lies as an .npz file; its name says what it holds, since data sets are kept by their path."""
        digest = sha256(self.images.tobytes() + self.labels.tobytes() + str(self.images.shape).encode()).hexdigest()
        path = Path(_folder().name) / f"{digest[:16]}.npz"
        # Of the test images only hgm's public shares are made.
        images = np.random.default_rng(0).integers(0, 256, (4, *self.images.shape[1:]), dtype=np.uint8)
        np.savez(
            path,
            x_train=self.images,
            y_train=self.labels,
            x_test=images,
            y_test=np.array([0, 1, 0, 1]),
            class_names=np.array(["no", "yes"]),
        )
        return str(path)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="privacy-games-")


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Two neighbouring data sets."""

    left: Examples  # one of them
    right: Examples  # the same but for one example (for the unit update, for any number of one client's)

    @property
    def differing(self) -> NDArray[np.int64]:
        """The rows in which they differ."""
        images = (self.left.images != self.right.images).any(axis=(1, 2))
        return np.flatnonzero(images | (self.left.labels != self.right.labels))


# ---- what is sent ---------------------------------------------------------------------------------------------------

Parameters = Callable[[State], State]
"""What the server sends, made from the initial state."""


def zeros(initial: State) -> State:
    """All parameters zero: the gradients of the two labels are opposite."""
    return State({name: torch.zeros_like(value) for name, value in initial.parameters.items()}, initial.buffers)


# ---- what is seen ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """All that a server sees of a client's answer."""

    error: str  # what the client says went wrong; empty where it sent an upload
    counts: str  # what else it says of itself
    bytes: int  # of everything that it sent
    parameters: Vector  # the upload
    buffers: Vector  # the change of the running statistics

    @staticmethod
    def of(message: Message) -> "Answer":
        if message.has_error():
            text = f"error {message.error.code}: {message.error.reason}"
            return Answer(text, "", len(text), {}, {})
        content = message.content
        arrays = {name: unpack(record) for name, record in content.array_records.items()}
        said = {name: dict(record) for name, record in content.metric_records.items()}
        records = [*content.array_records.values(), *content.metric_records.values()]
        size = sum(record.count_bytes() for record in records)
        return Answer("", repr(sorted(said.items())), size, arrays["upload"], arrays["buffers"])

    @property
    def numbers(self) -> Tensor:
        """The upload, parameters laid end to end, float64; none where there is no upload."""
        return torch.cat(
            [torch.zeros(0, dtype=torch.float64), *(v.double().flatten() for v in self.parameters.values())]
        )


Adversary = Callable[["Table", Sequence[Answer]], float]
"""What is read from a run's answers as one number, by somebody who knows the experiment and both data sets."""


def _failures(_: "Table", run: Sequence[Answer]) -> float:
    return sum(bool(answer.error) for answer in run)


def _texts(_: "Table", run: Sequence[Answer]) -> float:
    return crc32("\n".join(answer.error for answer in run).encode())


def _counts(_: "Table", run: Sequence[Answer]) -> float:
    return crc32("\n".join(answer.counts for answer in run).encode())


def _bytes(_: "Table", run: Sequence[Answer]) -> float:
    return sum(answer.bytes for answer in run)


def _not_finite(_: "Table", run: Sequence[Answer]) -> float:
    return sum(int((~torch.isfinite(answer.numbers)).sum()) for answer in run)


def _statistics(_: "Table", run: Sequence[Answer]) -> float:
    return sum(float(value.abs().sum()) for answer in run for value in answer.buffers.values())


def _longest_block(table: "Table", run: Sequence[Answer]) -> float:
    sizes = list(table.plan.dimensions)
    blocks = [block for answer in run if len(answer.numbers) for block in answer.numbers.split(sizes)]
    return max((float(block.norm()) for block in blocks), default=0.0)


def _along(direction: Callable[["Table"], Tensor]) -> Adversary:
    def projection(table: "Table", run: Sequence[Answer]) -> float:
        uploads = [table.standardised(answer.parameters) for answer in run if answer.parameters]
        return sum(float(torch.nan_to_num(upload @ direction(table))) for upload in uploads)

    return projection


ADVERSARIES: dict[str, Adversary] = {
    "failures": _failures,
    "error text": _texts,
    "counts": _counts,
    "bytes": _bytes,
    "numbers that are not finite": _not_finite,
    "running statistics": _statistics,
    "longest block": _longest_block,
    "projection on the victim": _along(lambda table: table.victim),
    "projection on the others": _along(lambda table: table.others),
}


# ---- the game -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Game:
    """What is played."""

    neighbours: Neighbours  # the two data sets
    settings: Mapping[str, Any]  # sections and keys of the experiment; mechanism.clip_norm is 0.5 unless set
    # what is sent, one after the other in each round. More than one: the server asks more than once.
    parameters: tuple[Parameters, ...] = (zeros,)
    rounds: int = 1  # of a run; the ledger is asked about rounds 1 to this
    runs: int = 48  # on each data set, after the pilot
    adversaries: Mapping[str, Adversary] = field(default_factory=dict)  # beside the ones that always look

    @property
    def asked(self) -> tuple[int, ...]:
        """The rounds in which the client is asked; one that is asked about more than once counts as often."""
        return tuple(number for number in range(1, self.rounds + 1) for _ in self.parameters)

    def experiment(self, side: str, noise: float = 1.0) -> Experiment:
        """The experiment on the left or right data set, with ``noise`` times the noise."""
        examples: Examples = getattr(self.neighbours, side)
        tree = {**BASE, **self.settings}
        tree |= {name: {**BASE[name], **self.settings.get(name, {})} for name in ("federation", "adversary", "engine")}
        tree["data"] = {"name": "npz", "path": examples.path, **tree.get("data", {})}
        tree["model"] = {"name": "tests.privacy.networks:heads", **tree.get("model", {})}
        tree["training"] = {"batch_size": len(examples.labels), **tree.get("training", {})}
        few = {"public_examples": 4} if tree["mechanism"]["name"] == "hgm" else {}
        tree["mechanism"] = {"clip_norm": CLIP_NORM, **few, **tree["mechanism"]}
        experiment = Experiment.model_validate(tree)
        mechanism = experiment.mechanism
        if noise == 1 or mechanism.noise is None:
            return experiment
        louder = mechanism.noise * (1 / noise if mechanism.parameter == "kappa" else noise)
        return experiment.model_copy(update={"mechanism": mechanism.with_noise(louder)})


def release(grid: InlineGrid, world: World, task: str, client: int, number: int, state: State) -> Answer:
    """Ask a client to train in a round, or all of them where only their sum can be read.

    The one place that knows how a client is asked. Its noise follows from the secret in the grid's app, the client, the
    round, and what it is sent.
    """
    if world.experiment.federation.secure_aggregation:
        return _release_sum(grid, world, task, number, state)
    (answer,) = grid.send_and_receive(
        [Message(question(state, task, number), client + 1, "train", group_id=str(number))]
    )
    return Answer.of(answer)


def _release_sum(grid: InlineGrid, world: World, task: str, number: int, state: State) -> Answer:
    clients = range(world.experiment.federation.clients)
    try:
        federation = Federation(grid, {client: client + 1 for client in clients}, world, task)
        replies = ask_for_sum(federation, number, dict.fromkeys(clients, state))
    except RunFailedError as error:
        return Answer(str(error), "", 0, {}, {})
    if replies.mean is None:
        raise ValueError("secure aggregation ended without a sum")
    return Answer("", repr(replies.failures), replies.bytes_up, replies.mean.parameters, replies.mean.buffers)


class Table:
    """A game, laid out: the world of each data set, and whoever plays there.

    Attributes:
        game: what is played.
        worlds: the built experiments, by side.
        states: what clients are sent in each round, one after the other.
    """

    def __init__(self, game: Game, noise: float = 1.0, secret: Secret = SECRET) -> None:
        assume_server_identity(RUN_ID)
        self.game = game
        self.worlds = {side: build_world(game.experiment(side, noise), secret) for side in ("left", "right")}
        self._app = client_app(secret)
        self.states = tuple(make(self.worlds["left"].initial) for make in game.parameters)
        self._tasks = {side: world.experiment.model_dump_json() for side, world in self.worlds.items()}
        self._runs = {"left": count(0, 2), "right": count(1, 2)}  # no run has the rounds, and the noise, of another

    @cached_property
    def client(self) -> int:
        """The client that holds what differs."""
        partitions, rows = self.worlds["left"].partitions, self.game.neighbours.differing
        (found,) = [number for number, held in enumerate(partitions) if np.isin(rows, held).all()]
        return found

    @property
    def plan(self) -> Plan:
        """Its plan on the left data set; on the right it is the same."""
        return self.worlds["left"].plans[self.client]

    def draw(self, side: str, runs: int) -> Scores:
        """Play runs on one of the data sets and have the adversaries look at them."""
        adversaries = {**ADVERSARIES, **self.game.adversaries}
        with cpu_threads(1):
            played = [tuple(self._run(side, next(self._runs[side]))) for _ in range(runs)]
        return {name: np.array([look(self, run) for run in played]) for name, look in adversaries.items()}

    def grid(self, side: str) -> InlineGrid:
        """Clients who were never asked."""
        return InlineGrid(self._app, self.worlds[side].experiment.federation.clients)

    def ask(self, grid: InlineGrid, side: str, client: int, number: int, state: State) -> Answer:
        """Ask a client in round ``number``."""
        return release(grid, self.worlds[side], self._tasks[side], client, number, state)

    def _run(self, side: str, number: int) -> Iterator[Answer]:
        """The answers of a new client over the rounds of one run."""
        grid = self.grid(side)
        first = number * self.game.rounds * self.plan.sampling.steps_per_epoch + 1
        for round_number in range(first, first + self.game.rounds):
            for state in self.states:
                yield self.ask(grid, side, self.client, round_number, state)

    @cached_property
    def victim(self) -> Tensor:
        """By how much the expected release of what differs, on its own, differs between the data sets; length 1."""
        left, right = (self._expected(side, self.game.neighbours.differing) for side in ("left", "right"))
        return _unit(left - right)

    @cached_property
    def others(self) -> Tensor:
        """The expected release of the mean of all other gradients, of length 1 (0 where there are none)."""
        held = self.worlds["left"].partitions[self.client]
        return _unit(self._expected("left", np.setdiff1d(held, self.game.neighbours.differing)))

    def standardised(self, upload: Vector) -> Tensor:
        """An upload with noise as large in all coordinates, laid end to end, float64."""
        return torch.cat([value.double().flatten() for value in self._mechanism.standardise(upload).values()])

    @cached_property
    def _mechanism(self) -> Mechanism:
        return self.plan.config.mechanism(self.plan.redistribution)

    def _expected(self, side: str, rows: NDArray[np.int64]) -> Tensor:
        """What the mechanism releases on average for the mean gradient of some rows; none, or no number, is zero."""
        world, state = self.worlds[side], self.states[0]
        state.load_into(world.model)
        parameters = [value for value in world.model.parameters() if value.requires_grad]
        images = world.network_input(world.dataset.x_train[torch.from_numpy(rows)])
        try:
            loss = cross_entropy(world.model(images), world.dataset.y_train[torch.from_numpy(rows)])
            found = torch.autograd.grad(loss, parameters) if len(rows) else [torch.zeros_like(p) for p in parameters]
        except ValueError:  # the network that refuses a blank image
            found = [torch.zeros_like(value) for value in parameters]
        gradient = {name: value.nan_to_num(0, 0, 0) for name, value in zip(state.parameters, found, strict=True)}
        return self.standardised(self._mechanism.expected(gradient))


def _unit(vector: Tensor) -> Tensor:
    length = float(vector.norm())
    return vector / length if math.isfinite(length) and length > 0 else torch.zeros_like(vector)


def claims(plan: Plan, asked: Sequence[int]) -> dict[float, float]:
    """delta -> the epsilon that the ledger prints where the client was asked in these rounds; 0: the pure figure."""
    accounted = plan.accounted(asked)
    printed = {delta: guarantee(replace(accounted, delta=delta)) for delta in DELTAS}
    found: dict[float, float | None] = {delta: line.epsilon for delta, line in printed.items()}
    found[0.0] = printed[DELTAS[0]].pure_epsilon
    return {delta: epsilon for delta, epsilon in found.items() if epsilon is not None}


def play_game(game: Game, noise: float = 1.0) -> Verdict:
    """Play a game with ``noise`` times its noise, against what the ledger prints for the whole noise.

    Raises:
        ValueError: the ledger claims nothing.
    """
    printed: Claims = claims(Table(game).plan, game.asked)
    if not printed:
        raise ValueError("the ledger claims nothing, so there is nothing to find out")
    return play(Table(game, noise).draw, printed, game.runs)
