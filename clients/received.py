"""What a client can notice of the parameters that it is sent: rows of a weight that are copies of each other.

Active attacks that read single records (imprint, class fishing) need such rows. Training gives none: rows that were
drawn at random stay different. A server that knows of this check can add small random numbers, and reads less exactly.
"""

import torch
from torch import Tensor

from fedpriv.gradients import Vector

FEWEST = 8  # numbers in a row; shorter ones, such as kernels of one pixel, may be equal by chance or by rounding
SEED = 20260417  # of the weights by which rows are compared; it decides nothing else


def copied_rows(parameters: Vector) -> dict[str, tuple[int, int]]:
    """Return the weights of which at least half the rows are copies: name -> (rows that repeat another, all rows).

    A weight of zeros, which has not been trained yet, is none of them. False alarms: a layer that started at zero, of
    whose classes more than half occur in nobody's data.
    """
    weights = {name: value.flatten(1) for name, value in parameters.items() if value.ndim > 1 and len(value) > 2}
    counts = {name: (_copies(rows), len(rows)) for name, rows in weights.items() if rows.shape[1] >= FEWEST}
    return {name: (copies, rows) for name, (copies, rows) in counts.items() if 2 * copies >= rows - 1}


def _copies(rows: Tensor) -> int:
    """How many rows (n, m) repeat another, by their sums with random weights; none, if all are zero."""
    if not rows.is_floating_point() or not bool(rows.any()):
        return 0
    weights = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    sums = (rows.double() * weights.to(rows.device)).sum(dim=1)
    return len(rows) - len(sums.unique())
