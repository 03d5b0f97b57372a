#!/usr/bin/env bash
# flwr 1.42.0: Flower's mods for privacy raise ZeroDivisionError for a client whose training changed nothing.
#
# Guess: an update of zero is within every clipping norm: it is sent as it is, with the noise of LocalDpMod.
# Seen: the factor is the clipping norm over the update's norm. Where the learning rate has a warm-up from 0, or a client
# holds no batch, LocalDpMod, fixedclipping_mod and adaptiveclipping_mod raise, and the server gets an error in place of
# a reply. So a client without a change does not take part, and its missing upload tells that nothing was changed.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 numpy==2.4.6
python -W ignore - <<'END'
import logging

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def sent(mod, step):
    """What leaves of a client that adds the step to each of three weights."""

    def train(message, _):
        value = message.content["arrays"]["w"].numpy() + step
        records = {"arrays": ArrayRecord({"w": Array(value)}), "metrics": MetricRecord({"num-examples": 8})}
        return Message(RecordDict(records), reply_to=message)

    config = ConfigRecord({KEY_CLIPPING_NORM: 1.0})
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(3))}), "config": config})
    reply = mod(Message(content, dst_node_id=1, message_type="train"), context, train)
    return reply.content["arrays"]["w"].numpy()


local = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
for name, mod in (("LocalDpMod", local), ("fixed", fixedclipping_mod), ("adaptive", adaptiveclipping_mod)):
    print(f"{name}: a step of 0.1 is sent as {sent(mod, 0.1).round(2)}")
    try:
        sent(mod, 0.0)
    except ZeroDivisionError as error:
        print(f"{name}: a step of 0 raises {type(error).__name__}: {error}")
    else:
        raise AssertionError(name)
END
