"""Krum: the one upload that is nearest to its neighbours (Blanchard et al. 2017)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import RULES
from fedpriv.core.settings import Integer
from fedpriv.server.rules import Rule

if TYPE_CHECKING:
    import numpy as np

    from fedpriv.core.world import State
    from fedpriv.server.uploads import Upload


@RULES.register
class Krum(Rule):
    """Of n uploads, f of them wrong, the one with the smallest sum of squared distances to n - f - 2 others."""

    name = "krum"

    malicious: Annotated[Integer, Field(ge=0, le=10_000_000)] = Field(
        1, description="krum: uploads of a round that may be wrong; a round needs two times as many and three more"
    )

    @override
    def aggregate(self, uploads: "Sequence[Upload]", weighting: str) -> "State":
        import numpy as np

        states = [upload.state for upload in uploads]
        every = [[*state.parameters.values(), *state.buffers.values()] for state in states]
        flat = [np.concatenate([tensor.numpy().ravel() for tensor in tensors]) for tensors in every]
        neighbours = max(1, len(flat) - self.malicious - 2)
        scores = [_sum_of_nearest(row, flat, neighbours) for row in flat]
        return states[int(np.argmin(scores))]

    @property
    @override
    def needed(self) -> int:
        """2 f + 3."""
        return 2 * self.malicious + 3

    @override
    def check(self, clients: int) -> None:
        if clients < self.needed:
            raise ValueError(
                f"aggregation = {self.name!r} with malicious = {self.malicious} needs {self.needed} uploads a round, "
                f"and a round has {clients} clients"
            )


def _sum_of_nearest(row: "np.ndarray", every: "Sequence[np.ndarray]", count: int) -> float:
    """The sum of the smallest squared distances, the row's own left out."""
    import numpy as np

    distances = np.array([np.linalg.norm(row - other) ** 2 for other in every], dtype=np.float64)
    return float(np.sort(distances)[1 : count + 1].sum())
