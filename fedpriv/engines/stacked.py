"""The stacked engine: an inline engine that tells the clients' app which clients are about to be asked."""

from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import Message
from typing_extensions import override

from fedpriv.clients.cohort import CohortApp
from fedpriv.engines.inline import InlineGrid

_TRAINS = ("train", "train.masked")


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
