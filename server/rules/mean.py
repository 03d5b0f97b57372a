"""The mean of the uploads (McMahan et al. 2017), weighted by their numbers of examples or uniformly."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from fedpriv.registry import RULES
from fedpriv.server.rules import Rule

if TYPE_CHECKING:
    from fedpriv.gradients import Vector
    from fedpriv.server.uploads import Upload
    from fedpriv.world import State

__all__ = ["Mean", "mean_upload"]


@RULES.register
class Mean(Rule):
    """All uploads count: a single wrong one upsets it."""

    name = "mean"
    needs_each = False

    @override
    def aggregate(self, uploads: "Sequence[Upload]", weighting: str) -> "State":
        return mean_upload(uploads, weighting)


def mean_upload(uploads: "Sequence[Upload]", weighting: str) -> "State":
    """Average uploads in their order.

    Args:
        uploads: at least one; all with the same tensors.
        weighting: ``examples`` or ``uniform``.
    """
    from fedpriv.world import State

    raw = [float(upload.examples) if weighting == "examples" else 1.0 for upload in uploads]
    weights = [value / sum(raw) for value in raw]
    parts = list(zip(weights, uploads, strict=True))
    return State(
        _weighted([(weight, upload.state.parameters) for weight, upload in parts]),
        _weighted([(weight, upload.state.buffers) for weight, upload in parts]),
    )


def _weighted(parts: "Sequence[tuple[float, Vector]]") -> "Vector":
    total = {name: value.new_zeros(value.shape) for name, value in parts[0][1].items()}
    for weight, vector in parts:
        for name, value in vector.items():
            total[name].add_(value, alpha=weight)
    return total
