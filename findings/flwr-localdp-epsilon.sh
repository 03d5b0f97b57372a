#!/usr/bin/env bash
# flwr 1.42.0: LocalDpMod with epsilon = 50 adds noise that proves epsilon 96.
#
# Guess: the formula behind it is one of the older ones, which ask for more noise than is needed.
# Seen: it is sensitivity sqrt(2 log(1.25 / delta)) / epsilon, which is proven up to epsilon = 1. There it proves 0.75,
# at 8 7.91, but at 10 10.39 and at 50 96.4 (the exact curve of a normal law at delta 1e-5). Local privacy for whole
# updates is run at such figures. And a clipped update differs from another one by twice the clipping norm: with
# sensitivity = clipping_norm the figure at 8 is 18.9. Any epsilon above 0 is taken.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 numpy==2.4.6 scipy==1.17.1
python -W ignore - <<'END'
import logging

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.supercore.task_identity import TaskIdentity
from scipy.optimize import brentq
from scipy.stats import norm

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
np.random.seed(0)


def deviation(epsilon, sensitivity):
    """The standard deviation of what arrives of an update of zero."""

    def train(message, _):
        records = {"arrays": ArrayRecord([np.full(400_000, 1e-9)]), "metrics": MetricRecord({"num-examples": 8})}
        return Message(RecordDict(records), reply_to=message)

    content = RecordDict({"arrays": ArrayRecord([np.zeros(400_000)]), "config": ConfigRecord({})})
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=sensitivity, epsilon=epsilon, delta=1e-5)
    reply = mod(Message(content, dst_node_id=1, message_type="train"), context, train)
    return reply.content["arrays"].to_numpy_ndarrays()[0].std()


def proven(moved, deviation, delta=1e-5):
    """Epsilon of a normal law that moves so far (Balle and Wang 2018)."""
    mu = moved / deviation
    second = lambda epsilon: np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
    return brentq(lambda epsilon: norm.cdf(mu / 2 - epsilon / mu) - second(epsilon) - delta, 0, 1000)


for epsilon, sensitivity, right in ((1, 2.0, 0.751), (8, 2.0, 7.914), (10, 2.0, 10.39), (50, 2.0, 96.4), (8, 1.0, 18.9)):
    found = proven(2.0, deviation(epsilon, sensitivity))
    print(f"epsilon {epsilon}, sensitivity {sensitivity:g}: the noise proves {found:.3f}")
    assert abs(found / right - 1) < 0.01
END
