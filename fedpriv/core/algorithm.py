"""What clients and server do in a run: algorithm.py in a capability's folder registers its own, and imports lazily."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from fedpriv.core.errors import InputError
from fedpriv.core.registry import ALGORITHMS
from fedpriv.core.sections import ExperimentSection

if TYPE_CHECKING:
    import numpy as np
    from flwr.app import Context, Message
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from fedpriv.accounting import Ledger
    from fedpriv.attacks.threat import ThreatModel
    from fedpriv.clients.answering import Answering
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.plan import Plan
    from fedpriv.core.progress import Progress
    from fedpriv.core.randomness import NoiseStream
    from fedpriv.core.records import Guarantee, RoundRecord
    from fedpriv.core.runs import RunFolder
    from fedpriv.core.world import World
    from fedpriv.data.datasets import Dataset
    from fedpriv.gradients import Vector
    from fedpriv.server.exchange import Clients

    Handler = Callable[[Answering, Message, Context], Message]


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
