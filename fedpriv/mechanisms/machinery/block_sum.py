"""Sums of one von Mises-Fisher draw for each example and block of D coordinates, for blocks that cut through layers.

The gradients are written out, some examples at a time, and each block of each is replaced by its draw; on a GPU by
``block_kernel``.

A draw around e_1 is (t, sqrt(1 - t^2) v) with t the cosine (see ``vmf_sampling``) and v uniform in R^(D-1). A normal
vector gives both: v is the direction of all coordinates but the first, and the first over the length is the first
proposal for t. Householder's reflection turns it into a draw around mu (Ulrich 1984): with c = 1 if mu_1 >= 0, else -1,
and w = mu + c e_1, z -> z - 2 w (w.z) / (w.w) maps -c e_1 to mu, and w.w = 2 (1 + |mu_1|): nothing cancels.
"""

import math
import os
import sysconfig
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import numpy as np
import torch
from torch import Tensor

from fedpriv.gradients import GradientOperator, Vector, flattened
from fedpriv.gradients.normal import standard_normal
from fedpriv.gradients.numerics import row_norms, scaled_norms
from fedpriv.gradients.operator import in_double
from fedpriv.mechanisms.machinery.vmf_sampling import Cosines, Draws, draw_cosines

# Numbers that are worked on together: few enough to stay in the cache.
CHUNK = 1 << 19

# The longest blocks that a GPU draws by itself: longer ones are few, and what single precision rounds grows with them.
MOST_FUSED = 256


def draw_block_sums(gradients: GradientOperator, runs: Sequence[tuple[int, int]], draws: Draws) -> Vector:
    """Draw ``scale`` times the sum over the batch of gradients whose blocks b are replaced by VMF(b / |b|, kappa).

    A block counts as zero, and gets a uniform direction, when its norm is below the smallest normal number over the
    precision of its type (1e-31 in float32). A direction is that of the block as it is written out.
    """
    if _fused(gradients, runs):
        from fedpriv.mechanisms.machinery.block_kernel import draw_fused_sums

        return draw_fused_sums(gradients, runs[0][1], draws)
    total = torch.zeros(gradients.dimension(), dtype=gradients.dtype, device=gradients.device)
    ends = [count * size for count, size in runs]
    # The rows, the same laid end to end, and what a draw needs when a block is most of the parameters.
    together = max(1, gradients.chunk_bytes // (8 * max(1, total.nbytes)))
    for start in range(0, gradients.examples, together):
        rows = gradients.rows(start, min(start + together, gradients.examples))
        flat = torch.cat([flattened(value) for value in rows.values()], dim=1)
        parts = zip(runs, total.split(ends), flat.split(ends, dim=1), strict=True)
        for (_, size), sums, written in parts:
            _add_draws(sums.view(-1, size), written.unflatten(1, (-1, size)), draws)
    return gradients.vector(total.mul_(draws.scale))


@cache
def makes_programs(device: torch.device) -> bool:
    """Tell whether a GPU can draw by itself: Triton makes a program of it, by Python's headers and a compiler of C."""
    if device.type != "cuda" or find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    compiler = os.environ.get("CC", which("clang") or which("gcc") or "")
    return which(compiler) is not None and Path(sysconfig.get_path("include"), "Python.h").exists()


def _fused(gradients: GradientOperator, runs: Sequence[tuple[int, int]]) -> bool:
    """Tell whether the draws are made in one program."""
    fits = gradients.dtype == torch.float32 and 0 < max((size for _, size in runs), default=0) <= MOST_FUSED
    return fits and makes_programs(gradients.device)


def _add_draws(total: Tensor, rows: Tensor, draws: Draws) -> None:
    """Add to ``total`` (m, d) the sum over n examples of draws around the blocks in ``rows`` (n, m, d), in place."""
    examples, _, length = rows.shape
    step = max(1, CHUNK // (examples * length))
    for sums, blocks in zip(total.split(step), rows.split(step, dim=1), strict=True):
        if length == 1:
            sums += _signs(blocks, draws).sum(dim=0)
            continue
        first, rest = _drawn(blocks, draws)
        sums[:, 0] += first.sum(dim=0)
        sums[:, 1:] += rest.sum(dim=0)


def _drawn(rows: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draws around the blocks in ``rows`` (n, m, d): their first coordinates (n, m) and the others (n, m, d - 1)."""
    directions, present = _directions(rows)
    blocks = present.numel()
    numbers = standard_normal(rows.numel(), draws.noise, rows.dtype, rows.device)
    along, rest = numbers[:blocks].view(present.shape), numbers[blocks:].view(*present.shape, -1)
    lengths = row_norms(rest)
    cosine, sine = _angles(along, lengths, present, rows.shape[2], draws)
    # In one dimension there is no rest, and its length is 0.
    rest *= (sine / lengths.clamp_(min=torch.finfo(rows.dtype).tiny))[..., None]
    sign = torch.where(directions[..., 0] >= 0, 1, -1).to(rows.dtype)
    first = -sign * cosine
    normal, tail = directions[..., 0] + sign, directions[..., 1:]
    share = (normal * first + (tail * rest).sum(dim=2)) / normal.abs()
    return first - share * normal, rest.sub_(share[..., None] * tail)


def _signs(rows: Tensor, draws: Draws) -> Tensor:
    """Draws around blocks of one number, (n, m, 1): its sign or the other one; either where there is no direction."""
    directions, present = _directions(rows)
    kept = 1 / (1 + math.exp(-2 * draws.kappa))
    uniform = torch.from_numpy(draws.rng.random(tuple(present.shape))).to(rows.device)
    same = uniform < torch.where(present, kept, 0.5)
    return torch.where(same[..., None], directions, -directions)


def _directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scale blocks (n, m, d) to length 1, in float64, and tell which have a direction, (n, m); e_1 stands in."""
    limits, precise = torch.finfo(rows.dtype), in_double(rows)
    lengths = scaled_norms(precise) if rows.dtype == torch.float64 else row_norms(precise)
    present = lengths > limits.tiny / limits.eps
    scales = torch.where(present, 1 / lengths, 0.0)
    directions = (precise * scales[..., None]).to(rows)
    directions[..., 0] += ~present.to(rows.device)
    return directions, present.to(rows.device)


def _angles(along: Tensor, lengths: Tensor, present: Tensor, dimension: int, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw cosines and sines (n, m), from normal vectors' first coordinates and the lengths of the others.

    First coordinate over length is a uniform direction's cosine; blocks without a direction, not ``present``, keep it.
    """
    first, rest = (values.reshape(-1).cpu().double().numpy() for values in (along, lengths))
    whole = np.sqrt(first**2 + rest**2)
    # Rounding allows for a vector of zeros: it counts as one along the first axis.
    first, whole = np.where(whole > 0, first, 1.0), np.where(whole > 0, whole, 1.0)
    uniform = Cosines(first / whole, rest / whole)
    chosen = np.flatnonzero(present.cpu().numpy())
    if chosen.size == whole.size:
        drawn = draw_cosines(draws.kappa, dimension, whole.size, draws.rng, uniform)
    else:
        drawn = uniform
        proposals = Cosines(uniform.cosine[chosen], uniform.sine[chosen])
        drawn.cosine[chosen], drawn.sine[chosen] = draw_cosines(
            draws.kappa, dimension, chosen.size, draws.rng, proposals
        )
    cosine, sine = (torch.from_numpy(values).view(along.shape).to(along) for values in drawn)
    return cosine, sine
