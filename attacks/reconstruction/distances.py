"""What the attacks minimise: squared distance, angle, and total variation; one number a row."""

import torch
from torch import Tensor

from attacks.reconstruction.matching import Comparison

__all__ = ["angle", "squared_distance", "total_variation"]


def squared_distance(comparison: Comparison) -> Tensor:
    """Squared Euclidean distance over all parameters (Zhu et al. 2019, equation 3): (N,).

    It is |g|^2 - 2 g.T + |T|^2: beside a much longer, noisy upload T nothing of the image's part is lost. Close to a
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


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbours, across plus down; images (N, B, C, H, W), any C, give (N,)."""
    across = (images[..., 1:] - images[..., :-1]).abs()
    down = (images[..., 1:, :] - images[..., :-1, :]).abs()
    return _row_mean(across) + _row_mean(down)


def _row_mean(values: Tensor) -> Tensor:
    flat = values.flatten(1)
    return flat.sum(dim=1) / max(flat.shape[1], 1)
