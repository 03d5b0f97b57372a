#!/usr/bin/env bash
# flwr 1.42.0: a simulation whose ServerApp seeds random and numpy samples other clients each time that it is started.
#
# Guess: with random.seed(0) and numpy.random.seed(0) before the strategy starts, rounds repeat.
# Seen: strategies draw from a list of node ids, which the simulation makes up anew in each run; the seed fixes places in
# that list, and not partitions. Two runs of the same file train partitions such as 0, 2, 7 and 1, 2, 4 in round 1 (3 of
# 10 clients, 8 rounds; that all 8 agree by chance: 1e-16). With fraction_train=1 nothing is sampled.
. "$(dirname "$0")/packages.bash"
packages 'flwr[simulation]==1.42.0' numpy==2.4.6
cat >app.py <<'END'
import logging
import random

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

logging.getLogger("flwr").setLevel("ERROR")
server, client, sampled = ServerApp(), ClientApp(), []


@client.train()
def train(message, context):
    metrics = MetricRecord({"num-examples": 1, "partition": int(context.node_config["partition-id"])})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)


def note(records, _):
    sampled.append(sorted(record["metrics"]["partition"] for record in records))
    return MetricRecord({})


@server.main()
def main(grid, context):
    random.seed(0)
    np.random.seed(0)
    strategy = FedAvg(fraction_train=0.3, fraction_evaluate=0.0, train_metrics_aggr_fn=note)
    strategy.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(2)]), num_rounds=8)


run_simulation(server, client, 10)
print(*sampled)
END
first="$(python -W ignore app.py 2>/dev/null | tail -n 1)"
second="$(python -W ignore app.py 2>/dev/null | tail -n 1)"
printf 'one run:     %s\nthe next one: %s\n' "$first" "$second"
[ "$(grep -o '\[' <<<"$first" | wc -l)" = 8 ] && [ "$first" != "$second" ]
