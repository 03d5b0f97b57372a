#!/usr/bin/env bash
# flwr 1.42.0, numpy 2.4.6: SecAgg+ returns a wrong mean of parameters without dimensions.
#
# Guess: under SecAgg+ FedAvg has the mean of the clients' parameters, as without it, but for rounding.
# Seen: clients that all send 0.25 get 0.25 back in the shapes (1,) and (2, 2). In the shape (), as of CLIP's
# logit_scale or a learnt temperature, it is 16.01 with 3 clients and 24.01 with 4: n (0.25 w + 8) - 8, the sum of n
# values with their weight w = 10 / 1000, shifted by the clipping range. The server takes shift and weight away in
# place, and arithmetic on a numpy array without dimensions returns a number, on which that has no effect. Nothing warns.
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
SHAPES = ((), (1,), (2, 2))


class Client(NumPyClient):
    def fit(self, parameters, config):
        return [np.full(shape, 0.25, np.float32) for shape in SHAPES], 10, {}


def aggregated(clients, workflow):
    server, found = ServerApp(), []

    @server.main()
    def main(grid, context):
        start = ndarrays_to_parameters([np.zeros(shape, np.float32) for shape in SHAPES])
        strategy = FedAvg(
            fraction_evaluate=0.0, min_fit_clients=clients, min_available_clients=clients, initial_parameters=start
        )
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=1), strategy=strategy)
        DefaultWorkflow(fit_workflow=workflow)(grid, legacy)
        found.extend(each.numpy() for each in legacy.state.array_records["parameters"].values())

    mods = [secaggplus_mod] if workflow else []
    run_simulation(server, ClientApp(client_fn=lambda context: Client().to_client(), mods=mods), clients)
    return found


for clients in (3, 4):
    plain = aggregated(clients, None)
    summed = aggregated(clients, SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))
    for shape, mean, value in zip(SHAPES, plain, summed):
        print(f"{clients} clients, shape {shape}: FedAvg {mean.flat[0]:.4f}, under SecAgg+ {value.flat[0]:.4f}")
        assert np.allclose(mean, 0.25)
        assert np.allclose(value, 0.25, atol=1e-3) == (shape != ())
        assert shape != () or abs(float(value) - (clients * (0.25 * 10 / 1000 + 8) - 8)) < 1e-3
END
