"""The posterior's mean where an upload says little, from a normal distribution fitted to the posterior.

Where the prior leaves most of an image open, the most probable image is no longer the one with the least expected
squared error: it explains the upload with details that are all zero, and coarse parts make up for them. The normal
distribution closest to the posterior (least Kullback-Leibler divergence; Kucukelbir et al. 2017) has a mean that takes
all details into account that the prior allows. Its deviations are free along the prior's principal directions, and one
number for all others.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.reconstruction.evaluation import Evaluator, Losses

__all__ = ["Cloud", "fit_cloud"]

NARROW = 0.1  # deviation at first, in the prior's: it grows where the upload leaves images open
BETAS = (0.9, 0.99)
LAST_RATE = 0.01  # the learning rate of the last step over that of the first
DRAWS = 20240527  # the seed of the points at which posteriors are compared, the same for all rows


@dataclass(frozen=True, eq=False)
class Cloud:
    """A normal distribution of images for each of n rows.

    Attributes:
        middle: coordinates (n, B, C, H, W).
        along: deviations (n, B, r) along the prior's principal directions, in the prior's.
        rest: deviation (n, B, 1) along all others.
    """

    middle: Tensor
    along: Tensor
    rest: Tensor

    @property
    def least(self) -> Tensor:
        """The least deviation (n,)."""
        return torch.cat([self.along, self.rest], dim=2).flatten(1).amin(dim=1)


def fit_cloud(posterior: Losses, coordinates: Tensor, logits: Tensor, basis: Tensor, steps: int, rate: float) -> Cloud:
    """Fit the distribution by Adam, from pairs of opposite points, one a step.

    Args:
        posterior: (coordinates, logits, shares) -> minus its logarithm (n,), the prior's standard normal one included.
        coordinates: (n, B, C, H, W), where it starts.
        logits: (n, B, classes), of the labels; they stay.
        basis: (P, r), the prior's principal directions.
        steps: of Adam.
        rate: its learning rate.
    """
    rows, examples = coordinates.shape[:2]
    others = coordinates[0, 0].numel() - basis.shape[1]
    middle = coordinates.clone()
    along = coordinates.new_full((rows, examples, basis.shape[1]), math.log(NARROW))
    rest = coordinates.new_full((rows, examples, 1), math.log(NARROW))
    whole = coordinates.new_ones(rows)
    generator = torch.Generator().manual_seed(DRAWS)

    def divergence(middle: Tensor, along: Tensor, rest: Tensor, draw: Tensor) -> Tensor:
        flat = draw.flatten(-3)
        offsets = rest.exp() * flat + ((along.exp() - rest.exp()) * (flat @ basis)) @ basis.mT
        offset = offsets.unflatten(-1, middle.shape[2:])
        both = posterior(middle + offset, logits, whole) + posterior(middle - offset, logits, whole)
        # The prior's share of it is known without drawing.
        known = _prior_and_entropy(along).sum(dim=(1, 2)) + others * _prior_and_entropy(rest).sum(dim=(1, 2))
        total: Tensor = both / 2 - offset.square().flatten(1).sum(dim=1) / 2 + known
        return total

    evaluate = Evaluator(divergence, steps)
    adam = torch.optim.Adam([middle, along, rest], betas=BETAS)
    for step in range(steps):
        draw = torch.randn(coordinates.shape[1:], generator=generator).to(coordinates)
        _, (middle.grad, along.grad, rest.grad, _) = evaluate(middle, along, rest, draw)
        fall = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2
        adam.param_groups[0]["lr"] = rate * fall
        adam.step()
    return Cloud(middle, along.exp(), rest.exp())


def _prior_and_entropy(logarithms: Tensor) -> Tensor:
    return (2 * logarithms).exp() / 2 - logarithms
