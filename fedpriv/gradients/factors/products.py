"""Sums and products of rows of gradients, by which factors answer."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.gradients.norms import within
from fedpriv.gradients.operator import in_double

# What is worked on at once on a processor where that would not fit into a core's cache as a whole.
CACHE_BYTES = 1 << 20

# Of gradients of as many numbers, inner products in float32 take about a quarter of the time of float64.
LARGE = 1 << 14
QUICK = 4

# Rows of a symmetric product that are computed together.
STRIP = 64


def rows_are_cheaper(examples: int, positions: int, wide: int, tall: int) -> bool:
    """Tell whether the Gram matrix of sums of outer products costs less from gradients that are multiplied out."""
    of_positions = examples * positions * positions * (wide + tall)
    return (examples + positions) * wide * tall < of_positions


def slices(start: int, stop: int, step: int) -> Iterator[slice]:
    """Cut a range into parts of at most ``step``."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def grouped(rows: Tensor, groups: int) -> Tensor:
    """Rows (B, n) in groups of the same size, (G, B / G, n)."""
    grouped: Tensor = rows.unflatten(0, (groups, len(rows) // groups))
    return grouped


def zeroed(values: Tensor, keep: Tensor) -> Tensor:
    """Return values (B, ...) with zeros in place of those of all examples but the ones to keep, (B,); a new tensor."""
    return values.masked_fill(~keep.view(-1, *([1] * (values.ndim - 1))), 0)


def powers_of_two(norms: Tensor) -> Tensor:
    """Return for each norm a power of 2 that is about as large, for 0 a 1."""
    mantissas = torch.frexp(norms).mantissa
    return torch.where(norms > 0, norms / mantissas, 1.0)


def summed_at_first(indices: Tensor, errors: Tensor) -> Tensor:
    """Sum errors (n, T, width) over the positions of each example with the same index (n, T), at the first of these."""
    examples, positions = indices.shape
    order = indices.argsort(dim=1, stable=True)
    ordered = indices.gather(1, order)
    places = torch.arange(positions, device=indices.device).expand(examples, -1)
    repeated = functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    runs = places.masked_fill(repeated, 0).cummax(dim=1).values
    first = torch.empty_like(order).scatter_(1, order, order.gather(1, runs))
    first += positions * torch.arange(examples, device=indices.device)[:, None]
    summed = errors.new_zeros(examples * positions, errors.shape[2])
    return summed.index_add_(0, first.view(-1), errors.reshape(summed.shape)).view(errors.shape)


def products(rows: Tensor, scratch: int, own_type: bool = False) -> Tensor:
    """Inner products (G, b, b) of rows (G, b, n) within groups, in float64; of large groups about half are mirrored.

    Some coordinates at a time: as many as stay in a processor's cache, or fit into the scratch. With ``own_type`` they
    are computed in the rows' own type, unless it loses squares.
    """
    if own_type:
        quick = rows @ rows.mT
        limits = torch.finfo(rows.dtype)
        if within(quick.diagonal(dim1=1, dim2=2), limits.tiny / limits.eps, math.inf):
            return quick
    groups, examples = rows.shape[:2]
    room = min(scratch, CACHE_BYTES) if rows.device.type == "cpu" else scratch
    # Other devices are faster at all products at once than at half of them in pieces.
    if 8 * rows.numel() <= room and (examples <= STRIP or rows.device.type != "cpu"):
        precise = in_double(rows)
        return precise @ precise.mT
    strips = list(slices(0, examples, STRIP))
    products = in_double(rows[..., :0]).new_zeros(groups, examples, examples)
    for chunk in rows.split(max(1, room // (8 * max(1, groups * examples))), dim=2):
        precise = in_double(chunk)
        for strip in strips:
            products[:, strip, strip.start :].baddbmm_(precise[:, strip], precise[:, strip.start :].mT)
    for strip in strips:
        products[:, strip.stop :, strip] = products[:, strip, strip.stop :].mT
    return products


def products_of_positions(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """Products of inner products of inputs and of errors, (n T, m T)."""
    (inputs, errors), (other_inputs, other_errors) = left, right
    return (inputs @ other_inputs.T).mul_(errors @ other_errors.T)


def products_of_lookups(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """Inner products of errors where the same row was looked up, else 0, (n T, m T)."""
    (indices, errors), (other_indices, other_errors) = left, right
    return (errors @ other_errors.T).masked_fill_(indices[:, None] != other_indices, 0)


def summed(products: Tensor, positions: int) -> Tensor:
    """Sum products of positions (n T, m T) over each pair of examples, (n, m)."""
    total: Tensor = products.unflatten(1, (-1, positions)).unflatten(0, (-1, positions)).sum(dim=(1, 3))
    return total
