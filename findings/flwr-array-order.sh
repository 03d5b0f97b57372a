#!/usr/bin/env bash
# flwr 1.42.0: FedAvgM and QFedAvg pair arrays by position, FedAvg and FedAdam by name.
#
# Guess: an ArrayRecord is a dictionary, and a strategy that checks that all replies have the server's keys matches
# arrays by them.
# Seen: clients that reply with the same names in another order (sorted, as JAX's trees and safetensors' files are) get
# the right mean from FedAvg and FedAdam. FedAvgM with a server learning rate of 0.5 returns 5.25 in both arrays, where
# 0.25 and 10.25 are right, and QFedAvg exchanges the two arrays, without an error where shapes are equal.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 numpy==2.4.6
python -W ignore - <<'END'
import logging

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, QFedAvg
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs


class Nodes:
    def get_node_ids(self):
        return [1, 2]


def record(**values):
    return ArrayRecord({name: Array(np.full((2, 2), value)) for name, value in values.items()})


def reply(arrays):
    metrics = MetricRecord({"num-examples": 5, "train_loss": 1.0})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), dst_node_id=1, message_type="train")


def result(strategy, order):
    list(strategy.configure_train(1, record(weight=0.0, bias=10.0), ConfigRecord(), Nodes()))
    sent = {"weight": 0.5, "bias": 10.5}
    replies = [reply(record(**{name: sent[name] for name in order})) for _ in range(2)]
    arrays, _ = strategy.aggregate_train(1, replies)
    return {name: round(float(arrays[name].numpy().mean()), 3) for name in sent}


strategies = {
    "FedAvg": FedAvg,
    "FedAdam": FedAdam,
    "FedAvgM": lambda: FedAvgM(server_learning_rate=0.5),
    "QFedAvg": lambda: QFedAvg(client_learning_rate=0.1, q=0.0),
}
for name, strategy in strategies.items():
    kept, turned = result(strategy(), ["weight", "bias"]), result(strategy(), ["bias", "weight"])
    print(f"{name}: {kept} in the server's order, {turned} in the other")
    assert (kept == turned) == (name in {"FedAvg", "FedAdam"})
    assert kept["weight"] < 1 < kept["bias"]
END
