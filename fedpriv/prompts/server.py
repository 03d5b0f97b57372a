"""Votes of prompts under secure aggregation: simulated clients share the noise, the server gets the masked sum."""

from collections.abc import Sequence

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from fedpriv.core.algorithm import sums
from fedpriv.engines.inline import simulated
from fedpriv.prompts.classify import Classifier
from fedpriv.prompts.client import Prompter, prompter_app
from fedpriv.prompts.folder import NoisyCounts
from fedpriv.server.exchange import Reached, Replies

_ROUND = 1


def noisy_counts(classifier: Classifier, questions: Sequence[str], sigma: float) -> NoisyCounts:
    """Have all clients vote on all questions, once."""
    labels, config = len(classifier.wording.texts.labels), classifier.config
    sizes = tuple(len(share) for share in classifier.shares)

    def votes(client: int, texts: Sequence[str]) -> torch.Tensor:
        named = [classifier.votes(number, text, client) for number, text in enumerate(texts)]
        return torch.from_numpy(np.stack(named, axis=1))

    grid = simulated(prompter_app(Prompter(votes, sizes, labels, sigma, classifier.secret)), len(sizes))
    reached = Reached(grid, grid.nodes_by_partition(), sizes)
    counts, replies = ask_prompters(reached, questions, labels, config.prompts, sigma)
    return NoisyCounts(tuple(map(tuple, counts.tolist())), replies.clients, replies.failures)


def ask_prompters(
    clients: Reached, questions: Sequence[str], labels: int, prompts: int, sigma: float
) -> tuple[NDArray[np.float64], Replies]:
    """Have all clients vote on all questions at once, under masks, and return the sum of their noisy counts."""
    asked = RecordDict({"task": ConfigRecord({"questions": list(questions), "round": _ROUND})})
    contents = dict.fromkeys(range(len(clients.examples)), asked)
    return sums().ask_for_votes(clients, _ROUND, contents, (len(questions), labels), prompts, sigma)
