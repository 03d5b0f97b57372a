#!/usr/bin/env bash
# flwr 1.42.0, torch 2.15.0: parameters without dimensions leave a client unclipped and without noise.
#
# Guess: LocalDpMod clips the update and adds noise to all of it.
# Seen: a parameter of shape (), such as CLIP's logit_scale or a learnt temperature, arrives as the client made it:
# moved by 100 where the clipping norm is 1, and to the last bit. The same number in the shape (1,) is clipped and gets
# noise. Arithmetic on a numpy array without dimensions returns a new number, and the loop that works in place drops it.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 torch==2.15.0 numpy==2.4.6
python -W ignore - <<'END'
import logging

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def train(message, _):
    after = {name: value + 100 for name, value in message.content["arrays"].to_torch_state_dict().items()}
    records = {"arrays": ArrayRecord(after), "metrics": MetricRecord({"num-examples": 8})}
    return Message(RecordDict(records), reply_to=message)


for shape, noisy in (((), False), ((1,), True), ((2, 2), True)):
    content = RecordDict({"arrays": ArrayRecord({"scale": torch.ones(shape)}), "config": ConfigRecord({})})
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
    reply = mod(Message(content, dst_node_id=1, message_type="train"), context, train)
    arrived = reply.content["arrays"].to_torch_state_dict()["scale"]
    print(f"shape {shape}: {arrived.tolist()}")
    assert torch.equal(arrived, torch.full(shape, 101.0)) != noisy
    assert arrived.abs().max() < 60 or not noisy
END
