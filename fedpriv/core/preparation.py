"""What clients do to their labels before anything else: preparation.py of a capability registers its own, lazily."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from fedpriv.core.registry import PREPARATIONS

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.accounting.response import Response
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.randomness import NoiseStream
    from fedpriv.core.records import Guarantee
    from fedpriv.core.runs import RunFolder
    from fedpriv.core.world import World
    from fedpriv.data.datasets import Dataset
    from fedpriv.server.uploads import Upload


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
