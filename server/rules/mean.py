"""Means of the uploads, and the median: rules that put them together coordinate by coordinate."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import RULES
from fedpriv.core.settings import Real
from fedpriv.server.rules import CoordinateRule, Rule

if TYPE_CHECKING:
    import numpy as np

    from fedpriv.core.world import State
    from fedpriv.server.uploads import Upload


@RULES.register
class Mean(Rule):
    """Weighted by examples or uniformly (McMahan et al. 2017): a single wrong upload upsets it."""

    name = "mean"
    needs_each = False

    @override
    def aggregate(self, uploads: "Sequence[Upload]", weighting: str) -> "State":
        return mean_upload(uploads, weighting)


def mean_upload(uploads: "Sequence[Upload]", weighting: str) -> "State":
    """Average uploads in their order."""
    from fedpriv.core.federated import client_weights, weighted_sum
    from fedpriv.core.world import State

    weights = client_weights([upload.examples for upload in uploads], weighting)
    return State(
        weighted_sum([upload.state.parameters for upload in uploads], weights),
        weighted_sum([upload.state.buffers for upload in uploads], weights),
    )


LEAST = 3  # uploads of which a single wrong one does not upset it


@RULES.register
class Median(CoordinateRule):
    """Of each coordinate (Yin et al. 2018); between the two middle values where their number is even."""

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


@RULES.register
class TrimmedMean(CoordinateRule):
    """Without the extreme values of each coordinate (Yin et al. 2018), as Flower computes it."""

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
