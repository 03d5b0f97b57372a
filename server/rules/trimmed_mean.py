"""The mean without the extreme values of each coordinate (Yin et al. 2018); every client counts once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.registry import RULES
from fedpriv.server.rules import Rule
from fedpriv.settings import Real

if TYPE_CHECKING:
    from fedpriv.server.uploads import Upload
    from fedpriv.world import State

__all__ = ["TrimmedMean"]


@RULES.register
class TrimmedMean(Rule):
    """Flower's."""

    name: ClassVar[str] = "trimmed-mean"

    trim: Annotated[Real, Field(ge=0, lt=0.5)] = Field(
        0.2, description="trimmed-mean: share of the uploads left out at each end, in each coordinate"
    )

    @override
    def aggregate(self, uploads: "Sequence[Upload]", weighting: str) -> "State":
        from flwr.serverapp.strategy.fedtrimmedavg import trim_mean

        from fedpriv.server.aggregation import by_coordinate

        return by_coordinate(uploads, lambda rows: trim_mean(rows, self.trim))

    @override
    def warnings(self, clients: int) -> list[str]:
        if int(self.trim * clients) > 0:
            return []
        return [
            f"federation.aggregation = {self.name!r} with trim = {self.trim:g} leaves out none of a round's {clients} "
            "uploads: it is their mean, which one wrong upload upsets"
        ]
