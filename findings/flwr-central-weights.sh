#!/usr/bin/env bash
# flwr 1.42.0: central DP's wrapper calibrates noise for a plain mean, and adds it to a mean weighted by num-examples.
#
# Guess: noise_multiplier is noise over what one client can move the mean, as in DP-FedAvg.
# Seen: noise is noise_multiplier * clipping_norm / num_sampled_clients, whatever FedAvg weighs the clients with. Of ten
# clients, one that says it has 91 % of the examples moves the mean by 0.91 clipping norms: nine times what the noise is
# for. Epsilon of a round at delta 1e-5 is 79.4 where equal weights would have 4.4 (the exact curve of a normal law).
# Nothing warns; only with accountant= are unequal weights refused.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 numpy==2.4.6 scipy==1.17.1
python -W ignore - <<'END'
import logging

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity
from scipy.optimize import brentq
from scipy.stats import norm

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
CLIENTS, NORM, NUMBERS = 10, 1.0, 100_000
np.random.seed(0)


def mean(examples, moves):
    """What the wrapper makes of one round in which the first client's update is `moves` long and the others' are tiny."""
    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, NORM, CLIENTS)
    strategy.current_arrays = ArrayRecord([np.zeros(NUMBERS)])
    replies = []
    for client, count in enumerate(examples):
        update = np.full(NUMBERS, 1e-12)
        update[0] = moves if client == 0 else 0.0
        asked = Message(RecordDict({}), dst_node_id=client + 1, message_type="train")
        records = {"arrays": ArrayRecord([update]), "metrics": MetricRecord({"num-examples": count})}
        replies.append(Message(RecordDict(records), reply_to=asked))
    return strategy.aggregate_train(1, replies)[0].to_numpy_ndarrays()[0]


def proven(moved, deviation, delta=1e-5):
    """Epsilon of a normal law that moves so far (Balle and Wang 2018)."""
    mu = moved / deviation
    second = lambda epsilon: np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
    return brentq(lambda epsilon: norm.cdf(mu / 2 - epsilon / mu) - second(epsilon) - delta, 0, 1000)


for examples, right in (([100] * 10, 4.38), ([910] + [10] * 9, 79.4)):
    state = np.random.get_state()
    with_it = mean(examples, NORM)
    np.random.set_state(state)  # the same noise again
    without = mean(examples, 0.0)
    moved, deviation = abs(with_it - without)[0], with_it[1:].std()
    print(f"{examples}: moved by {moved:.3f}, noise {deviation:.3f}, epsilon {proven(moved, deviation):.2f}")
    assert abs(deviation - NORM / CLIENTS) < 0.001
    assert abs(proven(moved, 0.1) / right - 1) < 0.01
END
