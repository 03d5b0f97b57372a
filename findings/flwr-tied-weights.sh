#!/usr/bin/env bash
# flwr 1.42.0, torch 2.15.0: Flower's mods for privacy clip and noise tied weights twice, as two arrays.
#
# Guess: a table that is the input and the output of a language model is one parameter, as for optimisers and for clipping
# in torch, which list it once.
# Seen: state_dict() lists both names, so the update holds the same change twice. Its norm is sqrt(2) too large, and a change
# of length 1 is clipped to 0.71 at clipping norm 1. The two copies get different noise, and whoever loads them keeps the
# second one alone. So the table has 3 dB less signal for the same noise and epsilon, and the upload is twice as large.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 numpy==2.4.6 torch==2.15.0
python -W ignore - <<'END'
import logging

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.write = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.write.weight = self.read.weight


start = {name: value.clone() for name, value in Language().state_dict().items()}


def sent(mod):
    """The change that leaves under each name, of a client whose training changed one number of the table by 1."""

    def train(message, _):
        model = Language()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        with torch.no_grad():
            model.read.weight[3, 0] += 1
        records = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 8})}
        return Message(RecordDict(records), reply_to=message)

    content = RecordDict({"arrays": ArrayRecord(start), "config": ConfigRecord({KEY_CLIPPING_NORM: 1.0})})
    reply = mod(Message(content, dst_node_id=1, message_type="train"), context, train)
    return reply.content["arrays"].to_torch_state_dict()


assert len(list(Language().parameters())) == 1 and len(start) == 2
clipped = {name: float((value - start[name]).norm()) for name, value in sent(fixedclipping_mod).items()}
print(f"a change of length 1, clipped to 1: {clipped}")
assert all(abs(length - 0.5**0.5) < 1e-3 for length in clipped.values())
noisy = sent(LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=8.0, delta=1e-5))
model = Language()
model.load_state_dict(noisy)
apart = float((noisy["read.weight"] - noisy["write.weight"]).std())
print(f"with LocalDpMod the copies differ by {apart:.2f} on average, and the model has the second one")
assert apart > 0.5 and torch.equal(model.read.weight.data, noisy["write.weight"])
END
