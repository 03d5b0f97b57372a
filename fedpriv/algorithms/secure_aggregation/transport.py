"""Masked uploads as a way in which they reach the server."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.core.registry import TRANSPORTS
from fedpriv.core.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flwr.app import Context, Message, RecordDict
    from torch import Tensor

    from fedpriv.core.algorithm import Handler
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.transport import Query, SharedNoise, VotesSum
    from fedpriv.core.world import State
    from fedpriv.server.exchange import Federation, Reached, Replies


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

    @override
    def votes_reply(
        self, message: "Message", context: "Context", votes: "Tensor", classes: int, noise: "SharedNoise"
    ) -> "RecordDict":
        from fedpriv.algorithms.secure_aggregation.client import masked_votes

        return masked_votes(message, context, votes, classes, noise)

    @override
    def ask_for_votes(
        self,
        federation: "Reached",
        number: int,
        questions: "Mapping[int, RecordDict]",
        shape: tuple[int, int],
        each: int,
        sigma: float,
    ) -> "VotesSum":
        from fedpriv.algorithms.secure_aggregation.server import ask_for_votes

        return ask_for_votes(federation, number, questions, shape, each, sigma)
