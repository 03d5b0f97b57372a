"""Apps under Flower's SecAgg+ whose messages go through memory: what clients sent, and what the server has of it."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp

from fedpriv.engines.inline import run_server
from studies.noise_in_sum import OneProcess

Values = list[np.ndarray]


class Moving(NumPyClient):
    """Adds what a test tells it to."""

    def __init__(self, step: Callable[[int], Values], partition: int) -> None:
        self.step, self.partition = step, partition

    def fit(self, parameters: Any, config: Any) -> Any:
        moved = zip(parameters, self.step(self.partition), strict=True)
        return [(value + step).astype(np.float32) for value, step in moved], 10 + self.partition, {}


def summed(
    mods: list[Any], start: Values, step: Callable[[int], Values], clients: int = 4, **keys: Any
) -> tuple[Values, list[Values]]:
    """What the server makes of a round's replies, and the replies before they are masked.

    Args:
        mods: inside of secaggplus_mod.
        start: the parameters.
        step: what each client adds to them.
        clients: in the round.
        keys: of SecAggPlusWorkflow.
    """
    sent: list[Values] = []
    ended: list[Values] = []

    def hearing(message: Message, own: Context, call_next: Any) -> Message:
        reply = call_next(message, own)
        assert reply.content.metric_records["fitres.num_examples"] == {"num_examples": 1000}
        sent.append([value.numpy() for value in reply.content.array_records["fitres.parameters"].values()])
        return reply

    server = ServerApp()

    @server.main()
    def main(grid: Any, own: Any) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, initial_parameters=ndarrays_to_parameters(start))
        legacy = LegacyContext(context=own, config=ServerConfig(num_rounds=1), strategy=strategy)
        workflow = SecAggPlusWorkflow(**{"num_shares": clients, "reconstruction_threshold": 3, **keys})
        DefaultWorkflow(fit_workflow=workflow)(grid, legacy)
        ended.append([value.numpy() for value in own.state.array_records["parameters"].values()])

    def client_fn(own: Context) -> Any:
        return Moving(step, int(own.node_config["partition-id"])).to_client()

    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = ClientApp(client_fn=client_fn, mods=[secaggplus_mod, hearing, *mods])
    run_server(server, OneProcess(app, clients))
    return ended[0], sent
