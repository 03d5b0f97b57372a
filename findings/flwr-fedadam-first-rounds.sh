#!/usr/bin/env bash
# flwr 1.42.0: FedAdam's steps are neither those of its paper nor Adam's: its bias correction is the next round's.
#
# Guess: round t is that of the cited paper (Reddi et al. 2021, without bias correction, as FedYogi next to it), or of Adam
# (Kingma and Ba 2015, which the code cites for its correction).
# Seen: with updates that are always the same and eta = 0.1, Adam moves a number by 0.1 in each round, the paper by 0.1,
# 0.135, 0.157, ... (FedYogi nearly so). FedAdam moves it by 0.074, 0.086, 0.091, ...: it takes 1 - beta^(t + 1) in round t.
# In ten rounds it goes 0.93 as far as Adam, and half as far as the paper, so that another's eta is not the same here.
. "$(dirname "$0")/packages.bash"
packages flwr==1.42.0 numpy==2.4.6
python -W ignore - <<'END'
import logging

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedYogi
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel("ERROR")
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in an app that runs
ETA, BETA_1, BETA_2, TAU, ROUNDS = 0.1, 0.9, 0.99, 1e-9, 10  # Flower's defaults but for tau


def steps(kind):
    """How far one number moves in each round, if the client always sends back one more than it got."""
    strategy, model, moved = kind(eta=ETA, beta_1=BETA_1, beta_2=BETA_2, tau=TAU), np.zeros(1), []
    for number in range(1, ROUNDS + 1):
        strategy.current_arrays = {"0": model}
        asked = Message(RecordDict({}), dst_node_id=1, message_type="train")
        records = {"arrays": ArrayRecord([model + 1.0]), "metrics": MetricRecord({"num-examples": 8})}
        arrays, _ = strategy.aggregate_train(number, [Message(RecordDict(records), reply_to=asked)])
        moved.append(arrays.to_numpy_ndarrays()[0].item() - model.item())
        model = arrays.to_numpy_ndarrays()[0]
    return np.array(moved)


rounds = np.arange(1, ROUNDS + 1)
paper = ETA * (1 - BETA_1**rounds) / np.sqrt(1 - BETA_2**rounds)  # the means of squares and of updates, from zero
correction = lambda t: np.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
adam, shifted, found, yogi = paper * correction(rounds), paper * correction(rounds + 1), steps(FedAdam), steps(FedYogi)
for name, values in {"the paper": paper, "FedYogi": yogi, "Adam": adam, "FedAdam": found}.items():
    print(f"{name}: {', '.join(f'{value:.3f}' for value in values[:4])}, ...; in {ROUNDS} rounds {values.sum():.2f}")
assert np.allclose(found, shifted, rtol=1e-6) and np.allclose(yogi, paper, rtol=0.04)
assert abs(found[0] - 0.074) < 0.001 and np.allclose(adam, ETA)
assert abs(found.sum() / adam.sum() - 0.93) < 0.005 and abs(found.sum() / paper.sum() - 0.53) < 0.02
END
