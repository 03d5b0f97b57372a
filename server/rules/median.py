"""The median of the uploads, coordinate by coordinate (Yin et al. 2018); every client counts once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.registry import RULES
from fedpriv.server.rules import Rule

if TYPE_CHECKING:
    from fedpriv.server.uploads import Upload
    from fedpriv.world import State

__all__ = ["Median"]

LEAST = 3  # uploads of which a single wrong one does not upset it


@RULES.register
class Median(Rule):
    """Between the two middle values where their number is even."""

    name: ClassVar[str] = "median"

    @override
    def aggregate(self, uploads: "Sequence[Upload]", weighting: str) -> "State":
        import numpy as np

        from fedpriv.server.aggregation import by_coordinate

        return by_coordinate(uploads, lambda rows: np.median(rows, axis=0))

    @override
    def warnings(self, clients: int) -> list[str]:
        if clients >= LEAST:
            return []
        return [f"federation.aggregation = {self.name!r} of a round's {clients} uploads: one wrong upload upsets it"]
