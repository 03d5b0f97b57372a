"""How uploads reach the server other than one by one: transport.py in a capability's folder registers its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedpriv.core.registry import TRANSPORTS

if TYPE_CHECKING:
    import numpy as np
    from flwr.app import Context, Message, RecordDict
    from numpy.typing import NDArray
    from torch import Tensor

    from fedpriv.core.algorithm import Handler
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.randomness import NoiseStream
    from fedpriv.core.world import State
    from fedpriv.server.exchange import Federation, Reached, Replies

    Query = Callable[[Message, Context], Message]


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
