"""Questions to an endpoint and its answers: all that an analyst or an attack sees; an oracle.py gives answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from fedpriv.core.errors import InputError
from fedpriv.core.registry import ENDPOINTS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.records import Guarantee
    from fedpriv.core.runs import RunFolder
    from fedpriv.core.world import World


class UsedUpError(InputError):
    """Fewer answers are left than were asked for."""


@dataclass(frozen=True, eq=False)
class Answers:
    """What an endpoint says about n images."""

    labels: NDArray[np.int64]  # (n,) int64, the class of each, from 0
    # (n, classes) float64, as the policy shows them: rounded ones need not add up to 1. NaN stands where a policy shows
    # nothing. None where it names labels only.
    probabilities: NDArray[np.float64] | None = None
    # (n, classes) float64, of the same probabilities before float64 takes small ones for 0. None where a policy gives
    # none: then the probabilities tell all.
    logarithms: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def log_probabilities(self) -> NDArray[np.float64] | None:
        """Natural logarithms (n, classes), -inf of 0; None where labels alone are named."""
        import numpy as np

        if self.logarithms is not None or self.probabilities is None:
            return self.logarithms
        with np.errstate(divide="ignore"):
            logarithms: NDArray[np.float64] = np.log(self.probabilities)
        return logarithms


class Questions(Protocol):
    """Whoever answers questions about images; ``asked`` counts them."""

    classes: int  # how many there are

    @property
    def asked(self) -> int:
        """Images answered so far."""

    def ask(self, images: Tensor) -> Answers:
        """Answer questions, images (n, C, H, W) as the data set holds them."""


class AnswerRule(Protocol):
    """How an endpoint answers, which everybody knows."""

    @property
    def source(self) -> str:
        """What it answers from: network, the run's own, or another model."""

    @property
    def draws(self) -> bool:
        """Whether each answer takes fresh noise."""

    @property
    def labels_only(self) -> bool:
        """Whether it never names a probability."""

    def noiseless(self, scores: NDArray[np.float64]) -> Answers:
        """Return what it says of scores (n, classes), without noise."""


@dataclass(frozen=True, eq=False)
class OpenEndpoint:
    """An endpoint of a finished model, for attacks."""

    questions: Questions  # answers them
    rule: AnswerRule  # how
    # images -> scores that it answers from; for a referee, and never for an attack
    exact: Callable[[Tensor], NDArray[np.float64]]
    claim: Guarantee | None  # what is proven about the answers of one attack; `None`: nothing


class Endpoints(ABC):
    """Answers for the finished models of runs, under policies that have names."""

    name: ClassVar[str]

    @abstractmethod
    def usual(self, experiment: Experiment) -> str:
        """Return the policy that the settings of a run name."""

    @abstractmethod
    def title(self, policy: str) -> str:
        """Return what a policy is called."""

    @abstractmethod
    def budget(self, experiment: Experiment, policy: str, wanted: int | None) -> int | None:
        """Return how many images one attack may ask about, or ``None``; refused beyond the run's own budget."""

    @abstractmethod
    def open(self, folder: RunFolder, world: World, policy: str) -> OpenEndpoint:
        """Open an endpoint that charges nobody; the final model is loaded into the world."""


def endpoints() -> Endpoints:
    """Return what answers for finished models; an ``InputError`` where nothing does."""
    found: list[type[Endpoints]] = list(ENDPOINTS.values())
    if not found:
        raise InputError("nothing here answers for a finished model")
    return found[0]()
