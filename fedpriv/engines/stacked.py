"""The stacked engine: an inline engine that tells the clients' app which clients are about to be asked."""

from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from typing_extensions import override

from fedpriv.clients.cohort import CohortApp
from fedpriv.engines.inline import InlineGrid, run_server

_TRAINS = ("train", "train.masked")


def run_stacked(server_app: ServerApp, client_app: ClientApp, clients: int) -> None:
    """Run the server's main function here; clients of a round that do the same work are trained as one stack."""
    run_server(server_app, StackedGrid(client_app, clients))


@dataclass
class StackedGrid(InlineGrid):
    """Answers as the inline grid does; an app that trains no clients together works as it does there."""

    @override
    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        asked = list(messages)
        if isinstance(self.client_app, CohortApp):
            training = [message for message in asked if message.metadata.message_type in _TRAINS]
            self.client_app.cohort.expect({message.metadata.dst_node_id - 1: message for message in training})
        return super().push_messages(asked)
