"""What clients and server do in a run: algorithms, changes of labels before them, and ways in which uploads travel.

algorithm.py, preparation.py and transport.py in a capability's folder register its own, and import lazily.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedpriv.core.errors import InputError
from fedpriv.core.registry import ALGORITHMS, PREPARATIONS, TRANSPORTS
from fedpriv.core.sections import ExperimentSection

if TYPE_CHECKING:
    import numpy as np
    from flwr.app import Context, Message, RecordDict
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from fedpriv.accounting import Ledger
    from fedpriv.accounting.response import Response
    from fedpriv.attacks.threat import ThreatModel
    from fedpriv.clients.answering import Answering
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.plan import Plan
    from fedpriv.core.progress import Progress
    from fedpriv.core.randomness import NoiseStream
    from fedpriv.core.records import Guarantee, RoundRecord
    from fedpriv.core.runs import RunFolder
    from fedpriv.core.world import State, World
    from fedpriv.data.datasets import Dataset
    from fedpriv.gradients import Vector
    from fedpriv.server.exchange import Clients, Federation, Reached, Replies
    from fedpriv.server.uploads import Upload

    Handler = Callable[[Answering, Message, Context], Message]
    Query = Callable[[Message, Context], Message]


class Algorithm(ABC):
    """What clients and server do, under the name that ``federation.algorithm`` has."""

    name: ClassVar[str]  # of the algorithm
    about: ClassVar[str]  # what clients upload, for people
    rank: ClassVar[int] = 100  # algorithms are listed in the order of these numbers
    # its own section of an experiment, which others must not have; `None`: it has none
    settings: ClassVar[type[ExperimentSection] | None] = None
    rounds: ClassVar[int | None] = None  # how many there are; `None`: as many as an experiment says
    # whether clients train step by step and upload a gradient or a change of parameters, which is what attacks on
    # uploads, noise in the forward pass and stacks of models are for
    trains_in_steps: ClassVar[bool] = False
    # the noise on uploads that is none of the mechanism's, for people; empty: there is none
    protects: ClassVar[str] = ""
    not_deployable: ClassVar[str] = ""  # why it does not run on a deployment; empty: it does
    not_audited: ClassVar[str] = ""  # why a run's training cannot be repeated round by round; empty: it can

    def conflicts(self, experiment: "Experiment") -> None:
        """Refuse settings that have no proof or no meaning with this algorithm, with what is allowed."""
        return

    def check_network(self, experiment: "Experiment", dataset: "Dataset", model: "nn.Module") -> None:
        """Refuse data and networks that do not go with this algorithm, by an ``InputError``."""
        return

    def check_shares(self, experiment: "Experiment", dataset: "Dataset", sizes: "NDArray[np.int64]") -> None:
        """Refuse clients that hold too few examples, (C,), for what they are to do, by an ``InputError``."""
        return

    @abstractmethod
    def warnings(self, world: "World") -> tuple[str, ...]:
        """Return one line for each setting that has no effect or makes a result mean less than it seems to."""

    def holder(self) -> "ThreatModel | None":
        """Return who gets the finished model; ``None``: any client."""
        return None

    def client_handlers(self) -> "Mapping[str, Handler]":
        """Return what clients do with messages of its own kinds, such as ``votes`` of ``train.votes``."""
        return {}

    @abstractmethod
    def serve(self, clients: "Clients", world: "World", folder: "RunFolder", progress: "Progress") -> None:
        """Do the server's part of a run, from what the folder holds to the finished model; what was written stays."""

    @abstractmethod
    def ledger(self, world: "World", folder: "RunFolder") -> "Ledger":
        """Account for all releases of each client so far."""

    def spent_rows(self, world: "World") -> "Tensor":
        """Return the test examples, (Q,), that the model learns from, and which it cannot be measured on."""
        import torch

        return torch.zeros(0, dtype=torch.int64)

    def about_claim(self, experiment: "Experiment", worst: "Guarantee") -> str:
        """Return what is proven of the worst client in a sentence; empty: as usual, by mechanism and uses."""
        return ""

    def about_accuracy(self, world: "World", last: "RoundRecord | None") -> tuple[str, ...]:
        """Return sentences about how good the model is, in addition to the last round's accuracy."""
        return ()


class ModelRelease(Algorithm):
    """An algorithm whose clients upload a finished model, which noise on models is for."""

    @abstractmethod
    def released_model(
        self, world: "World", client: int, inputs: "Tensor", labels: "Tensor", plan: "Plan", noise: "NoiseStream | None"
    ) -> "Vector":
        """Return the model, on the CPU, that a client releases from inputs (n, C, H, W) and labels (n,)."""

    @abstractmethod
    def longest_model(self, world: "World", plan: "Plan", tail: float) -> float:
        """Return a length that a released model exceeds with probability ``tail`` at most."""


def algorithm_of(experiment: "Experiment") -> Algorithm:
    """Return the algorithm of an experiment."""
    return ALGORITHMS[experiment.federation.algorithm]()


def refuse_keys(experiment: "Experiment", keys: Iterable[str], why: str) -> None:
    """Refuse keys of the federation that are not at their defaults, by an ``InputError``."""
    federation = experiment.federation
    for key in keys:
        if getattr(federation, key) != type(federation).model_fields[key].default:
            raise InputError(f"federation.{key}: {why}; leave it out")


class Preparation(ABC):
    """A change of each client's labels, by random numbers of its own."""

    name: ClassVar[str]  # of it, and of the stream that its random numbers come from
    key: ClassVar[str]  # of the settings that asks for it

    @abstractmethod
    def is_asked_for(self, experiment: "Experiment") -> bool:
        """Whether clients of this experiment prepare their data so."""

    def conflicts(self, experiment: "Experiment") -> None:
        """Refuse settings that have no meaning with this preparation, or without it."""
        return

    def check_data(self, experiment: "Experiment", dataset: "Dataset") -> None:
        """Refuse data that cannot be prepared so."""
        return

    @abstractmethod
    def changed(self, world: "World", labels: "Tensor", noise: "NoiseStream") -> "Tensor":
        """Return labels (n,) after the change."""

    @abstractmethod
    def correction(self, world: "World") -> "Response | None":
        """Return how labels were changed, if the training loss corrects for it; ``None``: it takes them as they are."""

    @abstractmethod
    def claim(self, world: "World") -> "Guarantee":
        """Return what is proven about labels alone, for the ledger."""

    @abstractmethod
    def record(self, world: "World", folder: "RunFolder", uploads: "Sequence[Upload]") -> None:
        """Take note of how often clients say that they hold each changed label."""


def preparation_of(experiment: "Experiment") -> Preparation | None:
    """Return how clients of an experiment prepare their data; ``None``: they use them as they are."""
    every = (kind() for kind in PREPARATIONS.values())
    return next((each for each in every if each.is_asked_for(experiment)), None)


class Transport(ABC):
    """A way in which uploads reach the server."""

    name: ClassVar[str]
    handlers: "ClassVar[Mapping[str, Handler]]"  # what clients do with messages that ask for uploads, by their kinds
    queries: "ClassVar[Mapping[str, Query]]"  # what they do with messages that come before and after

    @abstractmethod
    def is_asked_for(self, experiment: "Experiment") -> bool:
        """Whether uploads of this experiment travel so."""

    @abstractmethod
    def ask(self, federation: "Federation", number: int, states: "Mapping[int, State]") -> "Replies":
        """Have clients train in a round, each from the state it is sent; too few of them are a ``RunFailedError``."""

    @abstractmethod
    def votes_reply(
        self, message: "Message", context: "Context", votes: "Tensor", classes: int, noise: "SharedNoise"
    ) -> "RecordDict":
        """Return the reply of a client whose votes (t, Q) are summed with others', with its share of the noise."""

    @abstractmethod
    def ask_for_votes(
        self,
        federation: "Reached",
        number: int,
        questions: "Mapping[int, RecordDict]",
        shape: tuple[int, int],
        each: int,
        sigma: float,
    ) -> "tuple[NDArray[np.float64], Replies]":
        """Have clients vote and return the sum of their noisy counts (Q, K), all that the server can read of them."""


@dataclass(frozen=True)
class SharedNoise:
    """A client's share of normal noise on a sum."""

    sigma: float  # deviation on each number of the sum
    clients: int  # how many are asked
    stream: "NoiseStream"  # of this client's share


def sums() -> Transport:
    """Return the transport that leaves the server sums."""
    return TRANSPORTS["secure-aggregation"]()


def transport_of(experiment: "Experiment") -> Transport | None:
    """Return how uploads of an experiment travel; ``None``: one by one."""
    every = (kind() for kind in TRANSPORTS.values())
    return next((each for each in every if each.is_asked_for(experiment)), None)
