"""The Flower ClientApp: answers who it is, and trains when asked, or does what an algorithm adds."""

from functools import partial
from typing import TYPE_CHECKING

from flwr.app import Context, Message, MetricRecord, RecordDict

from fedpriv.clients.answering import Answering, partition_of, trained_with
from fedpriv.clients.cohort import CohortApp
from fedpriv.clients.memory import remembers
from fedpriv.core.algorithm import transport_of
from fedpriv.core.randomness import Secret
from fedpriv.core.registry import ALGORITHMS, TRANSPORTS
from fedpriv.core.wire import pack

if TYPE_CHECKING:
    from fedpriv.core.algorithm import Handler


def client_app(secret: Secret | None) -> CohortApp:
    """Return the app of a run."""
    bound = CohortApp()

    def answer(handler: "Handler", message: Message, context: Context) -> Message:
        return handler(Answering(secret, bound.origin, bound.cohort), message, context)

    bound.train()(partial(answer, train))
    added = [kind().client_handlers() for kind in ALGORITHMS.values()]
    for handlers in (*added, *(transport.handlers for transport in TRANSPORTS.values())):
        for kind, handler in handlers.items():
            bound.train(kind)(partial(answer, handler))
    bound.query()(identify)
    for transport in TRANSPORTS.values():
        for kind, query in transport.queries.items():
            bound.query(kind)(query)
    return bound


def train(answering: Answering, message: Message, context: Context) -> Message:
    """Train for one round and reply with the upload, without a training loss, which would leak."""
    world, upload, _ = answering.trained(message, context, ("clients", "server"))
    if transport_of(world.experiment) is not None:
        raise ValueError("the settings say that uploads are masked; this one was asked for as it is")
    reply = RecordDict({"upload": pack(upload.parameters), "buffers": pack(upload.buffers)})
    reply["client"] = trained_with(world, partition_of(context))
    return Message(reply, reply_to=message)


def identify(message: Message, context: Context) -> Message:
    """Reply with the number of the partition that this client holds, and whether it remembers an earlier question."""
    told = MetricRecord({"partition": partition_of(context)})
    if remembers(context):
        told["remembers"] = 1
    return Message(RecordDict({"client": told}), reply_to=message)


app = client_app(None)
