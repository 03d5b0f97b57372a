#!/usr/bin/env bash
# transformers 5.24.0, flwr 1.42.0: after a Trainer, LocalDpMod adds the same noise at every client in every round.
#
# Guess: a Trainer's seed decides the order of examples, and noise that is added later to what leaves is random.
# Seen: making a Trainer seeds numpy's global generator as well (seed = 42 unless TrainingArguments say another one), and
# that is what LocalDpMod draws from. Two clients with other data, in two rounds each, get the noise that
# numpy.random.RandomState(42) draws first. Whoever knows that takes it off, and has the clipped update to float32's last
# digits; epsilon says nothing about it. numpy.random.seed() after the training, without a number, makes noise random.
. "$(dirname "$0")/packages.bash"
packages transformers==5.24.0 accelerate==1.15.0 flwr==1.42.0 torch==2.15.0 numpy==2.4.6
python -W ignore - <<'END'
import logging
import tempfile
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.supercore.task_identity import TaskIdentity
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
CONFIG = ViTConfig(**SIZES, image_size=4, patch_size=2, num_channels=1, num_labels=2)
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
BEFORE, CLIP = ViTForImageClassification(CONFIG).state_dict(), 0.1


def flat(arrays):
    return np.concatenate([value.numpy().ravel() for value in arrays.values()])


def noise(settings, afterwards):
    """What is in a client's reply beside its clipped update; torch and numpy begin with seeds of the system."""
    torch.seed()
    np.random.seed()
    updates = []

    def train(message, _):
        net = ViTForImageClassification(CONFIG)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        rows = [{"pixel_values": torch.rand(1, 4, 4) * place, "labels": torch.tensor(place % 2)} for place in range(8)]
        with redirect_stdout(StringIO()):
            Trainer(net, TrainingArguments(tempfile.mkdtemp(), **QUIET, **settings), train_dataset=rows).train()
        updates.append(flat(net.state_dict()) - flat(BEFORE))
        afterwards()
        records = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": 8})}
        return Message(RecordDict(records), reply_to=message)

    content = RecordDict({"arrays": ArrayRecord(BEFORE), "config": ConfigRecord({})})
    mod = LocalDpMod(clipping_norm=CLIP, sensitivity=2 * CLIP, epsilon=1.0, delta=1e-5)
    reply = mod(Message(content, dst_node_id=1, message_type="train"), context, train)
    left, (update,) = flat(reply.content["arrays"].to_torch_state_dict()) - flat(BEFORE), updates
    return left - update * min(1.0, CLIP / np.linalg.norm(update))


deviation = 2 * CLIP * np.sqrt(2 * np.log(1.25 / 1e-5))
for what, settings, afterwards, known in (
    ("as it is", {}, lambda: None, 42),
    ("seed = 7", {"seed": 7}, lambda: None, 7),
    ("numpy.random.seed() after training", {}, np.random.seed, None),
):
    first, second = noise(settings, afterwards), noise(settings, afterwards)
    print(f"{what}: a reply's noise {first[:3].round(4)}, another one's {second[:3].round(4)}")
    assert np.allclose(first, second, atol=1e-5) == (known is not None)
    if known is not None:
        drawn = np.random.RandomState(known).normal(0, deviation, first.size)
        print(f"  RandomState({known}) draws {drawn[:3].round(4)}: off by {np.abs(first - drawn).max():.0e} at most")
        assert np.allclose(first, drawn, atol=1e-5)
END
