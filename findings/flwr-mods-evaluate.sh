#!/usr/bin/env bash
# flwr 1.42.0: Flower's mods for privacy, given to a ClientApp, turn every answer to evaluate into an error.
#
# Guess: they are for training, as their documentation says ("operates on messages of type MessageType.TRAIN"), and pass
# all other messages on, as the mods of the same names for older apps (flwr.client.mod) do.
# Seen: LocalDpMod, fixedclipping_mod and adaptiveclipping_mod look for one ArrayRecord in the reply to evaluate too, or
# for a clipping norm in its message, and answer with an error: that the wrapper may be missing, though it is there. So
# a strategy with fraction_evaluate above 0 has no metrics of its clients. The error about a reply is addressed to the
# client itself; Flower's simulation drops it, and the server waits until its timeout, an hour. Given to the function,
# @app.train(mods=[...]), the same mods leave evaluate alone.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 numpy==2.4.6
python -W ignore - <<'END'
import logging

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import LocalDpMod as OlderLocalDpMod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel("CRITICAL")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def evaluated(everywhere, at_train):
    """What a client answers to evaluate, as Flower's own strategies ask it."""
    app = ClientApp(mods=everywhere)

    @app.train(mods=at_train)
    def train(message, _):
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    @app.evaluate()
    def evaluate(message, _):
        return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.9, "num-examples": 8})}), reply_to=message)

    arrays = ArrayRecord({"w": Array(np.zeros(3))})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    reply = app(Message(content, dst_node_id=1, message_type="evaluate"), context)
    return reply.error.reason if reply.has_error() else dict(reply.content["metrics"])


numbers = {"clipping_norm": 1.0, "sensitivity": 2.0, "epsilon": 0.9, "delta": 1e-5}
for mod in (LocalDpMod(**numbers), fixedclipping_mod, adaptiveclipping_mod):
    name = getattr(mod, "__name__", type(mod).__name__)
    failed, fine = evaluated([mod], []), evaluated([], [mod])
    print(f"ClientApp(mods=[{name}]): evaluate is answered with an error: {failed}")
    print(f"@app.train(mods=[{name}]): evaluate is answered with {fine}")
    assert isinstance(failed, str) and fine == {"accuracy": 0.9, "num-examples": 8}
older = evaluated([OlderLocalDpMod(**numbers)], [])
print(f"ClientApp(mods=[LocalDpMod of older apps]): evaluate is answered with {older}")
assert older == {"accuracy": 0.9, "num-examples": 8}
END
