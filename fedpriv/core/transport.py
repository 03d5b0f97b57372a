"""How uploads reach the server other than one by one: transport.py in a capability's folder registers its own.

A transport is imported with the app of clients, so it imports what it needs where it needs it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from fedpriv.core.registry import TRANSPORTS

if TYPE_CHECKING:
    from flwr.app import Context, Message

    from fedpriv.core.algorithm import Handler
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.world import State
    from fedpriv.server.exchange import Federation, Replies

    Query = Callable[[Message, Context], Message]


class Transport(ABC):
    """A way in which uploads reach the server."""

    name: ClassVar[str]

    @abstractmethod
    def is_asked_for(self, experiment: "Experiment") -> bool:
        """Whether uploads of this experiment travel so."""

    @abstractmethod
    def client_handlers(self) -> "Mapping[str, Handler]":
        """Return what clients do with messages that ask for uploads, by their kinds."""

    @abstractmethod
    def client_queries(self) -> "Mapping[str, Query]":
        """Return what clients do with messages that come before and after, by their kinds."""

    @abstractmethod
    def ask(self, federation: "Federation", number: int, states: "Mapping[int, State]") -> "Replies":
        """Have clients train in a round, each from the state that it is sent, and return what reached the server.

        Raises:
            RunFailedError: too few clients are left.
        """


def transport_of(experiment: "Experiment") -> Transport | None:
    """Return how uploads of an experiment travel; ``None``: one by one."""
    every = (kind() for kind in TRANSPORTS.values())
    return next((each for each in every if each.is_asked_for(experiment)), None)
