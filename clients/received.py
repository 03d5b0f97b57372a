"""What a client can notice of parameters that it is sent: rows that are nearly copies, a bias that decides alone.

Active attacks that read single records (imprint, class fishing) need either. Training gives neither: rows that were
drawn at random stay different, and a bias learns no more than how frequent a class is. A server that knows of the
checks can send rows that differ more, and reads less exactly.
"""

import torch
from torch import Tensor

from fedpriv.gradients import Vector

FEWEST = 8  # numbers in a row; shorter ones, such as kernels of one pixel, may be equal by chance or by rounding
NEAR = 0.05  # of the longest row: the distance below which rows are copies
SHARE = 0.75  # of the rows but two, which class fishing leaves different
SHADOWS = 64  # random directions by which rows are compared
MOST = 4096  # rows that are compared with each other; of more, as many at even distances
SEED = 20260417  # of these directions; it decides nothing else
ALONE = 9.0  # nats by which a bias of the last layer is above all others: a class 8,000 times as frequent


def copied_rows(parameters: Vector) -> dict[str, tuple[int, int]]:
    """Return the weights of whose rows three quarters are nearly copies: name -> (rows that repeat another, rows).

    A weight of zeros, which has not been trained yet, is none of them. False alarms: a layer of which most rows are
    zero or tiny, as those of pruned networks, or of classes that occur in nobody's data. Half of the rows would not do:
    in the table of a small pretrained Llama half of the tokens were never trained.
    """
    weights = {name: value.flatten(1) for name, value in parameters.items() if value.ndim > 1 and len(value) > 2}
    counts = {name: _copies(rows) for name, rows in weights.items() if rows.shape[1] >= FEWEST}
    return {name: (copies, rows) for name, (copies, rows) in counts.items() if copies and copies >= SHARE * (rows - 2)}


def lonely_bias(parameters: Vector) -> tuple[str, float] | None:
    """Return the last layer's bias, and by how much one class is above all others, if it decides alone."""
    named = [name.removesuffix("weight") + "bias" for name, value in parameters.items() if value.ndim == 2]
    biases = [name for name in named if name in parameters and len(parameters[name]) > 1]
    if not biases or not parameters[biases[-1]].is_floating_point():
        return None
    first, second = parameters[biases[-1]].double().topk(2).values.tolist()
    return (biases[-1], first - second) if first - second > ALONE else None


def _copies(rows: Tensor) -> tuple[int, int]:
    """How many of the rows (n, m) that are compared are near an earlier one, none if all are zero; and n."""
    rows = rows[:: -(-len(rows) // MOST)]
    if not rows.is_floating_point() or not bool(rows.any()):
        return 0, len(rows)
    shadows = torch.randn(rows.shape[1], SHADOWS, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    seen = rows.double() @ shadows.to(rows.device)
    near = torch.cdist(seen, seen) <= NEAR * seen.norm(dim=1).max()
    return int(near.tril(diagonal=-1).any(dim=1).sum()), len(rows)
