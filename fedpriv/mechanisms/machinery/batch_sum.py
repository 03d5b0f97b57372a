"""The sum of one von Mises-Fisher draw an example, drawn exactly without drawing any of them in R^K.

Let mu_i = g_i / |g_i| be the directions of B gradients and y_i = t_i mu_i + a_i v_i their draws (see the module
``cosine``), with v_i uniform orthogonal to mu_i. Only s = sum_i y_i is released, and its law can be drawn from the
gradients' inner products alone. Let U be the span of the directions, of dimension r, and D = K - r.

- v_i is a normal vector orthogonal to mu_i over its length. The normal vector splits into independent parts: p_i inside
  U, r numbers, and a part outside, with squared length q_i^2 ~ chi^2(D) and a direction w_i uniform outside U. With
  R_i = sqrt(|p_i|^2 + q_i^2): v_i = (p_i + q_i w_i) / R_i.
- Inside U the sum is sum_i t_i mu_i + u, u = sum_i a_i p_i / R_i.
- Outside U it is sum_i l_i w_i, l_i = a_i q_i / R_i. Its direction is uniform and independent of its length, and so are
  those of sums of some of them: two with lengths l and m have a sum of squared length l^2 + m^2 + 2 l m x, with x the
  cosine of a uniform direction in R^D.
- A uniform direction outside U is what one normal vector h in R^K has outside U, over its length.

With S the inner products of the directions, F such that Q = (mu_1 .. mu_B) F has orthonormal columns that span U, and
Q^T h from the inner products of h with the gradients, all of it is one combination of gradients plus a multiple of h. A
zero gradient has no direction: its draw is uniform, t_i = 0, a_i = 1, and its p_i is not made orthogonal to anything.

Where inner products are expensive a batch is cut into groups: sums of different examples are independent, so their sum
is the batch's. Groups of one size are worked on together, each tensor having a first axis of G.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedpriv.core.randomness import NoiseStream
from fedpriv.gradients import Block, GradientOperator, Vector
from fedpriv.gradients.normal import standard_normal
from fedpriv.gradients.norms import row_norms, within
from fedpriv.gradients.rounding import ACCURACY, LOST, SMALLEST_SIDE, roundoff
from fedpriv.mechanisms.machinery.cosine import Floats
from fedpriv.mechanisms.machinery.small_draws import SmallDraws, draw_small
from fedpriv.mechanisms.machinery.span import Basis, spectral_basis, triangular_basis

# Smallest eigenvalue of the directions' inner products from which on their rounding in float32 does not matter: it
# tilts the basis by about 1e-6 over this.
CLEARLY_INDEPENDENT = 1e-2

# Smallest eigenvalue of inner products in float64 that counts. They are off by 1e-15 to 1e-14, which tilts the basis by
# that over this; what is left out is below the root of this.
CLOSE = 1e-9

# The error of basis vectors that is allowed for where gradients are sums that are rounded by more than their type.
TILT = 1e-2

# What a group of examples costs next to the inner products of its pairs, in multiplications of float64 in the same
# time: each coordinate of its normal vector, and the rest.
NORMAL_PRODUCTS = 100
GROUP_PRODUCTS = 500_000


@dataclass(frozen=True)
class Directions:
    """The directions of the gradients of G groups of b examples, as an operator on small vectors (float64, CPU).

    Attributes:
        gradients: of all groups, one after the other.
        block: the coordinates.
        scales: (G, b), by which the gradients are scaled to length 1; 0 for those that have no direction.
    """

    gradients: GradientOperator
    block: Block | None
    scales: Tensor

    def combine(self, coefficients: Tensor) -> Vector:
        """Return the sum of the directions of all groups with coefficients (G, b)."""
        return self.gradients.combine(self._weights(coefficients), self.block)

    def add_combination(self, vector: Vector, scale: float, coefficients: Tensor) -> None:
        """Replace a vector by ``scale`` times itself plus the sum of all directions with coefficients (G, b)."""
        self.gradients.add_combination(vector, scale, self._weights(coefficients), self.block)

    def dots(self, vectors: Vector) -> Tensor:
        """Return the inner products of each group's directions with its vector, (G, b), of vectors (G, *shape)."""
        return self.gradients.dots(vectors, self.block).cpu().double() * self.scales

    def group(self, index: int) -> "Directions":
        """Return those of one group."""
        size = self.scales.shape[1]
        gradients = self.gradients.part(index * size, (index + 1) * size)
        return Directions(gradients, self.block, self.scales[index : index + 1])

    def _weights(self, coefficients: Tensor) -> Tensor:
        """The weights of the gradients, (B,), that belong to coefficients (G, b) of the directions."""
        return (coefficients * self.scales).view(-1).to(self.gradients.device, self.gradients.dtype)


class Parts(NamedTuple):
    """The sums of the draws of G groups, each in three parts.

    Attributes:
        along: (G, b), coefficients of the directions.
        inside: (G, r), what is orthogonal to each draw's own direction but in their span, in its basis.
        outside: (G,), the length of what is outside the span.
    """

    along: Tensor
    inside: Tensor
    outside: Tensor


class Outside(NamedTuple):
    """A vector outside the span of each of G groups, uniform in direction: ``numbers`` and a correction in the span.

    Attributes:
        numbers: (G, K).
        correction: (G, b), coefficients of the directions to be added.
        lengths: (G,), of the sums.
    """

    numbers: Tensor
    correction: Tensor
    lengths: Tensor


def draw_sum(
    gradients: GradientOperator,
    kappa: float,
    scale: float,
    block: Block | None,
    noise: NoiseStream,
    rng: np.random.Generator,
) -> Vector:
    """Draw ``scale`` times the sum over the batch of VMF(g_i / |g_i|, kappa).

    A gradient counts as zero, and gets a uniform direction, when its direction is lost to rounding (see
    ``_shortest``). The K-sized vectors are in the gradients' type and on their device, the small work is in float64 on
    the CPU.
    """
    parts = cut_groups(gradients, block)
    return _added(_draw_groups(part, groups, kappa, scale, block, noise, rng) for part, groups in parts)


def group_size(gradients: GradientOperator, block: Block | None) -> int:
    """Return the size of groups of examples with which drawing their sums takes about the least time: a power of 2.

    A group of b examples takes b^2 times the inner product of a pair, and a normal vector.
    """
    each = NORMAL_PRODUCTS * gradients.dimension(block) + GROUP_PRODUCTS
    pair = max(1, gradients.pair_products(block, precise=False))
    return 1 << max(0, round(math.log2(each / pair) / 2))


def cut_groups(gradients: GradientOperator, block: Block | None) -> list[tuple[GradientOperator, int]]:
    """Cut a batch into some that consist of groups of one size, their normal vectors small enough; the last is less.

    Returns:
        Gradients and how many groups they are.
    """
    size, examples = group_size(gradients, block), gradients.examples
    bytes_each = gradients.dimension(block) * gradients.dtype.itemsize
    together = size * max(1, min(examples // size, gradients.chunk_bytes // max(1, bytes_each)))
    if together >= examples:
        return [(gradients, max(1, examples // size))]
    whole = examples - examples % size
    cut = [(start, min(start + together, whole)) for start in range(0, whole, together)]
    parts = [(gradients.part(start, stop), (stop - start) // size) for start, stop in cut]
    return parts if whole == examples else [*parts, (gradients.part(whole, examples), 1)]


def _added(sums: Iterator[Vector]) -> Vector:
    """The sum of vectors, one after the other, in the first of them."""
    total = next(sums)
    for vector in sums:
        for name, value in total.items():
            value += vector[name]
    return total


def _draw_groups(
    gradients: GradientOperator,
    groups: int,
    kappa: float,
    scale: float,
    block: Block | None,
    noise: NoiseStream,
    rng: np.random.Generator,
) -> Vector:
    """Draw the sum of the draws of groups of one size; the other arguments as for :func:`draw_sum`."""
    size, spanned = gradients.examples // groups, directions_of(gradients, groups, block)
    if spanned is None:
        step = size if groups > 1 else 1
        each = (gradients.part(start, start + step) for start in range(0, gradients.examples, step))
        return _added(_draw_groups(group, 1, kappa, scale, block, noise, rng) for group in each)
    directions, basis = spanned
    dimension, small = gradients.dimension(block), basis.rank * gradients.examples
    drawn = standard_normal(small + groups * dimension, noise, gradients.dtype, gradients.device)
    normal = drawn[:small].cpu().double().view(groups, basis.rank, size)
    draws = draw_small(kappa, dimension, basis.rank, (groups, size), rng)
    parts = made_parts(basis, directions.scales > 0, normal, draws)
    coefficients = parts.along + times(basis.combination, parts.inside)
    if dimension == basis.rank:
        return directions.combine(scale * coefficients)
    outside = made_outside(directions, basis, drawn[small:].view(groups, dimension))
    stretch = parts.outside / outside.lengths
    numbers, factor = _combined(outside.numbers, stretch)
    total = gradients.vector(numbers, block)
    directions.add_combination(total, scale * factor, scale * (coefficients + stretch[:, None] * outside.correction))
    return total


def _combined(numbers: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """The sum of vectors (G, K) with weights (G,), as a vector and a factor; a single one is left as it is."""
    return (numbers[0], float(weights[0])) if len(numbers) == 1 else (weights.to(numbers) @ numbers, 1.0)


def directions_of(gradients: GradientOperator, groups: int, block: Block | None) -> tuple[Directions, Basis] | None:
    """Scale the gradients to length 1 and find bases of their spans; ``None`` if that takes smaller groups.

    Inner products in the gradients' own type do when the directions are clearly independent. If not, or if a gradient
    is too small or too large to be squared, they are computed in float64; at once where most gradients are written out.
    """
    limits, dimension = torch.finfo(gradients.dtype), gradients.dimension(block)
    roundings = gradients.roundings(block).cpu().double().view(groups, -1)
    shortest = _shortest(gradients, block).view(groups, -1)
    if gradients.examples // groups <= dimension and 2 * gradients.pair_products(block, precise=False) < dimension:
        grams = gradients.grams(groups, block, precise=False).cpu()
        squared = grams.diagonal(dim1=1, dim2=2)
        if _clear(squared, limits) and bool((squared > 2 * shortest.square()).all()):
            scales = squared.rsqrt()
            basis = triangular_basis(_similarity(grams, scales), CLEARLY_INDEPENDENT)
            if basis is not None:
                return Directions(gradients, block, scales), basis

    grams = gradients.grams(groups, block).cpu()
    # Rounding may leave less than 0 where a gradient cancels.
    lengths = grams.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    scales = torch.where(lengths > shortest, 1 / lengths, 0.0)
    similarity = _similarity(grams, scales)
    size, blur = scales.shape[1], float((roundings * scales).amax()) if scales.numel() else 0.0
    # The large vectors are combined in the gradients' type: basis vectors have an error of eps / sqrt(eigenvalue), and
    # of blur / sqrt(eigenvalue) where gradients are kept as sums.
    least = max(limits.eps, CLOSE, (blur / TILT) ** 2)
    basis = triangular_basis(similarity, least) if size <= dimension else None
    if basis is None and groups == 1 and (size <= 1 or blur < limits.eps):
        basis = spectral_basis(similarity[0], dimension, least)
    return None if basis is None else (Directions(gradients, block, scales), basis)


def _shortest(gradients: GradientOperator, block: Block | None) -> Tensor:
    """The lengths, (B,), up to which a gradient has no direction; each depends on its own gradient alone.

    - The smallest normal number over the precision of the gradients' type (1e-31 in float32): less loses digits. What
      cannot be squared in float64 (1e-146) is no less.
    - LOST roundings of what is summed to make the gradient: of such a sum nothing may be left but rounding errors. So
      it is with what a normalisation makes of a bias before it.
    - What rounding may add to the gradient where it is combined, over ACCURACY: what is combined of a gradient with a
      direction has the length 1 within ACCURACY.
    """
    limits = torch.finfo(gradients.dtype)
    magnitudes, roundings = (
        values.cpu().double() for values in (gradients.magnitudes(block), gradients.roundings(block))
    )
    lost = torch.maximum(LOST * roundoff(gradients.dtype) * magnitudes, roundings / ACCURACY)
    return lost.clamp(min=max(limits.tiny / limits.eps, SMALLEST_SIDE))


def _clear(squared: Tensor, limits: torch.finfo) -> bool:
    """Whether no squared norm lost digits or is infinite or NaN."""
    return not squared.numel() or within(squared, limits.tiny / limits.eps, limits.max)


def _similarity(grams: Tensor, scales: Tensor) -> Tensor:
    """The inner products (G, b, b) of vectors scaled by (G, b)."""
    return (grams * scales[:, :, None]).mul_(scales[:, None])


def made_parts(basis: Basis, present: Tensor, normal: Tensor, draws: SmallDraws) -> Parts:
    """Make the parts of all sums of what was drawn.

    Args:
        present: (G, b), which gradients have a direction.
        normal: standard normal numbers, (G, r, b); overwritten.
    """
    cosine, sine, outside = (torch.from_numpy(values) for values in draws[:3])
    along = torch.where(present, cosine, 0.0)
    sines = torch.where(present, sine, 1.0)

    # The coordinates of a gradient without a direction are zeros.
    own = (normal * basis.coordinates).sum(dim=1, keepdim=True)
    normal.addcmul_(own, basis.coordinates, value=-1)
    squared = torch.linalg.vector_norm(normal, dim=1).square() + outside
    # In one dimension nothing is orthogonal to a direction: the sine is 0, and so may be the length that divides it.
    shares = torch.where(sines > 0, sines / squared.sqrt(), 0.0)
    lengths = _walk((shares * outside.sqrt()).numpy(), draws.turns)
    return Parts(along, times(normal, shares), torch.from_numpy(lengths))


def _walk(lengths: Floats, cosines: Floats) -> Floats:
    """Return the lengths (G,) of sums of vectors of given lengths (G, b) and independent directions.

    The directions are uniform, and so are those of sums: two of them at a time become one.

    Args:
        cosines: of uniform directions of the space, (G, b - 1); none where it has no dimension.
    """
    while lengths.shape[1] > 1 and cosines.size:
        pairs = lengths.shape[1] // 2
        left, right, single = lengths[:, :pairs], lengths[:, pairs : 2 * pairs], lengths[:, 2 * pairs :]
        squared = left**2 + right**2 + 2 * left * right * cosines[:, :pairs]
        lengths = np.concatenate([np.sqrt(np.maximum(squared, 0)), single], axis=1)
        cosines = cosines[:, pairs:]
    summed: Floats = lengths.sum(axis=1)
    return summed


def made_outside(directions: Directions, basis: Basis, numbers: Tensor) -> Outside:
    """Take the parts of vectors, numbers (G, K), outside the spans; the numbers are overwritten."""
    gradients, block = directions.gradients, directions.block
    inner = times(basis.combination.mT, directions.dots(gradients.vector(numbers, block)))
    whole = row_norms(numbers).cpu().double().square()
    rest = whole - inner.square().sum(dim=1)
    correction, lengths = -times(basis.combination, inner), rest.clamp(min=0).sqrt()
    for index in torch.nonzero(rest <= whole / 2)[:, 0].tolist():
        # The span is most of the space: subtracting cancels, so it is done on the vector itself, twice (Kahan: twice is
        # enough), and the length is measured.
        group, combination = directions.group(index), basis.combination[index : index + 1]
        vector = gradients.vector(numbers[index], block)
        group.add_combination(vector, 1.0, correction[index : index + 1])
        again = group.dots({name: value[None] for name, value in vector.items()})
        group.add_combination(vector, 1.0, -times(combination, times(combination.mT, again)))
        correction[index], lengths[index] = 0, float(row_norms(numbers[index : index + 1]))
    return Outside(numbers, correction, lengths)


def times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Products of matrices (G, n, m) and vectors (G, m): (G, n)."""
    return torch.bmm(matrices, vectors[..., None])[..., 0]
