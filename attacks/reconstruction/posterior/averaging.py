"""The posterior's mean where an upload says little, from a normal distribution fitted to the posterior.

Where the prior leaves most of an image open, the most probable image is no longer the one with the least expected
squared error: it explains the upload with details that are all zero, and coarse parts make up for them. The normal
distribution closest to the posterior (least Kullback-Leibler divergence; Kucukelbir et al. 2017) has a mean that takes
all details into account that the prior allows. Its deviations are free along the prior's principal directions, and one
number for all others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.matching.evaluation import Evaluator, Losses

__all__ = ["BETAS", "Cloud", "fit_cloud", "rate_share"]

NARROW = 0.1  # deviation at first, in the prior's: it grows where the upload leaves images open
BETAS = (0.9, 0.99)  # of Adam, in all searches of the posterior
LAST_RATE = 0.01  # the learning rate of the last step over that of the first
DRAWS = 20240527  # the seed of the points at which posteriors are compared, the same for all rows


@dataclass(frozen=True, eq=False)
class Cloud:
    """A normal distribution of images for each of n rows.

    Attributes:
        middle: coordinates (n, B, C, H, W).
        along: deviations (n, B, r) along the prior's principal directions, in the prior's.
        rest: deviation (n, B, 1) along all others.
        others: what else was fitted, without deviations.
    """

    middle: Tensor
    along: Tensor
    rest: Tensor
    others: tuple[Tensor, ...]

    @property
    def least(self) -> Tensor:
        """The least deviation (n,)."""
        return torch.cat([self.along, self.rest], dim=2).flatten(1).amin(dim=1)


def fit_cloud(
    posterior: Losses,
    coordinates: Tensor,
    others: Sequence[Tensor],
    basis: Tensor,
    steps: int,
    rate: float,
    rates: Sequence[float] = (),
) -> Cloud:
    """Fit the distribution by Adam, from pairs of opposite points, one a step.

    Args:
        posterior: (coordinates, *others) -> minus its logarithm (n,), the prior's standard normal one included.
        coordinates: (n, B, C, H, W), where it starts.
        others: tensors (n * m, ...) on which the posterior depends too: their most probable values are sought, as far
            as they have a learning rate; the others stay.
        basis: (P, r), the prior's principal directions.
        steps: of Adam.
        rate: its learning rate.
        rates: those of the first of ``others``.
    """
    rows, examples = coordinates.shape[:2]
    outside = coordinates[0, 0].numel() - basis.shape[1]
    middle = coordinates.clone()
    along = coordinates.new_full((rows, examples, basis.shape[1]), math.log(NARROW))
    rest = coordinates.new_full((rows, examples, 1), math.log(NARROW))
    fitted = tuple(value.clone() for value in others)
    generator = torch.Generator().manual_seed(DRAWS)

    def divergence(middle: Tensor, along: Tensor, rest: Tensor, draw: Tensor, *fitted: Tensor) -> Tensor:
        flat = draw.flatten(-3)
        offsets = rest.exp() * flat + ((along.exp() - rest.exp()) * (flat @ basis)) @ basis.mT
        offset = offsets.unflatten(-1, middle.shape[2:])
        both = posterior(middle + offset, *fitted) + posterior(middle - offset, *fitted)
        # The prior's share of it is known without drawing.
        known = _prior_and_entropy(along).sum(dim=(1, 2)) + outside * _prior_and_entropy(rest).sum(dim=(1, 2))
        total: Tensor = both / 2 - offset.square().flatten(1).sum(dim=1) / 2 + known
        return total

    evaluate = Evaluator(divergence, steps)
    moved = [(middle, rate), (along, rate), (rest, rate), *zip(fitted, rates, strict=False)]
    adam = torch.optim.Adam([{"params": [value], "lr": each} for value, each in moved], betas=BETAS)
    for step in range(steps):
        draw = torch.randn(coordinates.shape[1:], generator=generator).to(coordinates)
        _, (middle.grad, along.grad, rest.grad, _, *gradients) = evaluate(middle, along, rest, draw, *fitted)
        for (value, _), gradient in zip(moved[3:], gradients, strict=False):
            value.grad = gradient
        for group, (_, each) in zip(adam.param_groups, moved, strict=True):
            group["lr"] = each * rate_share(step / steps)
        adam.step()
    return Cloud(middle, along.exp(), rest.exp(), fitted)


def rate_share(done: float) -> float:
    """Return the learning rate over that of the first step, when this share of the steps is done: half a cosine."""
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def _prior_and_entropy(logarithms: Tensor) -> Tensor:
    return (2 * logarithms).exp() / 2 - logarithms
