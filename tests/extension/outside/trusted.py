"""An aggregation rule of somebody else: one client is believed, and nobody else."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from fedpriv.core.settings import NonNegative
from fedpriv.core.world import State
from fedpriv.server.rules import Rule
from fedpriv.server.uploads import Upload


class Trusted(Rule):
    """The upload of one client."""

    name: ClassVar[str] = "trusted"

    believed: NonNegative = Field(0, description="trusted: number of the client")

    def aggregate(self, uploads: Sequence[Upload], weighting: str) -> State:
        return next(upload.state for upload in uploads if upload.client == self.believed)
