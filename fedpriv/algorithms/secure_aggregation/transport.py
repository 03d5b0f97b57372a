"""Masked uploads as a way in which they reach the server."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.core.registry import TRANSPORTS
from fedpriv.core.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedpriv.core.algorithm import Handler
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.transport import Query
    from fedpriv.core.world import State
    from fedpriv.server.exchange import Federation, Replies


@TRANSPORTS.register
class SecureAggregation(Transport):
    """SecAgg (Bonawitz et al. 2017)."""

    name: ClassVar[str] = "secure-aggregation"

    @override
    def is_asked_for(self, experiment: "Experiment") -> bool:
        return experiment.federation.secure_aggregation

    @override
    def client_handlers(self) -> "Mapping[str, Handler]":
        from fedpriv.algorithms.secure_aggregation.client import train_masked

        return {"masked": train_masked}

    @override
    def client_queries(self) -> "Mapping[str, Query]":
        from fedpriv.algorithms.secure_aggregation.client import QUERIES

        return QUERIES

    @override
    def ask(self, federation: "Federation", number: int, states: "Mapping[int, State]") -> "Replies":
        from fedpriv.algorithms.secure_aggregation.server import ask_for_sum

        return ask_for_sum(federation, number, states)
