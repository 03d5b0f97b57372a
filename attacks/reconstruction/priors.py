"""Image priors: a normal distribution, fitted to public images where there are any.

The covariance is a few principal directions with their own variances and one variance for all the rest, so that it is
positive definite, can be inverted at once, and needs fewer images than pixels. Real images differ in contrast far more
than a normal distribution of so many pixels allows: ``contrast`` says how much, for estimates that depend on it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.core.errors import InputError

Shape = tuple[int, int, int]

MOST_IMAGES = 2048  # public images that are used; more of them change little
FEWEST_IMAGES = 20  # below this the generic prior knows more
RANKS = (4, 8, 16, 32, 64, 128, 192, 256, 384, 512)

# The generic prior: what photographs have in common (Field 1987; Ruderman 1994), on the [0, 1] scale.
GREY, DEVIATION = 0.5, 0.25
NEIGHBOURS = 0.95  # correlation of neighbouring pixels
CHANNELS = 0.9  # correlation of two channels of one pixel
CONTRAST = 0.7
SHARE = 0.995  # of the variance that principal directions of the generic prior explain


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    """A normal distribution over images of P numbers, on the scale of the network's input."""

    mean: Tensor  # (P,)
    basis: Tensor  # (P, r), orthonormal columns
    variances: Tensor  # (r,), along the columns, above 0
    rest: float  # variance along every other direction, above 0
    contrast: float  # deviation of the logarithm of images' squared distances; 0.0: really normal

    @property
    def pixels(self) -> int:
        """P."""
        return len(self.mean)

    def energy(self, images: Tensor) -> Tensor:
        """Return the squared distance from the mean in standard deviations: -2 log density but for a constant."""
        offsets = images.flatten(-3) - self.mean
        along = offsets @ self.basis
        outside = offsets.square().sum(dim=-1) - along.square().sum(dim=-1)
        return (along.square() / self.variances).sum(dim=-1) + outside.clamp(min=0) / self.rest

    def shrink(self, offsets: Tensor, along: Tensor, outside: Tensor) -> Tensor:
        """Multiply offsets (P,) with ``along`` (r,) in the principal directions and ``outside`` () in the others."""
        return outside * offsets + self.basis @ ((along - outside) * (self.basis.mT @ offsets))

    def to(self, like: Tensor) -> "GaussianPrior":
        """Return the same prior on a tensor's device and in its type."""
        mean, basis, variances = (value.to(like) for value in (self.mean, self.basis, self.variances))
        return GaussianPrior(mean, basis, variances, self.rest, self.contrast)


def stretched(offsets: Tensor, basis: Tensor, along: Tensor, outside: Tensor | float) -> Tensor:
    """Multiply offsets (..., P) with ``along`` (..., r) in the directions of a basis (P, r), and ``outside`` beyond."""
    return outside * offsets + ((along - outside) * (offsets @ basis)) @ basis.mT


def fit_prior(images: Tensor) -> GaussianPrior:
    """Fit the prior to public images (N, C, H, W), N >= 20; a fifth of them decides how many directions it has."""
    if images.ndim != 4 or len(images) < FEWEST_IMAGES:
        raise InputError(f"a prior needs at least {FEWEST_IMAGES} images (N, C, H, W); given {tuple(images.shape)}")
    flat = images[:: -(-len(images) // MOST_IMAGES)].flatten(1).cpu().double()
    held = torch.arange(len(flat)) % 5 == 4
    mean = flat[~held].mean(dim=0)
    fitted, tests = flat[~held] - mean, flat[held] - mean
    variances, basis = _principal(fitted)
    if len(variances) == 0:
        raise InputError("the public images are all the same: they say nothing about what images look like")
    along = tests @ basis
    squares = tests.square().sum(dim=1)
    ranks = {min(rank, len(variances), flat.shape[1] - 1) for rank in RANKS}
    rank = min(ranks, key=lambda number: _surprise(along[:, :number], squares, variances[:number], flat.shape[1]))
    rest = _rest(along[:, :rank], squares, variances[:rank], flat.shape[1])
    prior = GaussianPrior(mean, basis[:, :rank], variances[:rank], rest, 0.0)
    energies = prior.energy(flat[held].unflatten(1, images.shape[1:]))
    contrast = float(energies.clamp(min=1e-9).log().std())
    return GaussianPrior(mean, basis[:, :rank].contiguous(), variances[:rank], rest, contrast).to(images)


def generic_prior(shape: Shape, mean: Tensor, std: Tensor) -> GaussianPrior:
    """Return the prior without public images (C, H, W): grey, a Markov process in both directions and the channels."""
    channels, height, width = shape
    covariances = (channel_covariance(channels), line_covariance(height), line_covariance(width))
    factors = [torch.linalg.eigh(matrix) for matrix in covariances]
    products = torch.einsum("c,h,w->chw", *(values for values, _ in factors)).flatten()
    order = products.argsort(descending=True)
    explained = products[order].cumsum(0) / products.sum()
    rank = min(int((explained < SHARE).sum()) + 1, RANKS[-1], len(products) - 1)
    c, h, w = torch.unravel_index(order[:rank], shape)
    vectors = torch.einsum("ir,jr,kr->ijkr", *(v[:, n] for (_, v), n in zip(factors, (c, h, w), strict=True)))
    scale = DEVIATION / float(std.double().mean())
    start = ((GREY - mean.double()) / std.double()).expand(shape).flatten()
    variances = products[order[:rank]] * scale**2
    rest = float(products[order[rank:]].mean()) * scale**2
    return GaussianPrior(start, vectors.flatten(0, 2), variances, rest, CONTRAST).to(mean)


def channel_covariance(channels: int) -> Tensor:
    """The correlations (C, C) of the channels of one pixel, in the generic prior; float64 on the CPU."""
    return torch.full((channels, channels), CHANNELS, dtype=torch.float64).fill_diagonal_(1.0)


def line_covariance(length: int, neighbours: float = NEIGHBOURS) -> Tensor:
    """The correlations (length, length) of the pixels of one line, in the generic prior; float64 on the CPU."""
    places = torch.arange(length, dtype=torch.float64)
    return neighbours ** (places[:, None] - places).abs()


def _principal(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Variances (r,), largest first, and directions (P, r) of centred images (n, P), those of variance 0 left out."""
    count, pixels = offsets.shape
    has_many = count > pixels
    values, vectors = torch.linalg.eigh((offsets.mT @ offsets if has_many else offsets @ offsets.mT) / (count - 1))
    values, vectors = values.flip(0), vectors.flip(1)
    kept = values > max(float(values[0]) * 1e-9, 1e-30)
    values, vectors = values[kept], vectors[:, kept]
    return values, vectors if has_many else offsets.mT @ vectors / (values * (count - 1)).sqrt()


def _rest(along: Tensor, squares: Tensor, variances: Tensor, pixels: int) -> float:
    """The variance of held-out images (n, r), with squared lengths (n,), along each of the directions left."""
    outside = (squares - along.square().sum(dim=1)).mean() / (pixels - along.shape[1])
    return max(float(outside), 1e-6 * float(variances[0]))


def _surprise(along: Tensor, squares: Tensor, variances: Tensor, pixels: int) -> float:
    """Minus the mean log-density of held-out images with so many directions, but for a constant."""
    rank = along.shape[1]
    rest = _rest(along, squares, variances, pixels)
    outside = (squares - along.square().sum(dim=1)).mean() / rest
    inside = (along.square() / variances).sum(dim=1).mean()
    return float((inside + outside + variances.log().sum()) / 2) + (pixels - rank) / 2 * math.log(rest)
