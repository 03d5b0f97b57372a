#!/usr/bin/env bash
# flwr 1.42.0, torch 2.15.0: FedAdam and FedAvgM drive BatchNorm's running variance below zero; the model then returns NaN.
#
# Guess: the server's optimiser moves weights, and statistics are averaged as under FedAvg.
# Seen: it moves whatever the state_dict holds. Clients whose features have variance 0.02 send a running variance that
# falls from 1 towards 0.02; momentum carries the server's past it: below zero in round 13 with FedAdam as it comes, in
# round 5 with FedAvgM and momentum 0.9, down to -0.25 and -0.57. The global model then answers NaN, and a client that
# evaluates it sees a loss of NaN with weights that are all finite. FedAvg stays between 0.02 and 1. Nothing warns.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 torch==2.15.0 numpy==2.4.6
python -W ignore - <<'END'
import logging

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
x = 0.02**0.5 * torch.randn(256, 3, generator=torch.Generator().manual_seed(0))


class Nodes:
    def get_node_ids(self):
        return [1, 2]


def trained(arrays):
    """What a client sends: the statistics after one batch; its weights stay as they are."""
    network = nn.BatchNorm1d(3)
    network.load_state_dict(arrays.to_torch_state_dict())
    network(x)
    records = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(RecordDict(records), dst_node_id=1, message_type="train")


for strategy in (FedAvg(), FedAdam(), FedAvgM(server_momentum=0.9)):
    arrays, least, first = ArrayRecord(nn.BatchNorm1d(3).state_dict()), 1.0, None
    for number in range(1, 31):
        list(strategy.configure_train(number, arrays, ConfigRecord(), Nodes()))
        arrays, _ = strategy.aggregate_train(number, [trained(arrays), trained(arrays)])
        variance = arrays["running_var"].numpy().min()
        least = min(least, variance)
        if variance < 0 and first is None:
            network = nn.BatchNorm1d(3).eval()
            network.load_state_dict(arrays.to_torch_state_dict())
            first = number
            assert network(x).isnan().any() and all(value.isfinite().all() for value in network.state_dict().values())
    below = f"below zero in round {first}" if first else "never below zero"
    print(f"{type(strategy).__name__}: the least running variance is {least:.2f}; {below}")
    assert (first is None) == (type(strategy) is FedAvg)
END
