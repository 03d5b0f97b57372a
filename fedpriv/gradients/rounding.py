"""What rounding may do to gradients that are sums, and which numbers are too large or too small to be multiplied.

Let g = sum over t of e_t a_t^T be a gradient, T positions, and m at least the sum over t of |e_t| |a_t|. Summed in a
type of unit roundoff u, it is off by at most gamma_(T + 2) m in the Euclidean norm, gamma_n = n u / (1 - n u): each
coordinate is off by at most gamma times the sum of |e_tk| |a_tl| (Higham 2002, Accuracy and Stability of Numerical
Algorithms, Section 3.1; the + 2 is for the product with a weight). Where the positions cancel that may be more than g.
"""

import math

import torch
from torch import Tensor

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
    """Return norms (...) of sides of products, with bounds in place of those that are too large or too small.

    The bound of those that are too large is infinite: such gradients count as not finite. With that of those that are
    too small, which are not 0, a product is below LOST roundings: it has no direction.
    """
    norms = norms.masked_fill(norms > LARGEST_SIDE[norms.dtype], torch.inf)
    if norms.dtype == torch.float32:
        return norms  # in float64 the squares of all numbers of float32 are normal numbers
    return norms.masked_fill((norms > 0) & (norms < SMALLEST_SIDE), SMALLEST_SIDE / (LOST * roundoff(norms.dtype)))


def reaches(magnitudes: Tensor) -> Tensor:
    """Tell which gradients can be worked with, (...), from bounds of what is summed to make them (...).

    Not those that are NaN or infinite, nor those whose inner products with normal vectors (8.5 times the norm, see the
    module ``normal``) or with each other in float64 could be infinite.
    """
    most = min(torch.finfo(magnitudes.dtype).max, math.sqrt(torch.finfo(torch.float64).max)) / 16
    return magnitudes <= most
