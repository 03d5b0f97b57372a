#!/usr/bin/env bash
# flwr 1.42.0: central DP around FedAdam, FedYogi or FedAdagrad adds its noise after the server's optimiser, not before.
#
# Guess: clipped updates are averaged, the mean gets noise, and the optimiser steps along the noisy mean, as in DP-FedAdam.
# Seen: the wrapper adds noise_multiplier * clipping_norm / clients to what the strategy returns, and these return the
# model after their step, which divides by the size of past means. With ten clients and 100,000 numbers one update moves
# FedAvg's model by 1.0 standard deviations of the noise, FedAdam's by 7.2, FedAdagrad's by 76: a round's epsilon at delta
# 1e-5 is 4.4, 56 and 3,200 (the exact curve of a normal law). Nothing warns; only with accountant= are they refused.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 numpy==2.4.6 scipy==1.17.1
python -W ignore - <<'END'
import logging

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdagrad, FedAdam, FedAvg
from flwr.supercore.task_identity import TaskIdentity
from scipy.optimize import brentq
from scipy.stats import norm

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
CLIENTS, NUMBERS, CLIP = 10, 100_000, 1.0


def after_a_round(strategy, length):
    """The model if one client's update has this length, and all others changed next to nothing; the noise is the same."""
    np.random.seed(0)
    private = DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, CLIP, CLIENTS)
    private.current_arrays = ArrayRecord([np.zeros(NUMBERS)])
    strategy.current_arrays = {"0": np.zeros(NUMBERS)}
    replies = []
    for client in range(CLIENTS):
        update = np.full(NUMBERS, (length if client == 0 else 1e-9) / NUMBERS**0.5)
        asked = Message(RecordDict({}), dst_node_id=client + 1, message_type="train")
        records = {"arrays": ArrayRecord([update]), "metrics": MetricRecord({"num-examples": 8})}
        replies.append(Message(RecordDict(records), reply_to=asked))
    return private.aggregate_train(1, replies)[0].to_numpy_ndarrays()[0]


def epsilon(shift, delta=1e-5):
    """Of a normal law that is shifted by so many standard deviations (Balle and Wang 2018, theorem 8)."""
    upper = lambda e: norm.cdf(shift / 2 - e / shift) - np.exp(e + norm.logcdf(-shift / 2 - e / shift))
    return brentq(lambda e: upper(e) - delta, 0, 10_000)


for kind, shift, proven in ((FedAvg, 1.0, 4.38), (FedAdam, 7.2, 55.8), (FedAdagrad, 76, 3_200)):
    with_it, without = after_a_round(kind(), CLIP), after_a_round(kind(), 1e-9)
    moved = np.linalg.norm(with_it - without) / 0.1
    print(f"{kind.__name__}: noise {without.std():.3f}, one client moves {moved:.2f} of it, epsilon {epsilon(moved):,.2f}")
    assert abs(without.std() - 0.1) < 0.001
    assert abs(moved / shift - 1) < 0.02 and abs(epsilon(moved) / proven - 1) < 0.05
END
