#!/usr/bin/env bash
# flwr 1.42.0: SecAgg+ rounds the mean of clients with few examples far more coarsely than that of clients with many.
#
# Guess: a value is rounded to the grid of clipping_range and quantization_range, steps of 3.8e-6 as they come, whatever
# the number of examples.
# Seen: clients multiply their parameters by num-examples / max_weight, 1000 as it comes, before they round, and the server
# divides by it again. Of four clients with 1,000 examples each the mean is off by 0.8e-6 (root mean square), with 100 by
# 8e-6, with 5 by 1.6e-4: as much as a small learning rate changes parameters in a round. Nothing warns. max_weight of the
# largest client's number of examples, or num-examples = max_weight for all where a plain mean is wanted, avoids it.
. "$(dirname "$0")/packages.bash"
packages 'flwr[simulation]==1.42.0' numpy==2.4.6
python -W ignore - <<'END'
import logging

import numpy as np
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

logging.getLogger("flwr").setLevel("ERROR")
CLIENTS = 4
SENT = np.random.default_rng(0).normal(scale=0.05, size=20_000).astype(np.float32)


def error(examples):
    """The root mean square of what the mean of clients that all send the same is off by."""
    server, found = ServerApp(), []

    class Client(NumPyClient):
        def fit(self, parameters, config):
            return [SENT.copy()], examples, {}

    @server.main()
    def main(grid, context):
        strategy = FedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=CLIENTS,
            min_available_clients=CLIENTS,
            initial_parameters=ndarrays_to_parameters([np.zeros_like(SENT)]),
        )
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=1), strategy=strategy)
        DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(3, 2))(grid, legacy)
        found.extend(each.numpy() for each in legacy.state.array_records["parameters"].values())

    run_simulation(server, ClientApp(client_fn=lambda _: Client().to_client(), mods=[secaggplus_mod]), CLIENTS)
    return float(np.sqrt(np.square(found[0] - SENT).mean()))


errors = {examples: error(examples) for examples in (1000, 100, 5)}
for examples, found in errors.items():
    print(f"{examples} examples a client: the mean is off by {found:.2g}")
assert errors[1000] < 2e-6 and 8 < errors[100] / errors[1000] < 12 and 150 < errors[5] / errors[1000] < 250
END
