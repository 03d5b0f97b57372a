"""Questions to an endpoint and its answers: all that an analyst, or an attack, ever sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


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
    """Whoever answers questions about images.

    Attributes:
        classes: how many there are.
        asked: images answered so far.
    """

    classes: int

    @property
    def asked(self) -> int:
        """Images answered so far."""

    def ask(self, images: Tensor) -> Answers:
        """Answer questions.

        Args:
            images: (n, C, H, W) as the data set holds them: uint8, or floating point on [0, 1] before normalisation.
        """
