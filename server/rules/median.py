"""The median of the uploads, coordinate by coordinate (Yin et al. 2018)."""

from typing import TYPE_CHECKING

from typing_extensions import override

from fedpriv.core.registry import RULES
from fedpriv.server.rules import CoordinateRule

if TYPE_CHECKING:
    import numpy as np

LEAST = 3  # uploads of which a single wrong one does not upset it


@RULES.register
class Median(CoordinateRule):
    """Between the two middle values where their number is even."""

    name = "median"

    @override
    def combine(self, rows: "np.ndarray") -> "np.ndarray":
        import numpy as np

        return np.asarray(np.median(rows, axis=0))

    @override
    def warnings(self, clients: int) -> list[str]:
        if clients >= LEAST:
            return []
        return [f"federation.aggregation = {self.name!r} of {clients} uploads a round: one wrong upload can set it"]
