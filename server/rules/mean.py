"""The mean of the uploads (McMahan et al. 2017), weighted by their numbers of examples or uniformly."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from fedpriv.core.registry import RULES
from fedpriv.server.rules import Rule

if TYPE_CHECKING:
    from fedpriv.core.world import State
    from fedpriv.server.uploads import Upload


@RULES.register
class Mean(Rule):
    """All uploads count: a single wrong one upsets it."""

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
