"""Clipping: bounds on gradients, and tail bounds on the length of noise."""

import math

import torch
from torch import Tensor

from fedpriv.gradients.numerics import ACCURACY

# The share of a norm by which what is combined may be longer without being clipped for it.
NEGLIGIBLE = 1e-5


def clip_factors(norms: Tensor, roundings: Tensor, clip_norm: float) -> Tensor:
    """Return min(1, clip_norm / norm) for norms (B,), smaller where rounding may make a gradient longer than its norm.

    With bounds r (B,) of the rounding, what is combined of a norm n has at most the norm n + 2 r. A gradient is clipped
    by that, and by r / ACCURACY at least, so that what is summed to make it is not much longer than clip_norm: else
    noise would be rounded away. Where 2 r is below a hundred-thousandth of n it is left out. A norm too large gives 0.
    """
    doubtful = 2 * roundings > NEGLIGIBLE * norms
    if bool(doubtful.any()):
        longest = torch.maximum(norms + 2 * roundings, roundings / ACCURACY)
        norms = torch.where(doubtful, longest, norms)
    # Next to nothing (7e-12 in float32): of shorter ones squares may be 0.
    return (clip_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny ** 0.3)).clamp_(max=1).nan_to_num_(nan=0.0)


def clip_factor(squared: Tensor, clip_norm: float) -> Tensor:
    """Return min(1, clip_norm / norm) from one squared norm; differentiable, also at zero."""
    clipped = squared > clip_norm**2
    # The branch that is not taken is kept away from the derivative of the root at 0.
    return torch.where(clipped, clip_norm * torch.where(clipped, squared, 1.0).rsqrt(), 1.0)


def inverse_norm(squared: Tensor) -> Tensor:
    """Return 1 / norm from squared norms, and 0 next to nothing (7e-12 in float32); differentiable at zero, too."""
    known = squared > torch.finfo(squared.dtype).tiny ** 0.6
    return torch.where(known, torch.where(known, squared, 1.0).rsqrt(), 0.0)


def normal_norm(dimension: float, steepest: float, tail: float) -> float:
    """Return what a normal vector's norm exceeds with probability ``tail`` at most (Boucheron et al. 2013, Thm 5.6)."""
    return math.sqrt(dimension) + steepest * math.sqrt(2 * math.log(1 / tail))
