"""A proof of an answer that needs no truth: errors are zero where the images found switch a unit off, nowhere else.

Behind a ReLU an example's error is zero at a unit exactly where its pre-activation is not positive. Errors come from
the gradient, pre-activations from the images found and the public weights; a wrong separation makes them agree at half
of the pairs (unit, example). The share that agrees is the sparsity-matching score of SPEAR (Dimitrov, Baader, Mueller
and Vechev 2024).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Certificate", "certify"]

CLEAR = 5.0  # deviations of the noise up to which an error counts as zero


@dataclass(frozen=True)
class Certificate:
    """How well zero errors and images agree.

    Attributes:
        pairs: of a unit and an example, that were compared.
        disagreeing: those that contradict each other.
    """

    pairs: int
    disagreeing: int

    @property
    def share(self) -> float:
        """The share of the pairs that agree; 1.0 certifies the answer where there is no noise."""
        return 1.0 - self.disagreeing / self.pairs

    @property
    def words(self) -> str:
        """In one line, for people."""
        return f"certificate {self.share:.4f} ({self.disagreeing} of {self.pairs} zero errors disagree with the images)"


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
    return Certificate(zero.numel(), int(disagreeing.sum()))
