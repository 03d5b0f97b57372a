"""Masked uploads as a way in which they reach the server."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.algorithms.secure_aggregation.client import HANDLERS, QUERIES, masked_votes
from fedpriv.algorithms.secure_aggregation.server import ask_for_sum, ask_for_votes
from fedpriv.core.algorithm import Transport
from fedpriv.core.registry import TRANSPORTS

if TYPE_CHECKING:
    from fedpriv.core.config.experiment import Experiment


@TRANSPORTS.register
class SecureAggregation(Transport):
    """SecAgg (Bonawitz et al. 2017)."""

    name: ClassVar[str] = "secure-aggregation"
    handlers, queries = HANDLERS, QUERIES
    ask = staticmethod(ask_for_sum)
    votes_reply = staticmethod(masked_votes)
    ask_for_votes = staticmethod(ask_for_votes)

    @override
    def is_asked_for(self, experiment: "Experiment") -> bool:
        return experiment.federation.secure_aggregation
