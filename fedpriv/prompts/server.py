"""Votes of prompts that nobody sees: clients add the noise in shares, and secure aggregation leaves the server the sum.

The clients are simulated, in this process; the server's part has their masked messages and nothing else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedpriv.core.transport import VotesSum, sums
from fedpriv.engines.inline import simulated
from fedpriv.prompts.classify import Classifier
from fedpriv.prompts.client import Prompter, prompter_app
from fedpriv.prompts.folder import NoisyCounts
from fedpriv.server.exchange import exchanged
from fedpriv.server.uploads import Allowed

_ROUND = 1


def noisy_counts(classifier: Classifier, questions: Sequence[str], sigma: float) -> NoisyCounts:
    """Have all clients vote on all questions, once."""
    labels, config = len(classifier.wording.texts.labels), classifier.config
    sizes = tuple(len(share) for share in classifier.shares())

    def votes(client: int, texts: Sequence[str]) -> torch.Tensor:
        named = [classifier.votes(number, text, client) for number, text in enumerate(texts)]
        return torch.from_numpy(np.stack(named, axis=1))

    grid = simulated(prompter_app(Prompter(votes, sizes, labels, sigma, classifier.secret)), len(sizes))
    prompters = Prompters(grid, grid.nodes_by_partition(), sizes)
    summed = ask_prompters(prompters, questions, labels, config.prompts, sigma)
    return NoisyCounts(tuple(map(tuple, summed.counts.tolist())), summed.clients, summed.failures)


@dataclass(frozen=True)
class Prompters:
    """Clients with examples, as the server reaches them; see :class:`fedpriv.server.exchange.Reached`."""

    grid: Grid  # Flower's way to the clients
    nodes: Mapping[int, int]  # node ids by client
    examples: Sequence[int]  # how many each client has

    def allowed_masked(self, client: int) -> Allowed:
        """Return what a client may send under a mask."""
        return Allowed(self.examples[client], math.inf, False)

    def send(self, kind: str, number: int, contents: Mapping[int, RecordDict]) -> dict[int, Message]:
        """Send clients a message, each its own content, and return the answers by client."""
        return exchanged(self.grid, self.nodes, kind, number, contents, None)


def ask_prompters(prompters: Prompters, questions: Sequence[str], labels: int, prompts: int, sigma: float) -> VotesSum:
    """Have all clients vote on all questions at once, under masks.

    Returns:
        Their sum, and who is in it.
    """
    clients = len(prompters.examples)
    asked = RecordDict({"task": ConfigRecord({"questions": list(questions), "round": _ROUND})})
    contents = dict.fromkeys(range(clients), asked)
    return sums().ask_for_votes(prompters, _ROUND, contents, (len(questions), labels), prompts, sigma)
