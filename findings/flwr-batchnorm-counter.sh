#!/usr/bin/env bash
# flwr 1.42.0, torch 2.15.0: with clipping, a network with BatchNorm hardly trains: its counter takes the clipping norm.
#
# Guess: a clipping norm of 1 leaves an update of the weights of length 0.3 as it is.
# Seen: after 100 steps a hundredth of it, 0.003, is left. The norm that is clipped is that of the whole state_dict, and
# BatchNorm's num_batches_tracked, which is in it, has grown by 100. The counter itself has no dimensions and is not
# scaled: it arrives as 100. So do the mods fixedclipping_mod and adaptiveclipping_mod and the strategies that clip on
# the server, which use the same function. Nothing warns; noise then is 100 times what the weights were promised.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 torch==2.15.0 numpy==2.4.6
python -W ignore - <<'END'
import logging

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
before = {name: value.clone() for name, value in nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).state_dict().items()}


def sent(steps):
    """What the server gets after so many steps that moved the weights by 0.3 together; clipped to 1, without noise."""

    def train(message, _):
        after = message.content["arrays"].to_torch_state_dict()
        after["0.weight"] = after["0.weight"] + 0.05
        after["1.num_batches_tracked"] = after["1.num_batches_tracked"] + steps
        records = {"arrays": ArrayRecord(after), "metrics": MetricRecord({"num-examples": 8})}
        return Message(RecordDict(records), reply_to=message)

    content = RecordDict({"arrays": ArrayRecord(before), "config": ConfigRecord({})})
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=0.0, epsilon=1.0, delta=1e-5)
    reply = mod(Message(content, dst_node_id=1, message_type="train"), context, train)
    arrays = reply.content["arrays"].to_torch_state_dict()
    return (arrays["0.weight"] - before["0.weight"]).norm().item(), arrays["1.num_batches_tracked"].item()


for steps, left in ((0, 0.3), (1, 0.2873), (100, 0.003)):
    moved, counter = sent(steps)
    print(f"{steps} steps: of 0.3 the weights keep {moved:.4f}; the counter says {counter}")
    assert abs(moved - left) < 1e-4 and counter == steps
END
