"""The mean without the extreme values of each coordinate (Yin et al. 2018)."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import RULES
from fedpriv.core.settings import Real
from fedpriv.server.rules import CoordinateRule

if TYPE_CHECKING:
    import numpy as np


@RULES.register
class TrimmedMean(CoordinateRule):
    """As Flower computes it."""

    name = "trimmed-mean"

    trim: Annotated[Real, Field(ge=0, lt=0.5)] = Field(
        0.2, description="trimmed-mean: share of the uploads left out at each end, in each coordinate"
    )

    @override
    def combine(self, rows: "np.ndarray") -> "np.ndarray":
        from flwr.serverapp.strategy.fedtrimmedavg import trim_mean

        return trim_mean(rows, self.trim)

    @override
    def warnings(self, clients: int) -> list[str]:
        if int(self.trim * clients) > 0:
            return []
        return [
            f"federation.aggregation = {self.name!r} with trim = {self.trim:g} removes none of a round's {clients} "
            "uploads: it is their mean, which one wrong upload can set"
        ]
