"""What the scripts on SecAgg+ share: one round in Flower's simulation, in which all clients send the same."""

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


def mean(sent, examples, clients=4, masked=True):
    """Return the server's mean of arrays that each client sends with its number of examples."""
    server, found = ServerApp(), []

    class Client(NumPyClient):
        def fit(self, parameters, config):
            return [array.copy() for array in sent], examples, {}

    @server.main()
    def main(grid, context):
        strategy = FedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=clients,
            min_available_clients=clients,
            initial_parameters=ndarrays_to_parameters([np.zeros_like(array) for array in sent]),
        )
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=1), strategy=strategy)
        workflow = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2) if masked else None
        DefaultWorkflow(fit_workflow=workflow)(grid, legacy)
        found.extend(each.numpy() for each in legacy.state.array_records["parameters"].values())

    mods = [secaggplus_mod] if masked else []
    run_simulation(server, ClientApp(client_fn=lambda _: Client().to_client(), mods=mods), clients)
    return found
