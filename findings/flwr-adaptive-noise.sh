#!/usr/bin/env bash
# flwr 1.42.0: adaptive clipping clips to one round's norm and scales the round's noise by the next one's.
#
# Guess: a round's noise belongs to the norm that its updates were clipped to (Andrew et al. 2021, algorithm 1).
# Seen: the norm is changed between clipping and noise. Where it falls, noise is below noise_multiplier: with
# clip_norm_lr=0.2 by about 10 % if all updates were clipped, with 1.0 by 39 %. Where it rises, noise is above it.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 numpy==2.4.6
python -W ignore - <<'END'
import logging
import math

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
CLIENTS, NUMBERS = 1000, 10_000
np.random.seed(0)


def multiplier(length, rate):
    """Noise over the norm that updates of this length were clipped to, and the noise multiplier of updates."""
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), 1.0, CLIENTS, initial_clipping_norm=1.0, clip_norm_lr=rate
    )
    strategy.current_arrays = ArrayRecord([np.zeros(NUMBERS)])
    update = np.zeros(NUMBERS)
    update[0] = length
    replies = []
    for client in range(CLIENTS):
        asked = Message(RecordDict({}), dst_node_id=client + 1, message_type="train")
        records = {"arrays": ArrayRecord([update]), "metrics": MetricRecord({"num-examples": 1})}
        replies.append(Message(RecordDict(records), reply_to=asked))
    mean = strategy.aggregate_train(1, replies)[0].to_numpy_ndarrays()[0]
    assert abs(mean[0] - min(length, 1.0)) < 0.01  # updates were clipped to norm 1
    return mean[1:].std() * CLIENTS, strategy.noise_multiplier


for length, rate, factor in ((9.0, 0.2, math.exp(-0.1)), (9.0, 1.0, math.exp(-0.5)), (0.5, 0.2, math.exp(0.1))):
    found, asked = multiplier(length, rate)
    print(f"updates of length {length}, clip_norm_lr={rate}: noise {found:.3f} times the norm, asked for {asked:.3f}")
    assert abs(found / asked / factor - 1) < 0.08  # the count has noise of 5 %
END
