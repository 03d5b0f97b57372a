"""Results of an attack, and the errors and warnings that stop or qualify it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.core.errors import InputError


@dataclass(frozen=True, eq=False)
class Outcome:
    """Where an attack's rows ended, before the results are sorted by victim."""

    images: Tensor | tuple[Tensor, ...]  # normalised (N, B, C, H, W), or of each row (B, C, H, W)
    labels: Tensor | tuple[Tensor, ...]  # int64 (N, B), or of each row (B,)
    losses: Tensor  # (N,), the attack's own objective at these images
    iterations: Tensor  # int64 (N,)
    notes: tuple[str, ...]  # one a row, may be empty


@dataclass(frozen=True, eq=False)
class Restart:
    """One restart's result."""

    images: Tensor  # (B, C, H, W) on the [0, 1] scale, clamped, float32 on the CPU
    labels: Tensor  # int64 (B,), those that this very restart ended with; -1: none is told
    loss: float | None  # the attack's own objective at these images, or None where it was never finite
    iterations: int  # steps made


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The result of one attack on one upload."""

    round: int  # the round of the observation
    client: int  # the client of the observation
    attack: str  # the attack's name
    attempts: tuple[Restart, ...]  # one for each restart
    chosen: int  # the number of the restart with the lowest loss; the true images are not used for the choice
    note: str  # assumptions of the result, or why it is unreliable; may be empty
    seconds: float  # wall time of the attack divided by the number of uploads that it attacked together
    # whether the images were picked from lists, one for each image of the upload and in their order, and not
    # reconstructed
    picked: bool = False

    @staticmethod
    def lowest(attempts: Sequence[Restart]) -> int:
        """The number of the restart with the lowest loss of the attack's own; the truth is not known here."""
        losses = [math.inf if attempt.loss is None else attempt.loss for attempt in attempts]
        return min(range(len(losses)), key=losses.__getitem__)

    @property
    def images(self) -> Tensor:
        """The chosen restart's images."""
        return self.attempts[self.chosen].images

    @property
    def labels(self) -> Tensor:
        """The chosen restart's labels."""
        return self.attempts[self.chosen].labels

    @property
    def loss(self) -> float | None:
        """The chosen restart's loss."""
        return self.attempts[self.chosen].loss

    @property
    def losses(self) -> tuple[float | None, ...]:
        """The loss of each restart."""
        return tuple(attempt.loss for attempt in self.attempts)


class AttackRefused(InputError):
    """The attack's model of the upload does not hold for these settings: running it would measure nothing."""


def is_lack_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, which torch reports on a CPU as any other ``RuntimeError``."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in ("can't allocate memory", "not enough memory"))


def lacks_second_derivative(error: Exception) -> bool:
    """Whether torch cannot differentiate a function of the network twice, of which there is no class of errors."""
    text = str(error)
    return ("derivative for" in text and "not implemented" in text) or "double backwards" in text.lower()
