"""Neighbouring data sets that are as hard on a mechanism as we know how to make them, with the networks they need."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.core.world import State
from tests.privacy.game import Examples, Neighbours, Parameters, zeros

__all__ = ["BLANK", "MANY", "ONE_PIXEL", "WHITE", "WORST_CASES", "WorstCase", "alone", "cancelling", "huge", "pair"]

MANY = 64
"""Examples in a data set whose others are all alike."""

WHITE = np.full((1, 2), 255, np.uint8)
BLANK = np.zeros((1, 2), np.uint8)
ONE_PIXEL = np.array([[255, 0]], np.uint8)


@dataclass(frozen=True, eq=False)
class WorstCase:
    """Two neighbouring data sets, and the network and the parameters under which they are a worst case."""

    neighbours: Neighbours  # the data sets
    network: str = "heads"  # of `tests.privacy.networks`
    parameters: Parameters = zeros  # what the server sends
    # whether the pair is neighbouring in the sense of zero-out, too: one of the two examples adds nothing
    zero_out: bool = True

    @property
    def model(self) -> dict[str, object]:
        return {"name": f"tests.privacy.networks:{self.network}"}


def pair(
    left: NDArray[np.uint8], right: NDArray[np.uint8], others: NDArray[np.uint8], count: int, labels: tuple[int, int]
) -> Neighbours:
    """``count`` examples with label 0, all like ``others`` but for the first, which is ``left`` or ``right``."""
    sets = [
        Examples(np.array([image, *[others] * (count - 1)]), np.array([label, *[0] * (count - 1)]))
        for image, label in zip((left, right), labels, strict=True)
    ]
    return Neighbours(*sets)


def huge(initial: State) -> State:
    """Finite parameters with which two bright pixels give a logit that overflows, and two dark ones do not."""
    return State({name: torch.full_like(value, 2e38) for name, value in initial.parameters.items()}, initial.buffers)


def cancelling(rows: int) -> NDArray[np.uint8]:
    """An image whose second half of rows repeats the first."""
    half = np.random.default_rng(0).integers(0, 256, (rows // 2, 64), dtype=np.uint8)
    return np.concatenate([half, half])


def alone(image: NDArray[np.uint8]) -> Neighbours:
    """The image, or a blank one, with nobody else."""
    return pair(image, np.zeros_like(image), image, 1, (0, 0))


WORST_CASES = {
    # All examples are one and the same image; the victim's gradient is turned round.
    "duplicates": WorstCase(pair(WHITE, WHITE, WHITE, MANY, (0, 1)), zero_out=False),
    # The victim has no gradient at all, so no norm to divide by and no direction.
    "blank": WorstCase(pair(WHITE, BLANK, WHITE, MANY, (0, 0))),
    # Terms of 10^7 that cancel: their sum is rounding, and how long it is depends on how it is computed.
    "cancelling": WorstCase(alone(cancelling(8)), "positions"),
    "cancelling, longer": WorstCase(alone(cancelling(16)), "positions"),
    # The network gives NaN, or raises, for the victim only.
    "nan": WorstCase(pair(BLANK, ONE_PIXEL, ONE_PIXEL, MANY, (0, 0)), "standardised"),
    "raises": WorstCase(pair(ONE_PIXEL, WHITE, WHITE, MANY, (0, 0)), "raising"),
    # The server sends parameters under which the victim's logits overflow.
    "overflow": WorstCase(pair(WHITE, WHITE // 128, WHITE // 128, MANY, (0, 0)), parameters=huge),
}
