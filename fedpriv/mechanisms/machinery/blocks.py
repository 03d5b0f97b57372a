"""How a gradient is cut into blocks, each with its own noise: one definition for the draws and for the ledger."""

import re
from collections.abc import Sequence


def block_sizes(blocks: str, tensors: Sequence[int]) -> tuple[int, ...]:
    """Return the number of coordinates of each block, in the order of the parameters; see :func:`block_runs`."""
    return tuple(size for count, size in block_runs(blocks, tensors) for _ in range(count))


def block_runs(blocks: str, tensors: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the blocks as (how many of one size follow each other, coordinates of each), in the parameters' order."""
    length, total = block_length(blocks), sum(tensors)
    if blocks == "layer":
        return tuple((1, size) for size in tensors)
    if length is None:
        return ((1, total),)
    whole, rest = divmod(total, length)
    return tuple((count, size) for count, size in ((whole, length), (1, rest)) if count * size)


def block_length(blocks: str) -> int | None:
    """Return D of "size:D", ``None`` for "whole" and "layer"."""
    if blocks in ("whole", "layer"):
        return None
    match = re.fullmatch(r"size:([1-9][0-9]*)", blocks)
    if not match:
        raise ValueError(f"blocks = {blocks!r} is not allowed: whole, layer, or size:D with a whole number D above 0")
    return int(match[1])
