"""Images told apart by what photographs are like, whatever the network's activation: independent components.

A batch's gradient shows its images only mixed with each other. But differences of neighbouring pixels are mostly small
and sometimes large, and nearly independent between images; every mixture of several is closer to normal. So the
unmixing is looked for whose rows are farthest from normal (FastICA, Hyvarinen 1999, symmetric; on gradients Kariyappa
et al. 2023). No errors of the network are looked at, and no zeros among them are needed.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["unmix"]

SMOOTH = 0.1  # of the absolute value that measures how far from normal a row is, in its standard deviations
STEPS = 200  # at most
SETTLED = 1e-5  # change of a direction's cosine after which it stays
FEW = 32  # up to so many images several starts are tried
STARTS = 3
SEED = 20261123  # of the starts; it decides nothing but which local optimum is found
SMALLEST = 16  # side of an image from which on noise is averaged over 2 x 2 pixels


def unmix(mixtures: Tensor, shape: tuple[int, int, int], *, noisy: bool) -> Tensor:
    """Find the unmixing A (B, B): the rows of ``A @ mixtures`` are images, each but for a factor.

    Args:
        mixtures: (B, P), float64.
        shape: (C, H, W) with C H W = P.
        noisy: whether pixels are averaged first, which leaves less noise and fewer details.
    """
    samples = _differences(mixtures.unflatten(1, shape), pooled=noisy and min(shape[1:]) >= SMALLEST)
    values, vectors = torch.linalg.eigh(samples @ samples.mT / samples.shape[1])
    whitening = (vectors / values.clamp(min=1e-12 * float(values[-1])).sqrt()) @ vectors.mT
    white = whitening @ samples
    starts = STARTS if len(mixtures) <= FEW else 1
    rotations = [_rotation(white, start) for start in range(starts)]
    sparsest = min(rotations, key=lambda rotation: float(_smooth_size(rotation @ white).mean()))
    unmixing: Tensor = sparsest @ whitening
    return unmixing


def _differences(images: Tensor, *, pooled: bool) -> Tensor:
    """Differences of neighbours (B, n): across, down, and of these two, in decorrelated channels on equal scales."""
    channels = images.shape[1]
    turned = torch.einsum("dc,bchw->bdhw", _cosines(channels).to(images), images)
    if pooled:
        turned = F.avg_pool2d(turned, 2)
    across, down = turned.diff(dim=3), turned.diff(dim=2)
    parts = [part[:, channel].flatten(1) for part in (across, down, across.diff(dim=2)) for channel in range(channels)]
    sizes = [part.square().mean().sqrt() if part.numel() else part.new_zeros(()) for part in parts]
    usable = [part / size for part, size in zip(parts, sizes, strict=True) if float(size) > 0]
    return torch.cat(usable, dim=1) if usable else images.flatten(1)


def _cosines(count: int) -> Tensor:
    """The orthonormal cosine transform (n, n), which nearly decorrelates channels."""
    places = torch.arange(count, dtype=torch.float64)
    matrix = torch.cos(math.pi / count * (places + 0.5) * places[:, None]) * math.sqrt(2 / count)
    matrix[0] /= math.sqrt(2)
    return matrix


def _rotation(white: Tensor, start: int) -> Tensor:
    """A rotation (B, B) of white samples (B, n) at which they are sparse, by fixed-point steps."""
    generator = torch.Generator().manual_seed(SEED + start)
    rotation, _ = torch.linalg.qr(torch.randn(len(white), len(white), generator=generator, dtype=white.dtype))
    for _ in range(STEPS):
        rows = rotation @ white
        sizes = _smooth_size(rows)
        curvature = (SMOOTH**2 / sizes**3).mean(dim=1)
        step = (rows / sizes) @ white.mT / white.shape[1] - curvature[:, None] * rotation
        left, _, right = torch.linalg.svd(step)
        turned: Tensor = left @ right
        change = float((1 - (turned * rotation).sum(dim=1).abs()).max())
        rotation = turned
        if change < SETTLED:
            break
    settled: Tensor = rotation
    return settled


def _smooth_size(rows: Tensor) -> Tensor:
    """The absolute value without its kink; the smaller its mean at equal variance, the sparser a row."""
    sizes: Tensor = (rows.square() + SMOOTH**2).sqrt()
    return sizes
