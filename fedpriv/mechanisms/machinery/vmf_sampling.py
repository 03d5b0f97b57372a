"""Sampling from the von Mises-Fisher distribution: exact draws, and exact sums of one draw an example.

A draw y ~ VMF(mu, kappa) on the unit sphere of R^K is t mu + sqrt(1 - t^2) v, with v uniform on the unit sphere
orthogonal to mu and t, the cosine, of density proportional to exp(kappa t) (1 - t^2)^((K - 3) / 2) on [-1, 1].
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.randomness import NoiseStream
from fedpriv.gradients import Block, GradientOperator, StackedGradients, Vector
from fedpriv.gradients.normal import fill_normal, standard_normal
from fedpriv.gradients.numerics import ACCURACY, LOST, SMALLEST_SIDE, lost, roundoff, row_norms, within

Floats = NDArray[np.float64]

# Steps of the recurrence in mean_cosine: it contracts by about exp(-STEPS^2 / kappa) and starts with a relative error
# of about STEPS^2 / kappa^3, so the product of the two is below 1e-13 for every kappa.
RECURRENCE_STEPS = 2000


@dataclass(frozen=True)
class Draws:
    """What the draws of a batch are made with."""

    kappa: float  # their concentration
    scale: float  # of their sum
    noise: NoiseStream  # normal numbers come from
    rng: np.random.Generator  # all other random numbers come from


class Cosines(NamedTuple):
    """Cosines of draws with their mean direction and the sines that belong to them, each of shape (count,)."""

    cosine: Floats
    sine: Floats


def draw_cosines(
    kappa: float, dimension: int, count: int, rng: np.random.Generator, proposals: Cosines | None = None
) -> Cosines:
    """Draw cosines by rejection (Wood 1994, Simulation of the von Mises-Fisher distribution), all at once.

    Wood's proposal is t = (y + x0) / (1 + x0 y) with y the cosine of a uniform direction and x0 = (1 - b) / (1 + b).
    In terms of y nothing cancels, so the draws hold for dimensions up to 1e8 and kappa up to 1e7: accepted is what has
    kappa (t - x0) - (K - 1) log(1 + x0 y) above the logarithm of a uniform number; the sine has its own formula.

    Of the proposals a share of 1 is accepted at kappa = 0. With growing kappa it falls, towards
    (e / 2d)^(d/2) Gamma(d) / Gamma(d/2), d = K - 1: from 0.658 (K = 2) to 0.707 (K large), nowhere less;
    measured for K from 2 to 1e8 and kappa from 0 to 1e7 (K = 15,826: 0.998 at kappa = 1e3, 0.90 at 1e4, 0.73 at 1e5).
    """
    if dimension == 1:
        same = rng.random(count) < 1 / (1 + math.exp(-2 * kappa))
        return Cosines(np.where(same, 1.0, -1.0), np.zeros(count))
    drawn, accepted = _try(kappa, dimension, proposals or _uniform(dimension, count, rng), rng)
    open_ = np.flatnonzero(~accepted)
    while open_.size:
        again, accepted = _try(kappa, dimension, _uniform(dimension, open_.size, rng), rng)
        drawn.cosine[open_], drawn.sine[open_] = again
        open_ = open_[~accepted]
    return drawn


def draw_uniform_cosines(dimension: int, count: int, rng: np.random.Generator) -> Floats:
    """Draw cosines between a fixed and a uniform direction in R^dimension, dimension at least 1; shape (count,)."""
    if dimension == 1:
        return np.where(rng.random(count) < 0.5, 1.0, -1.0)
    return _uniform(dimension, count, rng).cosine


def draw_uniform_length(dimension: int, count: int, rng: np.random.Generator) -> float:
    """Draw the length of the sum of so many uniform directions in R^dimension; its own direction is uniform, too."""
    if count < 2:
        return float(count)
    turns = draw_uniform_cosines(dimension, count - 1, rng)
    return float(_walk(np.ones((1, count)), turns[None])[0])


def wood_parameter(kappa: float, dimension: int) -> float:
    """Return Wood's b: 1 at kappa = 0, and towards 0 as kappa grows; for dimension at least 2."""
    d = dimension - 1
    return d / (2 * kappa + math.hypot(2 * kappa, d))


def _try(
    kappa: float, dimension: int, proposals: Cosines, rng: np.random.Generator
) -> tuple[Cosines, NDArray[np.bool_]]:
    """What proposals y become, and which of them are accepted."""
    y, half_chord = proposals
    d = dimension - 1
    b = wood_parameter(kappa, dimension)
    x0 = (1 - b) / (1 + b)
    stretch = 1 + x0 * y
    height = 4 * kappa * b * y / ((1 + b) ** 2 * stretch) - d * np.log1p(x0 * y)
    accepted = height >= -rng.standard_exponential(len(y))
    return Cosines((x0 + y) / stretch, 2 * math.sqrt(b) / (1 + b) * half_chord / stretch), accepted


def _uniform(dimension: int, count: int, rng: np.random.Generator) -> Cosines:
    """Cosines y = 1 - 2 Beta(d/2, d/2) of uniform directions, d = dimension - 1 >= 1, and sqrt(1 - y^2)."""
    gammas = rng.standard_gamma((dimension - 1) / 2, size=(2, count))
    total = gammas[0] + gammas[1]
    return Cosines((gammas[0] - gammas[1]) / total, 2 * np.sqrt(gammas[0] * gammas[1]) / total)


@lru_cache(maxsize=1024)
def mean_cosine(kappa: float, dimension: int) -> float:
    """Return A_K(kappa) = I_{K/2}(kappa) / I_{K/2-1}(kappa), the mean of the cosine; between 0 and 1.

    The ratio R_v = I_{v+1} / I_v obeys 1 / R_v = 2 (v + 1) / kappa + R_{v+1} (DLMF 10.29.1). Downwards the recurrence
    contracts; it starts at a large v with the upper bound of Simpson and Spector (1984).
    """
    if kappa == 0:
        return 0.0
    order = dimension / 2 - 1
    last = order + RECURRENCE_STEPS
    ratio = kappa / (last + 0.5 + math.sqrt(kappa**2 + (last + 0.5) * (last + 1.5)))
    for step in range(RECURRENCE_STEPS, 0, -1):
        ratio = kappa / (2 * (order + step) + kappa * ratio)
    return ratio


# Orthonormal bases of the spans of groups of directions, from nothing but their inner products.
#
# Any basis serves. When the directions are far enough from being dependent, the Cholesky factor L of their inner
# products gives one (the columns of M' L^{-T}, as in the QR decomposition), ten times faster than eigenvectors do.
# Otherwise the eigenvectors tell what is to be left out.


class Basis(NamedTuple):
    """Bases of the spans of G groups of n vectors of length 1 or 0, all of one dimension r; float64, on the CPU."""

    coordinates: Tensor  # (G, r, n); column i holds vector i in the group's basis, of length 1 or 0
    combination: Tensor  # (G, n, r); basis vector j of a group is the sum over i of entry (i, j) times vector i

    @property
    def rank(self) -> int:
        """The dimension r of the spans."""
        return self.coordinates.shape[1]


def triangular_basis(similarity: Tensor, least: float) -> Basis | None:
    """Return bases of the spans of groups of unit vectors with products (G, n, n); ``None``: nearly dependent."""
    factor, failed = torch.linalg.cholesky_ex(similarity)
    # No eigenvalue is below the smallest by much, but some square on the diagonal may be: then there is no proof.
    if failed.any() or (factor.numel() and not float(factor.diagonal(dim1=1, dim2=2).min()) ** 2 >= least):
        return None
    identity = torch.eye(factor.shape[2], dtype=similarity.dtype)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    if inverse.numel():
        columns, rows = (torch.linalg.vector_norm(inverse, ord=1, dim=axis).amax(dim=1) for axis in (1, 2))
        if not float((columns * rows).max()) * least <= 1:
            return None
    return Basis(factor.mT, inverse.mT)


def spectral_basis(similarity: Tensor, dimension: int, least: float) -> Basis:
    """Return a basis of the span of unit vectors, dependent or not, and of zeros, with products (n, n)."""
    values, vectors = _eigenvectors(similarity)
    # An eigenvector's sign is the library's to choose, by rounding errors; another sign would make other draws. Its
    # product with a vector that is orthogonal to none by design decides instead.
    generic = torch.arange(1, len(values) + 1, dtype=vectors.dtype, device=vectors.device).sqrt()
    vectors = torch.where(generic @ vectors < 0, -vectors, vectors)
    kept = values >= least
    kept[: max(0, len(values) - dimension)] = False
    roots = values[kept].sqrt()
    coordinates = roots[:, None] * vectors[:, kept].T
    directions = coordinates / torch.linalg.vector_norm(coordinates, dim=0)
    # Rounding leaves something of a vector of zeros: it must not become a direction.
    present = similarity.diagonal() > 0
    return Basis(torch.where(present, directions, 0.0)[None], (vectors[:, kept] / roots)[None])


def _eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of a symmetric matrix; by QR where divide and conquer fails."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        from scipy.linalg import eigh  # a client that never gets here does without SciPy

        values, vectors = map(torch.from_numpy, eigh(matrix.numpy(), driver="ev"))
    return values, vectors


# What the sum of a batch's von Mises-Fisher draws takes of random numbers beside the normal ones.


class SmallDraws(NamedTuple):
    """What is drawn for G groups of b examples in R^K beside the normal numbers, r dimensions inside the spans."""

    cosine: Floats  # of each draw with its direction, (G, b)
    sine: Floats  # that belongs to it, (G, b)
    outside: Floats  # squared lengths outside the spans, (G, b), from chi^2(K - r)
    turns: Floats  # cosines of uniform directions in R^(K - r), (G, b - 1); none where that has no dimension


def draw_small(kappa: float, dimension: int, rank: int, shape: tuple[int, int], rng: np.random.Generator) -> SmallDraws:
    """Draw all numbers of the size of the batch but the normal ones."""
    free, (groups, examples) = dimension - rank, shape
    cosines = draw_cosines(kappa, dimension, groups * examples, rng)
    outside = rng.chisquare(free, shape) if free else np.zeros(shape)
    turns = draw_uniform_cosines(free, groups * (examples - 1), rng) if free and examples else np.zeros(0)
    return SmallDraws(cosines.cosine.reshape(shape), cosines.sine.reshape(shape), outside, turns.reshape(groups, -1))


# The sum of one von Mises-Fisher draw an example, drawn exactly without drawing any of them in R^K.
#
# Let mu_i = g_i / |g_i| be the directions of B gradients and y_i = t_i mu_i + a_i v_i their draws, with
# v_i uniform orthogonal to mu_i. Only s = sum_i y_i is released, and its law can be drawn from the
# gradients' inner products alone. Let U be the span of the directions, of dimension r, and D = K - r.
#
# - v_i is a normal vector orthogonal to mu_i over its length. The normal vector splits into independent parts: p_i
#   inside U, r numbers, and a part outside, with squared length q_i^2 ~ chi^2(D) and a direction w_i uniform outside U.
#   With R_i = sqrt(|p_i|^2 + q_i^2): v_i = (p_i + q_i w_i) / R_i.
# - Inside U the sum is sum_i t_i mu_i + u, u = sum_i a_i p_i / R_i.
# - Outside U it is sum_i l_i w_i, l_i = a_i q_i / R_i. Its direction is uniform and independent of its length, and so
#   are those of sums of some of them: two with lengths l and m have a sum of squared length l^2 + m^2 + 2 l m x, with x
#   the cosine of a uniform direction in R^D.
# - A uniform direction outside U is what one normal vector h in R^K has outside U, over its length.
#
# With S the inner products of the directions, F such that Q = (mu_1 .. mu_B) F has orthonormal columns that span U, and
# Q^T h from the inner products of h with the gradients, all of it is one combination of gradients plus a multiple of h.
# A zero gradient has no direction: its draw is uniform, t_i = 0, a_i = 1, and its p_i is not made orthogonal to
# anything. So it is with padding: the sum of uniform directions is one of them times its length, which is then a_i.
#
# Where inner products are expensive a batch is cut into groups: sums of different examples are independent, so their
# sum is the batch's. Groups of one size are worked on together, each tensor having a first axis of G.


# Smallest eigenvalue of the directions' inner products from which on their rounding in float32 does not matter: it
# tilts the basis by about 1e-6 over this.
CLEARLY_INDEPENDENT = 1e-2

# Of so many numbers all inner products take no longer in float64 than a try in float32 before them.
AT_ONCE = 1 << 17

# Smallest eigenvalue of inner products in float64 that counts. They are off by 1e-15 to 1e-14, which tilts the basis by
# that over this; what is left out is below the root of this.
CLOSE = 1e-9

# The error of basis vectors that is allowed for where gradients are sums that are rounded by more than their type.
TILT = 1e-2

# What a group of examples costs next to the inner products of its pairs, in multiplications of float64 in the same
# time: each coordinate of its normal vector, and the rest.
NORMAL_PRODUCTS = 100
GROUP_PRODUCTS = 500_000
# A last group that is smaller than the others is worked on by itself.
REST_PRODUCTS = 40_000_000


@dataclass(frozen=True)
class Directions:
    """The directions of the gradients of G groups of b examples, as an operator on small vectors (float64, CPU)."""

    gradients: GradientOperator  # of all groups, one after the other
    block: Block | None  # the coordinates
    scales: Tensor  # (G, b), by which the gradients are scaled to length 1; 0 for those that have no direction
    known: Tensor | None = None  # inner products (G, b) of the gradients with the vectors that will be asked for

    def combine(self, coefficients: Tensor) -> Vector:
        """Return the sum of the directions of all groups with coefficients (G, b)."""
        return self.gradients.combine(self._weights(coefficients), self.block)

    def add_combination(self, numbers: Tensor, scale: float, coefficients: Tensor) -> None:
        """Replace a vector (K,) by ``scale`` times itself plus the sum of all directions with coefficients (G, b)."""
        self.gradients.add_laid(numbers, scale, self._weights(coefficients), self.block)

    def dots(self, numbers: Tensor) -> Tensor:
        """Return the inner products of each group's directions with its vector, (G, b), of vectors (G, K)."""
        dots = self.gradients.dots_laid(numbers, self.block) if self.known is None else self.known
        return dots.cpu().double() * self.scales

    def group(self, index: int) -> "Directions":
        """Return those of one group."""
        size = self.scales.shape[1]
        gradients = self.gradients.part(index * size, (index + 1) * size)
        return Directions(gradients, self.block, self.scales[index : index + 1])

    def _weights(self, coefficients: Tensor) -> Tensor:
        """The weights of the gradients, (B,), that belong to coefficients (G, b) of the directions."""
        return (coefficients * self.scales).view(-1).to(self.gradients.device, self.gradients.dtype)


class Parts(NamedTuple):
    """The sums of the draws of G groups, each in three parts."""

    along: Tensor  # (G, b), coefficients of the directions
    inside: Tensor  # (G, r), what is orthogonal to each draw's own direction but in their span, in its basis
    outside: Tensor  # (G,), the length of what is outside the span


class Outside(NamedTuple):
    """A vector outside the span of each of G groups, uniform in direction: ``numbers`` and a correction in the span."""

    numbers: Tensor  # (G, K)
    correction: Tensor  # (G, b), coefficients of the directions to be added
    lengths: Tensor  # (G,), of the sums


def draw_sum(gradients: GradientOperator, block: Block | None, draws: Draws, padding: int = 0) -> Vector:
    """Draw ``scale`` times the sum over the batch of VMF(g_i / |g_i|, kappa), uniform where rounding lost g_i.

    ``padding``: so many uniform directions are in the sum, too. The K-sized vectors are in the gradients' type and on
    their device, the small work is in float64 on the CPU.
    """
    count, dimension = gradients.examples + padding, gradients.dimension(block)
    if count > 1 and not gradients.magnitudes(block).any():
        numbers = standard_normal(dimension, draws.noise, gradients.dtype, gradients.device)
        length = draw_uniform_length(dimension, count, draws.rng)
        return gradients.vector(numbers.mul_(draws.scale * length / float(row_norms(numbers[None]))), block)
    added, parts = draw_uniform_length(dimension, padding, draws.rng), cut_groups(gradients, block)
    lengths = [added] + [0.0] * (len(parts) - 1)
    drawn = zip(parts, lengths, strict=True)
    return _added(_draw_groups(*part, block, draws, length) for part, length in drawn)


def group_size(gradients: GradientOperator, block: Block | None) -> int:
    """Return the size of groups with which sums take least: b^2 products and a normal vector each."""
    pair = max(1, gradients.pair_products(block, precise=False))
    return _cheapest_size(gradients.examples, NORMAL_PRODUCTS * gradients.dimension(block) + GROUP_PRODUCTS, pair)


@lru_cache(maxsize=1024)
def _cheapest_size(examples: int, each: int, pair: int) -> int:
    sizes = np.arange(1, max(1, examples) + 1)
    groups, rest = np.divmod(float(examples), sizes)
    products = groups * (each + pair * sizes**2.0) + (rest > 0) * (each + REST_PRODUCTS + pair * rest**2)
    return int(sizes[np.argmin(products)])


def cut_groups(gradients: GradientOperator, block: Block | None) -> list[tuple[GradientOperator, int]]:
    """Cut a batch into some of so many groups of one size, their normal vectors small enough; the last is less."""
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


def _draw_groups(gradients: GradientOperator, groups: int, block: Block | None, draws: Draws, added: float) -> Vector:
    """Draw the sum of the draws of groups of one size, and of ``added`` times a uniform direction."""
    size, dimension = gradients.examples // groups, gradients.dimension(block)
    columns = size + (added > 0)
    # Numbers inside the spans for as many dimensions as these have at most: vectors go into the inner products.
    small = groups * size * columns
    numbers = standard_normal(small + groups * dimension, draws.noise, gradients.dtype, gradients.device)
    vectors = numbers[small:].view(groups, dimension)
    spanned = directions_of(gradients, groups, block, vectors)
    if spanned is None:
        del numbers, vectors  # each part draws its own
        step = size if groups > 1 else 1
        each = (gradients.part(start, start + step) for start in range(0, gradients.examples, step))
        lengths = chain([added], repeat(0.0))
        drawn = zip(each, lengths)  # noqa: B905 (the lengths have no end)
        return _added(_draw_groups(part, 1, block, draws, length) for part, length in drawn)
    directions, basis = spanned
    normal = numbers[: groups * basis.rank * columns].cpu().double().view(groups, basis.rank, columns)
    small_draws = draw_small(draws.kappa, dimension, basis.rank, (groups, columns), draws.rng)
    uniform = torch.zeros(groups, columns - size, dtype=torch.float64)
    uniform[:1] = added
    parts = made_parts(basis, directions.scales > 0, normal, small_draws, uniform)
    coefficients = parts.along + times(basis.combination, parts.inside)
    if dimension == basis.rank:
        return directions.combine(draws.scale * coefficients)
    outside = made_outside(directions, basis, vectors)
    stretch = parts.outside / outside.lengths
    numbers, factor = _combined(outside.numbers, stretch)
    coefficients = draws.scale * (coefficients + stretch[:, None] * outside.correction)
    directions.add_combination(numbers, draws.scale * factor, coefficients)
    return gradients.vector(numbers, block)


def _combined(numbers: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """The sum of vectors (G, K) with weights (G,), as a vector and a factor; a single one is left as it is."""
    return (numbers[0], float(weights[0])) if len(numbers) == 1 else (weights.to(numbers) @ numbers, 1.0)


def directions_of(
    gradients: GradientOperator, groups: int, block: Block | None, vectors: Tensor | None = None
) -> tuple[Directions, Basis] | None:
    """Scale the gradients to length 1 and find bases of their spans; ``None`` if that takes smaller groups.

    Inner products with vectors (G, K) are computed along with those of the gradients where that costs less, and kept.

    Inner products in the gradients' own type do when the directions are clearly independent. If not, or if a gradient
    is too small or too large to be squared, they are computed in float64; at once where most gradients are written out.
    """
    dimension, limits = gradients.dimension(block), torch.finfo(gradients.dtype)
    tried = gradients.examples * dimension > AT_ONCE and gradients.examples // groups <= dimension
    if tried and gradients.pair_products(block, precise=False) < dimension:
        if vectors is None:
            grams, dots = gradients.grams(groups, block, precise=False).cpu(), None
        else:
            grams, dots = gradients.products(vectors, block)
            grams = grams.cpu()
        squared = grams.diagonal(dim1=1, dim2=2)
        # Of a square each of the coordinates may lose the smallest normal number.
        if squared.numel() and within(squared, dimension * lost(gradients.dtype), limits.max):
            scales = _scales(gradients, squared.sqrt(), block, margin=2)
            basis = triangular_basis(_similarity(grams, scales), CLEARLY_INDEPENDENT) if bool(scales.all()) else None
            if basis is not None:
                return Directions(gradients, block, scales, dots), basis

    grams = gradients.grams(groups, block).cpu()
    # Rounding may leave less than 0 where a gradient cancels.
    scales = _scales(gradients, grams.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt(), block)
    similarity, size, blur = _similarity(grams, scales), scales.shape[1], _blur(gradients, scales, block)
    # The large vectors are combined in the gradients' type: basis vectors have an error of eps / sqrt(eigenvalue), and
    # of blur / sqrt(eigenvalue) where gradients are kept as sums.
    least = max(limits.eps, CLOSE, (blur / TILT) ** 2)
    basis = triangular_basis(similarity, least) if size <= dimension else None
    if basis is None and groups == 1 and (size <= 1 or blur < limits.eps):
        basis = spectral_basis(similarity[0], dimension, least)
    return None if basis is None else (Directions(gradients, block, scales), basis)


def _scales(gradients: GradientOperator, lengths: Tensor, block: Block | None, margin: float = 1) -> Tensor:
    """What scales gradients of some lengths (G, b) to 1, and 0 where they have no direction.

    They have one if they are ``margin`` times longer than they need be.
    """
    return torch.where(lengths > margin * _shortest(gradients, block).view(lengths.shape), 1 / lengths, 0.0)


def _blur(gradients: GradientOperator, scales: Tensor, block: Block | None) -> float:
    """What rounding may add to a direction."""
    if not scales.numel():
        return 0.0
    return float((gradients.roundings(block).cpu().double().view(scales.shape) * scales).amax())


def _shortest(gradients: GradientOperator, block: Block | None) -> Tensor:
    """The lengths, (B,), up to which a gradient has no direction; each depends on its own gradient alone.

    - The smallest normal number over the precision of the gradients' type (1e-31 in float32): less loses digits. What
      cannot be squared in float64 (1e-146) is no less.
    - LOST roundings of what is summed to make the gradient: of such a sum nothing may be left but rounding errors. So
      it is with what a normalisation makes of a bias before it.
    - What rounding may add to the gradient where it is combined, over ACCURACY: what is combined of a gradient with a
      direction has the length 1 within ACCURACY.
    """
    magnitudes, roundings = (
        values.cpu().double() for values in (gradients.magnitudes(block), gradients.roundings(block))
    )
    longest = torch.maximum(LOST * roundoff(gradients.dtype) * magnitudes, roundings / ACCURACY)
    return longest.clamp(min=max(lost(gradients.dtype), SMALLEST_SIDE))


def _similarity(grams: Tensor, scales: Tensor) -> Tensor:
    """The inner products (G, b, b) of vectors scaled by (G, b)."""
    return (grams * scales[:, :, None]).mul_(scales[:, None])


def made_parts(
    basis: Basis, present: Tensor, normal: Tensor, draws: SmallDraws, uniform: Tensor | None = None
) -> Parts:
    """Make the parts of all sums of what was drawn; ``normal`` (G, r, b + m) is overwritten.

    The last m draws, if any, are uniform directions of lengths ``uniform`` (G, m).
    """
    # Of so few numbers NumPy's calls take a third of torch's time.
    has_direction, coordinates, numbers = present.numpy(), basis.coordinates.numpy(), normal.numpy()
    cosine, sine, outside, turns = draws
    size = has_direction.shape[1]
    along = np.where(has_direction, cosine[:, :size], 0.0)
    sines = np.where(has_direction, sine[:, :size], 1.0)
    sines = sines if uniform is None else np.concatenate([sines, uniform.numpy()], axis=1)

    # The coordinates of a gradient without a direction are zeros.
    turned = numbers[:, :, :size]
    turned -= (turned * coordinates).sum(axis=1, keepdims=True) * coordinates
    squared = np.square(numbers).sum(axis=1) + outside
    # In one dimension nothing is orthogonal to a direction: the sine is 0, and so may be the length that divides it.
    shares = np.divide(sines, np.sqrt(squared), out=np.zeros_like(sines), where=sines > 0)
    inside, lengths = (numbers @ shares[..., None])[..., 0], _walk(shares * np.sqrt(outside), turns)
    return Parts(*map(torch.from_numpy, (along, inside, lengths)))


def _walk(lengths: Floats, cosines: Floats) -> Floats:
    """Return the lengths (G,) of sums of vectors of lengths (G, b) in independent uniform directions, by pairs."""
    while lengths.shape[1] > 1 and cosines.size:
        pairs = lengths.shape[1] // 2
        left, right, single = lengths[:, :pairs], lengths[:, pairs : 2 * pairs], lengths[:, 2 * pairs :]
        squared = left**2 + right**2 + 2 * left * right * cosines[:, :pairs]
        lengths = np.concatenate([np.sqrt(np.maximum(squared, 0)), single], axis=1)
        cosines = cosines[:, pairs:]
    return lengths.sum(axis=1)


def made_outside(directions: Directions, basis: Basis, numbers: Tensor) -> Outside:
    """Take the parts of vectors, numbers (G, K), outside the spans; the numbers are overwritten."""
    inner = times(basis.combination.mT, directions.dots(numbers))
    whole = row_norms(numbers).cpu().double().square()
    rest = whole - inner.square().sum(dim=1)
    correction, lengths = -times(basis.combination, inner), rest.clamp(min=0).sqrt()
    for index in torch.nonzero(rest <= whole / 2)[:, 0].tolist():
        # The span is most of the space: subtracting cancels, so it is done on the vector itself, twice (Kahan: twice is
        # enough), and the length is measured.
        group, combination = directions.group(index), basis.combination[index : index + 1]
        group.add_combination(numbers[index], 1.0, correction[index : index + 1])
        again = group.dots(numbers[index : index + 1])
        group.add_combination(numbers[index], 1.0, -times(combination, times(combination.mT, again)))
        correction[index], lengths[index] = 0, float(row_norms(numbers[index : index + 1]))
    return Outside(numbers, correction, lengths)


def times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Products of matrices (G, n, m) and vectors (G, m): (G, n)."""
    return torch.bmm(matrices, vectors[..., None])[..., 0]


# The sums of von Mises-Fisher draws of many models' batches, each with the numbers that it would have alone.
#
# Every model has streams of its own, from which it draws the same numbers as alone; what is computed of them is
# computed for all models at once, a model's groups of examples being some of all groups.


def draw_sums(gradients: StackedGradients, block: Block, each: Sequence[Draws]) -> Vector:
    """Draw for M models the sums of :func:`draw_sum`, (M, *shape); one by one where directions are nearly dependent."""
    cut = cut_groups(next(gradients.each()), block)
    groups = gradients.models * cut[0][1]
    directions = directions_of(gradients.flat, groups, block) if len(cut) == 1 else None
    if directions is None or directions[1].rank == gradients.dimension(block):
        sums = [draw_sum(own, block, draws) for own, draws in zip(gradients.each(), each, strict=True)]
        return {name: torch.stack([vector[name] for vector in sums]) for name in block}
    return _draw_together(gradients, *directions, each)


def _draw_together(gradients: StackedGradients, directions: Directions, basis: Basis, each: Sequence[Draws]) -> Vector:
    models, block, scale = gradients.models, directions.block, each[0].scale
    groups, size = directions.scales.shape
    own, dimension, rank = groups // models, gradients.dimension(block), basis.rank  # groups of each model
    small = own * size * size
    drawn = torch.empty(models, small + own * dimension, dtype=gradients.dtype, device=gradients.device)
    for row, draws in zip(drawn, each, strict=True):
        fill_normal(row, draws.noise)
    normal = drawn[:, : own * rank * size].cpu().double().view(groups, rank, size)
    smalls = [draw_small(draws.kappa, dimension, rank, (own, size), draws.rng) for draws in each]
    together = SmallDraws(*(np.concatenate(values) for values in zip(*smalls, strict=True)))
    parts = made_parts(basis, directions.scales > 0, normal, together)
    outside = made_outside(directions, basis, drawn[:, small:].unflatten(1, (own, dimension)).flatten(0, 1))
    stretch = parts.outside / outside.lengths
    coefficients = parts.along + times(basis.combination, parts.inside) + stretch[:, None] * outside.correction
    totals = gradients.vector(_combined_stacks(outside.numbers, scale * stretch, models), block)
    weights = (scale * coefficients * directions.scales).view(models, -1).to(gradients.device, gradients.dtype)
    gradients.add_combination(totals, 1.0, weights, block)
    return totals


def _combined_stacks(numbers: Tensor, weights: Tensor, models: int) -> Tensor:
    """The sums (M, K) of each model's vectors, numbers (G, K) with weights (G,); numbers may be overwritten."""
    factors = weights.to(numbers).view(models, 1, -1)
    if len(numbers) == models:
        return numbers.mul_(factors[:, 0])
    return torch.bmm(factors, numbers.view(models, -1, numbers.shape[1]))[:, 0]


# Inner products of random releases with given vectors, drawn in the space that these span.


Array = NDArray[np.float64]

_NEGLIGIBLE = 1e-13  # of the largest eigenvalue: what rounding leaves of a direction that is not there


def normal_products(gram: Array, variance: float, sources: NDArray[np.int64], rng: np.random.Generator) -> Array:
    """Return inner products of N(e_i, variance) with all e_j, (draws, N), from their own (N, N) and each draw's i."""
    coordinates = _coordinates(gram)
    noise = rng.standard_normal((len(sources), coordinates.shape[1]))
    return gram[sources] + np.sqrt(variance) * noise @ coordinates.T


def directional_products(
    gram: Array, kappa: float, dimension: int, length: float, sources: NDArray[np.int64], rng: np.random.Generator
) -> Array:
    """Return inner products of von Mises-Fisher draws around e_i / |e_i| with all e_j, (draws, N).

    A draw is t u + sqrt(1 - t^2) w, w uniform across u. In the span of the e, w is a normal vector without its part
    along u, divided by its length; the part of that length outside the span is chi-squared.

    ``gram``: (N, N), of the e, none of which is zero; ``sources``: i of each draw, (draws,).
    """
    coordinates = _coordinates(gram)
    directions = coordinates / np.linalg.norm(coordinates, axis=1, keepdims=True)
    drawn = draw_cosines(kappa, dimension, len(sources), rng)
    mean, across = directions[sources], rng.standard_normal((len(sources), coordinates.shape[1]))
    across -= (across * mean).sum(axis=1, keepdims=True) * mean
    outside = dimension - coordinates.shape[1]
    squared = (across**2).sum(axis=1) + (rng.chisquare(outside, len(sources)) if outside > 0 else 0.0)
    sines = drawn.sine / np.sqrt(np.maximum(squared, np.finfo(float).tiny))
    return length * (drawn.cosine[:, None] * mean + sines[:, None] * across) @ coordinates.T


def _coordinates(gram: Array) -> Array:
    """Vectors (N, r) with these inner products."""
    values, vectors = np.linalg.eigh(gram)
    kept = values > _NEGLIGIBLE * max(float(values[-1]), 0.0)
    return vectors[:, kept] * np.sqrt(values[kept])
