"""The sums of von Mises-Fisher draws of many models' batches, each as the module ``batch_sum`` draws it alone.

Every model has streams of its own, from which it draws the same numbers as alone; what is computed of them is computed
for all models at once, a model's groups of examples being some of all groups.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedpriv.core.randomness import NoiseStream
from fedpriv.gradients import Block, StackedGradients, Vector
from fedpriv.gradients.normal import fill_normal
from fedpriv.mechanisms.machinery.batch_sum import (
    Directions,
    cut_groups,
    directions_of,
    draw_sum,
    made_outside,
    made_parts,
    times,
)
from fedpriv.mechanisms.machinery.small_draws import draw_small_each
from fedpriv.mechanisms.machinery.span import Basis


def draw_sums(
    gradients: StackedGradients,
    kappa: float,
    scale: float,
    block: Block,
    noises: Sequence[NoiseStream],
    rngs: Sequence[np.random.Generator],
) -> Vector:
    """Draw for each of M models ``scale`` times the sum over its batch of VMF(g_i / |g_i|, kappa), (M, *shape).

    Where the directions of some model are nearly dependent, or a batch falls into groups of several sizes, models are
    drawn one after the other.
    """
    cut = cut_groups(next(gradients.each()), block)
    groups = gradients.models * cut[0][1]
    directions = directions_of(gradients.flat, groups, block) if len(cut) == 1 else None
    if directions is None or directions[1].rank == gradients.dimension(block):
        each = zip(gradients.each(), noises, rngs, strict=True)
        sums = [draw_sum(own, kappa, scale, block, noise, rng) for own, noise, rng in each]
        return {name: torch.stack([vector[name] for vector in sums]) for name in block}
    return _draw_together(gradients, *directions, kappa, scale, noises, rngs)


def _draw_together(
    gradients: StackedGradients,
    directions: Directions,
    basis: Basis,
    kappa: float,
    scale: float,
    noises: Sequence[NoiseStream],
    rngs: Sequence[np.random.Generator],
) -> Vector:
    models, block = gradients.models, directions.block
    groups, size = directions.scales.shape
    each, dimension, rank = groups // models, gradients.dimension(block), basis.rank
    small = each * rank * size
    drawn = torch.empty(models, small + each * dimension, dtype=gradients.dtype, device=gradients.device)
    for row, noise in zip(drawn, noises, strict=True):
        fill_normal(row, noise)
    normal = drawn[:, :small].cpu().double().view(groups, rank, size)
    draws = draw_small_each(kappa, dimension, rank, (each, size), rngs)
    parts = made_parts(basis, directions.scales > 0, normal, draws)
    outside = made_outside(directions, basis, drawn[:, small:].unflatten(1, (each, dimension)).flatten(0, 1))
    stretch = parts.outside / outside.lengths
    coefficients = parts.along + times(basis.combination, parts.inside) + stretch[:, None] * outside.correction
    totals = gradients.vector(_combined(outside.numbers, scale * stretch, models), block)
    weights = (scale * coefficients * directions.scales).view(models, -1).to(gradients.device, gradients.dtype)
    gradients.add_combination(totals, 1.0, weights, block)
    return totals


def _combined(numbers: Tensor, weights: Tensor, models: int) -> Tensor:
    """The sums (M, K) of each model's vectors, numbers (G, K) with weights (G,); numbers may be overwritten."""
    factors = weights.to(numbers).view(models, 1, -1)
    if len(numbers) == models:
        return numbers.mul_(factors[:, 0])
    return torch.bmm(factors, numbers.view(models, -1, numbers.shape[1]))[:, 0]
