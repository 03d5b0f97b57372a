"""A proof of an answer that needs no truth: errors are zero where the images found switch a unit off, nowhere else.

Behind a ReLU an example's error is zero at a unit exactly where its pre-activation is not positive. Errors come from
the gradient, pre-activations from the images found and the public weights; wrong separations agreed at 0.5 to 0.9 of
the pairs (unit, example). The share that agrees is the sparsity-matching score of SPEAR (Dimitrov, Baader, Mueller and
Vechev 2024).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Certificate", "certify"]

# An image: with 1 to 2 of them wrong images were found that agreed everywhere, with 3 and more none.
OUTPUTS = 3
CLEAR = 5.0  # deviations of the noise up to which an error counts as zero


@dataclass(frozen=True)
class Certificate:
    """How well zero errors and images agree.

    Attributes:
        pairs: of a unit and an example, that were compared.
        disagreeing: those that contradict each other.
        narrow: whether the layer has so few outputs an image that other images may agree as well.
    """

    pairs: int
    disagreeing: int
    narrow: bool = False

    @property
    def share(self) -> float:
        """The share of the pairs that agree; 1.0 certifies a layer's answer that is not narrow, without noise."""
        return 1.0 - self.disagreeing / self.pairs

    @property
    def words(self) -> str:
        """In one line, for people."""
        doubt = ""
        if self.disagreeing:
            doubt = ": the images are not proven"
        elif self.narrow:
            doubt = f": below {OUTPUTS} outputs an image this does not prove the images"
        return (
            f"certificate {self.share:.4f} ({self.disagreeing} of {self.pairs} pairs disagree with the images){doubt}"
        )


def certify(errors: Tensor, noise: Tensor, outputs: Tensor, rounds: int = 1) -> Certificate:
    """Compare errors with the first layer's outputs at the images found.

    Args:
        errors: (rows, B); the rows of several rounds one below the other.
        noise: (B,), its deviation in each example's errors.
        outputs: (B, rows), of the first layer, before its activation.
        rounds: in how many equal parts the rows fall; an example may be missing from a whole part.
    """
    zero = errors.mT.abs() <= CLEAR * noise[:, None]
    parts = zero.unflatten(1, (rounds, -1))
    missing = parts.all(dim=2, keepdim=True).expand_as(parts).flatten(1) if rounds > 1 else torch.zeros_like(zero)
    disagreeing = (zero != (outputs <= 0)) & ~missing
    narrow = zero.shape[1] < OUTPUTS * rounds * len(zero)
    return Certificate(zero.numel(), int(disagreeing.sum()), narrow)
