"""The image of one example from a first Linear layer behind von Mises-Fisher draws on blocks of D coordinates.

Row i of the layer's gradient is ``e_i x``. A block within it is released as a draw around ``sign(e_i) x_b / |x_b|``:
all rows repeat the same few directions, up to a sign, or say nothing where ``e_i`` is 0 (a ReLU that is off). So

1. rows and directions are estimated in turn, from the first singular vector on; a row counts by the probability that it
   says anything, with the sign that it has;
2. the lengths |x_b|, which no row holds, and the one sign that all rows share are those that the prior of images makes
   most probable: in polar coordinates, whose volume is a power of the length;
3. what noise is left in the directions is filtered by the prior.

Where D does not divide the P pixels, rows are cut at different places. The image then is cut at all of them, and the
blocks, which overlap, say how long the parts are in relation to each other. Blocks that reach from one row into the
next are not used.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from fedpriv.accounting.vmf_functions import log_mgf, mean_resultant_length
from fedpriv.attacks.reconstruction.priors import GaussianPrior

__all__ = ["Filtered", "HeardBlocks", "filtered", "heard_blocks"]

TURNS = 20  # of rows and directions, before rows are weighted by what they are likely to say
WEIGHED = 5  # more turns, with these weights
FILTERS = 4  # rounds of lengths and the noise that belongs to them
STEPS = 200  # of one search for lengths
UNSEEN = 1e6  # variance of a pixel that no block holds


@dataclass(frozen=True, eq=False)
class HeardBlocks:
    """The rows of a first layer, blocks of length 1; float64 on the CPU.

    Attributes:
        rows: (m, P); zero outside of the blocks that lie within a row.
        phases: int64 (m,), which row of ``blocks`` tells how it is cut.
        blocks: int64 (F, P), the number of each pixel's block, from 1 on; 0: none that lies within a row.
        parts: int64 (P,), the part of the image that each pixel belongs to: cut wherever any row is.
        kappa: concentration.
        length: D.
    """

    rows: Tensor
    phases: Tensor
    blocks: Tensor
    parts: Tensor
    kappa: float
    length: int

    @property
    def cosine(self) -> float:
        """The mean cosine of a draw and its direction."""
        return float(mean_resultant_length(self.length, self.kappa))

    @property
    def across(self) -> float:
        """The variance of a draw in each coordinate across its direction."""
        return self.cosine / self.kappa if self.kappa else 1 / self.length

    def norms(self, image: Tensor) -> Tensor:
        """The length of the block that each pixel of an image (P,) is in, cut in each way: (F, P); else infinite."""
        return _block_norms(image.expand(len(self.blocks), -1), self.blocks)

    def directions(self, image: Tensor) -> Tensor:
        """The directions of an image's (P,) blocks, cut in each way: (F, P); differentiable."""
        return image / self.norms(image)

    def sums(self, weights: Tensor) -> Tensor:
        """The sums of the rows that are cut in the same way, with weights (m,): (F, P)."""
        return self.rows.new_zeros(self.blocks.shape).index_add(0, self.phases, weights[:, None] * self.rows)

    def agreement(self, image: Tensor) -> Tensor:
        """The sum over its blocks of each row's cosines with an image (P,): (m,)."""
        return (self.rows * self.directions(image)[self.phases]).sum(dim=1)


@dataclass(frozen=True, eq=False)
class Filtered:
    """An image that the rows leave possible.

    Attributes:
        image: (P,), on the scale of the network's input; float64 on the CPU.
        surprise: minus the logarithm of its density, but for a constant.
    """

    image: Tensor
    surprise: float


def heard_blocks(weight: Tensor, offset: int, length: int, kappa: float) -> HeardBlocks | None:
    """Cut an upload's rows into their blocks.

    Args:
        weight: (m, P), what was heard of the layer's matrix.
        offset: coordinates before the matrix, of all parameters laid end to end.
        length: D, at least 1.
        kappa: concentration, at least 0.

    Returns:
        The rows; ``None`` where no block lies within one.
    """
    outputs, pixels = weight.shape
    begins = (offset + pixels * torch.arange(outputs)) % length
    shifts, phases = begins.unique(return_inverse=True)
    places = shifts[:, None] + torch.arange(pixels)
    blocks = places // length
    whole = (blocks * length >= shifts[:, None]) & ((blocks + 1) * length <= shifts[:, None] + pixels)
    if not bool(whole.any()):
        return None
    parts = (places % length == 0).any(dim=0).long().cumsum(0)
    blocks = torch.where(whole, blocks + 1, 0)
    rows = weight.cpu().double()
    rows = rows / _block_norms(rows, blocks[phases])
    return HeardBlocks(rows, phases, blocks, parts - parts[0], kappa, length)


def filtered(heard: HeardBlocks, prior: GaussianPrior) -> tuple[Filtered, Filtered]:
    """Estimate the image with one sign and with the other.

    Args:
        heard: the rows.
        prior: of images, float64 on the CPU.
    """
    signs = _row_signs(heard)
    search = _Lengths(heard, signs, prior)
    return search.settle(1.0), search.settle(-1.0)


def _row_signs(heard: HeardBlocks) -> Tensor:
    """What each row says of its sign, (m,): from -1 to 1, and 0 where it says nothing; all of them may be reversed."""
    _, vectors = torch.linalg.eigh(heard.rows @ heard.rows.mT)
    signs = vectors[:, -1]
    for _ in range(TURNS):
        signs = heard.agreement(signs @ heard.rows)
        signs = signs / signs.norm().clamp(min=1e-30)
    blocks = heard.blocks.amax(dim=1) - torch.where(heard.blocks > 0, heard.blocks, heard.blocks.max()).amin(dim=1) + 1
    silence = blocks[heard.phases] * float(log_mgf(heard.length, heard.kappa))
    for _ in range(WEIGHED):
        exponents = heard.kappa * heard.agreement(signs @ heard.rows)
        size = exponents.abs()
        told = (1 - (-2 * size).exp()) / (1 + (-2 * size).exp() + (silence - size).clamp(max=700).exp())
        signs = told * exponents.sign() if bool((told > 0.5).any()) else signs
    return signs


class _Lengths:
    """The search for the lengths of the image's parts, and what is left of the noise in their directions."""

    def __init__(self, heard: HeardBlocks, signs: Tensor, prior: GaussianPrior) -> None:
        self._heard = heard
        self._prior = prior
        self._sums = heard.sums(signs)
        self._rows = signs.new_zeros(len(heard.blocks)).index_add(0, heard.phases, signs.square())
        self._sizes = heard.parts.bincount().double()
        direction = self._sums.sum(dim=0)
        self._start = self._of_parts(direction).sqrt()
        self._unit = direction / self._start.clamp(min=1e-30)[heard.parts]

    def settle(self, sign: float) -> Filtered:
        """Search with the directions as they are (1.0) or all reversed (-1.0)."""
        prior, unit = self._prior, sign * self._unit
        energy = prior.mean.square().sum() + prior.variances.sum() + (prior.pixels - len(prior.variances)) * prior.rest
        lengths = self._start * (energy / self._start.square().sum().clamp(min=1e-30)).sqrt()
        value = 0.0
        for _ in range(FILTERS):
            _, noise = self._seen(sign, lengths[self._heard.parts] * unit)
            lengths, value = self._search(lengths, unit, _Filter(prior, noise))
        seen, noise = self._seen(sign, lengths[self._heard.parts] * unit)
        return Filtered(_Filter(prior, noise).image(seen), value)

    def _seen(self, sign: float, image: Tensor) -> tuple[Tensor, Tensor]:
        """What the rows say of each pixel, were the blocks as long as an image's, and the noise's variance: (P,)."""
        heard = self._heard
        factors = heard.cosine / heard.norms(image)
        precision = (self._rows[:, None] * factors.square()).sum(dim=0) / heard.across
        seen = sign * (factors * self._sums).sum(dim=0) / heard.across / precision.clamp(min=1 / UNSEEN)
        return torch.where(precision > 1 / UNSEEN, seen, self._prior.mean), 1 / precision.clamp(min=1 / UNSEEN)

    def _search(self, lengths: Tensor, unit: Tensor, noisy: "_Filter") -> tuple[Tensor, float]:
        """The most probable lengths, and minus the logarithm of their density but for a constant."""
        heard, sums = self._heard, self._sums * float((unit * self._unit).sum().sign())

        def surprise(logarithms: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            leaf = torch.from_numpy(logarithms).requires_grad_()
            image = leaf.exp()[heard.parts] * unit
            value = noisy.energy(image) / 2 - ((self._sizes - 1) * leaf).sum()
            if len(heard.blocks) > 1:
                value = value - heard.kappa * (sums * heard.directions(image)).sum()
            (gradient,) = torch.autograd.grad(value, leaf)
            return float(value.detach()), gradient.numpy()

        start = lengths.clamp(min=1e-6).log().numpy()
        found = minimize(surprise, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS})
        return torch.from_numpy(found.x).exp(), float(found.fun)

    def _of_parts(self, image: Tensor) -> Tensor:
        """The squared lengths of an image's parts."""
        return image.new_zeros(len(self._sizes)).index_add(0, self._heard.parts, image.square())


class _Filter:
    """The prior of images of which each pixel (P,) is seen through noise of its own variance.

    The covariance is diagonal but for as many directions as the prior tells apart (Woodbury).
    """

    def __init__(self, prior: GaussianPrior, noise: Tensor) -> None:
        self._prior, self._noise = prior, noise
        self._diagonal = prior.rest + noise
        scaled = prior.basis / self._diagonal[:, None]
        gains = prior.variances - prior.rest
        inner = torch.eye(len(gains), dtype=gains.dtype) + gains[:, None] * (prior.basis.mT @ scaled)
        self._left, self._right = scaled, torch.linalg.solve(inner, gains[:, None] * scaled.mT)

    def energy(self, seen: Tensor) -> Tensor:
        """The squared distance of what is seen (P,) from the mean in standard deviations; differentiable."""
        offset = seen - self._prior.mean
        return offset @ self._solve(offset)

    def image(self, seen: Tensor) -> Tensor:
        """The mean of the image (P,) given what is seen."""
        return seen - self._noise * self._solve(seen - self._prior.mean)

    def _solve(self, offset: Tensor) -> Tensor:
        return offset / self._diagonal - self._left @ (self._right @ offset)


def _block_norms(images: Tensor, blocks: Tensor) -> Tensor:
    """The length of the block that each pixel of images (n, P) is in; infinite where the number (n, P) is 0: none."""
    sums = images.new_zeros(len(images), int(blocks.max()) + 1)
    squares = sums.scatter_add(1, blocks, images.square()).gather(1, blocks)
    return torch.where(blocks > 0, squares.clamp(min=1e-60).sqrt(), torch.inf)
