"""Numerics of gradients: bounds on rounding, and norms of rows that are exact to a few roundings.

torch adds up a float32 row in a few sums, one coordinate after the other, which lose digits: of 4 million normal
numbers 8e-5 of the Euclidean norm are missing and 1e-3 of the L1 norm, of 10^8 1 % and 46 %. Clipping by such norms
would let through more than the bound. Neither may a number be lost because its square is 0 or infinite.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Coordinates whose sum is torch's: in float32 Euclidean norms are off by about 2e-7 then, L1 norms by 3e-6.
PIECE = 1 << 12

# Bytes of rows that are divided by their largest numbers at once.
AT_ONCE = 1 << 20


def row_norms(rows: Tensor, order: int = 2) -> Tensor:
    """Return the norms (...) of rows (..., n): Euclidean ones, or of another ``order``."""
    length = rows.shape[-1]
    if length <= PIECE:
        return torch.linalg.vector_norm(rows, ord=order, dim=-1)
    whole = length - length % PIECE
    pieces = torch.linalg.vector_norm(rows[..., :whole].unflatten(-1, (-1, PIECE)), ord=order, dim=-1)
    rest = torch.linalg.vector_norm(rows[..., whole:], ord=order, dim=-1, keepdim=True)
    return row_norms(torch.cat([pieces, rest], dim=-1), order)


def lengths(rows: Tensor) -> Tensor:
    """Return the Euclidean norms (B,) of rows (B, n), also where squares overflow; NaN or infinite if a number is."""
    norms, least = row_norms(rows), math.sqrt(lost(rows.dtype))
    if not rows.numel() or within(norms, least, math.inf):
        return norms
    doubtful = torch.nonzero(~((norms > least) & torch.isfinite(norms)))[:, 0]
    for chunk in doubtful.split(max(1, AT_ONCE // rows[0].nbytes)):
        norms[chunk] = scaled_norms(rows[chunk])
    return norms


def lengths_of(sides: Sequence[Tensor]) -> Tensor:
    """Return what :func:`lengths` says of each of S tensors (B, ...) of the same type, without extremes, (S, B)."""
    rows = [side.flatten(1) for side in sides]
    norms = torch.stack([row_norms(row) for row in rows])
    least, most = math.sqrt(lost(norms.dtype)), LARGEST_SIDE[norms.dtype]
    if norms.numel() and within(norms, least, most):
        return norms
    usual = ((norms > least) & (norms < most)).all(dim=1)
    for place in torch.nonzero(~usual)[:, 0].tolist():
        norms[place] = without_extremes(lengths(rows[place]))
    return norms


def scaled_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norms (...) of rows (..., n), n at least 1, divided by their largest numbers first."""
    largest: Tensor = torch.linalg.vector_norm(rows, ord=math.inf, dim=-1)
    if not largest.any():
        return largest
    largest = largest.clamp(min=torch.finfo(rows.dtype).tiny)
    return largest * row_norms(rows / largest[..., None])


def lost(dtype: torch.dtype) -> float:
    """Return below which squares may be those of numbers that lost digits."""
    limits = torch.finfo(dtype)
    return float(limits.tiny / limits.eps)


def within(values: Tensor, least: float, most: float) -> bool:
    """Tell whether all of at least one number are above the one and below the other; none is NaN then."""
    lowest, highest = values.aminmax()
    return least < float(lowest) and float(highest) < most


# What rounding may do to gradients that are sums, and which numbers are too large or too small to be multiplied.
#
# Let g = sum over t of e_t a_t^T be a gradient, T positions, and m at least the sum over t of |e_t| |a_t|. Summed in a
# type of unit roundoff u, it is off by at most gamma_(T + 2) m in the Euclidean norm, gamma_n = n u / (1 - n u): each
# coordinate is off by at most gamma times the sum of |e_tk| |a_tl| (Higham 2002, Accuracy and Stability of Numerical
# Algorithms, Section 3.1; the + 2 is for the product with a weight). Where the positions cancel that may be more than
# g.


# What is combined of a gradient may be off by this share of its norm; where it may be off by more, it has no direction.
ACCURACY = 1e-3

# A gradient is lost to rounding below so many roundings of what is summed to make it.
LOST = 16

# The largest norm of a side of a product. With a larger one the other side would be scaled to numbers that their type
# rounds to a few bits or to 0, however short the product.
LARGEST_SIDE = {torch.float32: 2.0**102, torch.float64: 2.0**480}

# The smallest norm whose square is a normal number of float64, in which inner products are computed.
SMALLEST_SIDE = math.sqrt(torch.finfo(torch.float64).tiny / torch.finfo(torch.float64).eps)


def roundoff(dtype: torch.dtype) -> float:
    """Return u, the largest relative error of a rounding."""
    return torch.finfo(dtype).eps / 2


def of_sums(terms: int, dtype: torch.dtype) -> float:
    """Return a bound of the error of a sum of weighted products of so many terms, over the sum of their sizes."""
    return (terms + 4) * roundoff(dtype)


def of_products(terms: int) -> float:
    """Return what the error of a norm from inner products counts as, over the sum of the sizes of what is summed.

    The squared norm n^2 is a sum of so many terms in float64, off by gamma m^2. So n is off by gamma m^2 / 2n, which is
    less than the bound returned, r m with r = sqrt(ACCURACY gamma), for each n from r m / ACCURACY on.
    """
    return math.sqrt(ACCURACY * of_sums(terms, torch.float64))


def without_extremes(norms: Tensor) -> Tensor:
    """Return norms (...) with bounds for those too large, infinite, or too small, which then have no direction."""
    norms = norms.masked_fill(norms > LARGEST_SIDE[norms.dtype], torch.inf)
    if norms.dtype == torch.float32:
        return norms  # in float64 the squares of all numbers of float32 are normal numbers
    return norms.masked_fill((norms > 0) & (norms < SMALLEST_SIDE), SMALLEST_SIDE / (LOST * roundoff(norms.dtype)))


def reach(dtype: torch.dtype) -> float:
    """Return up to which bound of what is summed to make it a gradient is finite in all products."""
    return min(torch.finfo(dtype).max, math.sqrt(torch.finfo(torch.float64).max)) / 16
