"""What the attacks minimise: squared distance, angle, and total variation; one number a row."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.matching.matcher import Comparison

__all__ = ["angle", "opponent_variation", "squared_distance", "total_variation"]

SMALLEST = 1e-8  # added to squared differences: the root of zero has no derivative


def squared_distance(comparison: Comparison) -> Tensor:
    """Squared Euclidean distance over all parameters (Zhu et al. 2019, equation 3): (N,).

    It is |g|^2 - 2 g.T + |T|^2: next to a much longer, noisy upload T nothing of the image's part is lost. Close to a
    match it cancels; an attack that goes there computes in float64.
    """
    return (comparison.squared - 2 * comparison.dot + comparison.heard).sum(dim=1)


def angle(comparison: Comparison) -> Tensor:
    """One minus the cosine (Geiping et al. 2020, equation 4), the mean over blocks: (N,).

    With one von Mises-Fisher draw a block, the log-likelihood of the upload is kappa times the sum of the blocks'
    cosines, so each block counts the same whatever its length. A zero vector counts as orthogonal to everything.
    """
    lengths = comparison.squared * comparison.heard
    # The root of zero has no derivative, so a zero is replaced before the root is taken.
    zero = lengths == 0
    cosines = comparison.dot / torch.where(zero, 1.0, lengths).sqrt()
    return (1 - torch.where(zero, 0.0, cosines)).mean(dim=1)


def opponent_variation(images: Tensor) -> Tensor:
    """Mean length of the differences (across, down) of neighbours, in each channel and each difference of two channels.

    Colours that change where brightness does not count too (double opponents, Åström and Schnörr 2016, as used by
    Geiping's breaching). Nothing changes beyond the border.

    Args:
        images: (N, B, C, H, W), any C; of one channel there are no differences.

    Returns:
        (N,).
    """
    first, second = torch.triu_indices(images.shape[2], images.shape[2], 1, device=images.device)
    planes = torch.cat([images, images[:, :, first] - images[:, :, second]], dim=2)
    across = F.pad(planes.diff(dim=4), (0, 1))
    down = F.pad(planes.diff(dim=3), (0, 0, 0, 1))
    return (across.square() + down.square() + SMALLEST).sqrt().mean(dim=(1, 2, 3, 4))


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbours, across plus down; images (N, B, C, H, W), any C, give (N,)."""
    total: Tensor = _TotalVariation.apply(images)
    return total


class _TotalVariation(torch.autograd.Function):
    """The derivative is made of signs alone: fewer passes over the images than one difference after the other."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        ctx.save_for_backward(images)
        total = images.new_zeros(len(images))
        for axis, count in _neighbours(images):
            total += images.diff(dim=axis).abs_().sum(dim=(1, 2, 3, 4)) / count
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (images,) = ctx.saved_tensors
        felt = torch.zeros_like(images)
        for axis, count in _neighbours(images):
            pairs = images.shape[axis] - 1
            signs = images.diff(dim=axis).sign_()
            felt.narrow(axis, 1, pairs).add_(signs, alpha=1 / count)
            felt.narrow(axis, 0, pairs).sub_(signs, alpha=1 / count)
        return felt.mul_(gradient[:, None, None, None, None])


def _neighbours(images: Tensor) -> list[tuple[int, int]]:
    """The axes across and down, with the number of pairs of neighbours in one row's images; at least 1."""
    numbers = images[0].numel()
    return [(axis, max(numbers // images.shape[axis] * (images.shape[axis] - 1), 1)) for axis in (4, 3)]
