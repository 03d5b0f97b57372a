"""The sum of one von Mises-Fisher draw an example, drawn exactly without drawing any of them in R^K.

Let mu_i = g_i / |g_i| be the directions of B gradients and y_i = t_i mu_i + a_i v_i their draws (see the module
``cosine``), with v_i uniform orthogonal to mu_i. Only s = sum_i y_i is released, and its law can be drawn from the
gradients' inner products alone. Let U be the span of the directions, of dimension r, and D = K - r.

- v_i is a normal vector orthogonal to mu_i over its length. The normal vector splits into independent parts: p_i inside
  U, r numbers, and a part outside, with squared length q_i^2 ~ chi^2(D) and a direction w_i uniform outside U. With
  R_i = sqrt(|p_i|^2 + q_i^2): v_i = (p_i + q_i w_i) / R_i.
- Inside U the sum is sum_i t_i mu_i + u, u = sum_i a_i p_i / R_i.
- Outside U it is sum_i l_i w_i, l_i = a_i q_i / R_i. Its direction is uniform and independent of its length rho; adding
  one w_i at a time, rho^2 becomes rho^2 + l_i^2 + 2 rho l_i x with x the cosine of a uniform direction in R^D.
- A uniform direction outside U is what one normal vector h in R^K has outside U, over its length.

With S the inner products of the directions, F such that Q = (mu_1 .. mu_B) F has orthonormal columns that span U, and
Q^T h from the inner products of h with the gradients, all of it is one combination of gradients plus a multiple of h. A
zero gradient has no direction: its draw is uniform, t_i = 0, a_i = 1, and its p_i is not made orthogonal to anything.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedpriv.gradients import Block, GradientOperator, Vector
from fedpriv.gradients.normal import standard_normal
from fedpriv.mechanisms.base import refuse_not_finite
from fedpriv.mechanisms.cosine import draw_cosines, draw_uniform_cosines
from fedpriv.mechanisms.span import Basis, spectral_basis, triangular_basis

__all__ = ["draw_sum", "group_size"]

# Smallest eigenvalue of the directions' inner products from which on their rounding in float32 does not matter: it
# tilts the basis by about 1e-6 over this.
CLEARLY_INDEPENDENT = 1e-2

# What a group of examples costs beside the inner products of its pairs, in multiplications of float64 in the same time:
# each coordinate of its normal vector, and the rest.
NORMAL_PRODUCTS = 100
GROUP_PRODUCTS = 24_000_000


@dataclass(frozen=True)
class Directions:
    """The n gradients that have a direction, scaled to length 1, as an operator on small vectors (float64, CPU).

    Attributes:
        gradients: the batch.
        block: the coordinates.
        present: (B,), which gradients are not zero.
        norms: (n,), of those.
    """

    gradients: GradientOperator
    block: Block | None
    present: Tensor
    norms: Tensor

    def combine(self, coefficients: Tensor) -> Vector:
        """Return the sum of the directions with coefficients (n,)."""
        return self.gradients.combine(self._weights(coefficients), self.block)

    def add_combination(self, vector: Vector, scale: float, coefficients: Tensor) -> None:
        """Replace a vector by ``scale`` times itself plus the sum of the directions with coefficients (n,)."""
        self.gradients.add_combination(vector, scale, self._weights(coefficients), self.block)

    def dot(self, vector: Vector) -> Tensor:
        """Return the inner products of the directions with a vector, (n,)."""
        return self.gradients.dot(vector, self.block).cpu().double()[self.present] / self.norms

    def _weights(self, coefficients: Tensor) -> Tensor:
        """The weights (B,) of the gradients that belong to coefficients (n,) of the directions."""
        weights = torch.zeros(self.gradients.examples, dtype=torch.float64)
        weights[self.present] = coefficients / self.norms
        return weights.to(self.gradients.device, self.gradients.dtype)


class Parts(NamedTuple):
    """The sum of a batch's draws, in three parts.

    Attributes:
        along: (n,), coefficients of the directions.
        inside: (r,), what is orthogonal to each draw's own direction but in their span, in its basis.
        outside: the length of what is outside the span.
    """

    along: Tensor
    inside: Tensor
    outside: float


def draw_sum(
    gradients: GradientOperator,
    kappa: float,
    scale: float,
    block: Block | None,
    generator: torch.Generator,
    rng: np.random.Generator,
) -> Vector:
    """Draw ``scale`` times the sum over the batch of VMF(g_i / |g_i|, kappa).

    A gradient counts as zero, and gets a uniform direction, when its norm is below the smallest normal number over the
    precision of its type (1e-31 in float32), where its direction is lost to rounding. The K-sized vectors are in the
    gradients' type and on their device, the B x B work is in float64 on the CPU.

    Args:
        gradients: the batch; the sum over an empty one is zero.
        kappa: concentration, at least 0.
        scale: factor of the result.
        block: the coordinates; ``None``: all.
        generator: for the normal numbers, K and at most B x B, all in the gradients' type.
        rng: for the cosines and the other numbers of size B (torch has no Beta or chi^2 draws that take a generator).

    Raises:
        ValueError: a gradient is not finite.
    """
    first, *others = _groups(gradients, block)
    total = _draw_group(first, kappa, scale, block, generator, rng)
    for group in others:
        vector = _draw_group(group, kappa, scale, block, generator, rng)
        for name, value in total.items():
            value += vector[name]
    return total


def group_size(gradients: GradientOperator, block: Block | None) -> int:
    """Return the size of groups of examples with which drawing their sums one by one takes about the least time.

    The inner products of B directions take B^2 / 2 times those of a pair, a sum of draws takes a normal vector: with
    G groups the first fall to B^2 / (2 G), the second become G. The sums are independent, so their sum is the batch's.
    """
    each = NORMAL_PRODUCTS * gradients.dimension(block) + GROUP_PRODUCTS
    return max(1, round(math.sqrt(2 * each / max(1, gradients.pair_products(block)))))


def _groups(gradients: GradientOperator, block: Block | None) -> list[GradientOperator]:
    """Cut a batch into groups of nearly equal sizes."""
    number = math.ceil(gradients.examples / group_size(gradients, block))
    if number <= 1:
        return [gradients]
    ends = [index * gradients.examples // number for index in range(number + 1)]
    return [gradients.part(start, stop) for start, stop in pairwise(ends)]


def _draw_group(
    gradients: GradientOperator,
    kappa: float,
    scale: float,
    block: Block | None,
    generator: torch.Generator,
    rng: np.random.Generator,
) -> Vector:
    """Draw the sum of all directions at once; arguments as for :func:`draw_sum`."""
    directions, basis = _directions(gradients, block)
    dimension = gradients.dimension(block)
    numbers = standard_normal(basis.rank * gradients.examples + dimension, generator, gradients.dtype)
    inside, everywhere = numbers.split([basis.rank * gradients.examples, dimension])
    parts = _draw_parts(basis, kappa, dimension, inside.cpu().double().view(basis.rank, gradients.examples), rng)
    coefficients = parts.along + basis.combination @ parts.inside
    if dimension == basis.rank:
        return directions.combine(scale * coefficients)
    vector, correction, length = _made_outside(directions, basis, gradients.vector(everywhere, block))
    stretch = parts.outside / length
    directions.add_combination(vector, scale * stretch, scale * (coefficients + stretch * correction))
    return vector


def _directions(gradients: GradientOperator, block: Block | None) -> tuple[Directions, Basis]:
    """Scale the gradients to length 1 and find a basis of their span.

    Inner products in the gradients' own type do when the directions are clearly independent; if not, or if a gradient
    is too small or too large to be squared, they are computed again in float64.
    """
    limits, dimension = torch.finfo(gradients.dtype), gradients.dimension(block)
    gram = gradients.gram(block, precise=False).cpu()
    squared = gram.diagonal()
    if bool(((squared > limits.tiny / limits.eps) & (squared < limits.max)).all()) and gradients.examples <= dimension:
        norms = squared.sqrt()
        basis = triangular_basis(gram / norms / norms[:, None], CLEARLY_INDEPENDENT)
        if basis is not None:
            return Directions(gradients, block, torch.ones(gradients.examples, dtype=torch.bool), norms), basis

    gram = gradients.gram(block).cpu()
    refuse_not_finite(gram.diagonal(), gradients)
    lengths = gram.diagonal().sqrt()
    present = lengths > limits.tiny / limits.eps
    norms = lengths[present]
    similarity = gram[present][:, present] / norms / norms[:, None]
    # The large vectors are combined in the gradients' type: basis vectors have an error of eps / sqrt(eigenvalue).
    least = max(limits.eps, len(norms) * torch.finfo(torch.float64).eps)
    basis = triangular_basis(similarity, least) if len(norms) <= dimension else None
    if basis is None:
        basis = spectral_basis(similarity, dimension, least)
    return Directions(gradients, block, present, norms), basis


def _draw_parts(basis: Basis, kappa: float, dimension: int, normal: Tensor, rng: np.random.Generator) -> Parts:
    """Draw all numbers but the direction outside the span; zero gradients come after those with a direction.

    Args:
        basis: of the span, of dimension r.
        kappa: concentration.
        dimension: K.
        normal: standard normal numbers, (r, B); overwritten.
        rng: for all others.
    """
    rank, present = basis.coordinates.shape
    examples = normal.shape[1]
    cosines = draw_cosines(kappa, dimension, present, rng)
    along, sines = torch.from_numpy(cosines.cosine), torch.ones(examples, dtype=torch.float64)
    sines[:present] = torch.from_numpy(cosines.sine)

    own = (normal[:, :present] * basis.coordinates).sum(dim=0)
    normal[:, :present] -= own * basis.coordinates
    free = dimension - rank
    outside = torch.from_numpy(rng.chisquare(free, examples)) if free else torch.zeros(examples, dtype=torch.float64)
    squared = normal.square().sum(dim=0) + outside
    # In one dimension nothing is orthogonal to a direction: the sine is 0, and so may be the length that divides it.
    shares = torch.where(sines > 0, sines / squared.sqrt(), 0.0)
    lengths = (shares * outside.sqrt()).tolist()
    return Parts(along, normal @ shares, _walk(lengths, free, rng))


def _walk(lengths: list[float], dimension: int, rng: np.random.Generator) -> float:
    """Draw the length of a sum of vectors of given lengths and independent uniform directions in R^dimension."""
    if not dimension:
        return 0.0
    squared = 0.0
    for length, cosine in zip(lengths, draw_uniform_cosines(dimension, len(lengths), rng).tolist(), strict=True):
        squared = max(0.0, squared + length**2 + 2 * math.sqrt(squared) * length * cosine)
    return math.sqrt(squared)


def _made_outside(directions: Directions, basis: Basis, vector: Vector) -> tuple[Vector, Tensor, float]:
    """Take a vector's part outside the span: the vector plus a correction in the span.

    Returns:
        The vector, perhaps changed, the coefficients (n,) of the directions to add to it, and the length of the sum.
    """
    inner = basis.combination.T @ directions.dot(vector)
    whole = _squared_length(vector)
    rest = whole - float(inner.square().sum())
    correction = -(basis.combination @ inner)
    if rest > whole / 2:
        return vector, correction, math.sqrt(rest)
    # The span is most of the space: subtracting cancels, so it is done on the vector itself, twice (Kahan: twice is
    # enough), and the length is measured.
    directions.add_combination(vector, 1.0, correction)
    directions.add_combination(vector, 1.0, -(basis.combination @ (basis.combination.T @ directions.dot(vector))))
    return vector, torch.zeros_like(correction), math.sqrt(_squared_length(vector))


def _squared_length(vector: Vector) -> float:
    return sum(float(torch.linalg.vector_norm(value)) ** 2 for value in vector.values())
