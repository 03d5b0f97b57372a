#!/usr/bin/env bash
# flwr 1.42.0: Krum's distances are float32 differences of large squares; in a large network it takes any upload.
#
# Guess: of eight uploads Krum takes one that is near to the others, whatever the network, and never the one whose update
# is five times as long as theirs.
# Seen: it compares whole models, by |x|^2 + |y|^2 - 2 x y in float32. In a network of 200,000 normal numbers (length 447)
# whose clients move it by 0.03, two of them are 0.0018 apart, and 0.2 or less than 0 by Krum: it takes the long update in
# 5 of 40 rounds, as often as any other. By distances in float64, or where clients move it by 1.0, it never does. Nothing
# warns.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 numpy==2.4.6
python -W ignore - <<'END'
import logging

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Krum
from flwr.serverapp.strategy.multikrum import compute_distances
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
CLIENTS, NUMBERS, ROUNDS, LONG = 8, 200_000, 40, 5


def taken(models):
    """Which model Krum returns, with one client assumed to be malicious."""
    replies = []
    for client, model in enumerate(models):
        asked = Message(RecordDict({}), dst_node_id=client + 1, message_type="train")
        records = {"arrays": ArrayRecord([model]), "metrics": MetricRecord({"num-examples": 8})}
        replies.append(Message(RecordDict(records), reply_to=asked))
    arrays, _ = Krum(num_malicious_nodes=1).aggregate_train(1, replies)
    return next(client for client, model in enumerate(models) if np.array_equal(model, arrays.to_numpy_ndarrays()[0]))


def nearest(distances):
    """Krum's choice by these distances: the smallest sum of those to the nearest n - f - 2 others."""
    return int(np.argmin(np.sort(distances, axis=1)[:, 1 : CLIENTS - 2].sum(axis=1)))


for length, least, most in ((1.0, 0, 0), (0.03, 1, 16)):
    picked, right = [], []
    for number in range(ROUNDS):
        draws = np.random.default_rng(number)
        start = draws.normal(size=NUMBERS).astype(np.float32)
        updates = draws.normal(size=(CLIENTS, NUMBERS))
        updates *= length / np.linalg.norm(updates, axis=1, keepdims=True)
        updates[0] *= LONG
        models = [(start + update).astype(np.float32) for update in updates]
        picked.append(taken(models))
        exact = np.array([[np.square(x - y, dtype=np.float64).sum() for y in models] for x in models])
        right.append(nearest(exact))
    theirs = compute_distances([ArrayRecord([model]) for model in models])
    print(f"updates of length {length}: the long one is taken in {picked.count(0)} of {ROUNDS} rounds, by distances in "
          f"float64 in {right.count(0)}; from client 1 to 2 it is {theirs[1][2]:.4f} here, in truth {exact[1][2]:.4f}")
    assert least <= picked.count(0) <= most and right.count(0) == 0
assert theirs.min() < 0
END
