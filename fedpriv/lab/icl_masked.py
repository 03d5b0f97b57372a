"""Votes of prompts that nobody sees: clients add the noise in shares, and secure aggregation leaves the server the sum.

The clients are simulated, in this process; the server's part has their masked messages and nothing else.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fedpriv.clients.prompts import Prompter, prompter_app
from fedpriv.engines.inline import simulated
from fedpriv.icl.classify import Classifier
from fedpriv.icl.folder import NoisyCounts
from fedpriv.server.prompts import Prompters, ask_prompters

__all__ = ["noisy_counts"]


def noisy_counts(classifier: Classifier, questions: Sequence[str], sigma: float) -> NoisyCounts:
    """Have all clients vote on all questions, once.

    Args:
        classifier: whose examples, prompts and secret they are.
        questions: texts.
        sigma: deviation of the noise on each count of the sum, in votes.

    Raises:
        RunFailedError: fewer than two thirds of the clients voted.
    """
    labels, config = len(classifier.wording.texts.labels), classifier.config
    sizes = tuple(len(share) for share in classifier.shares())

    def votes(client: int, texts: Sequence[str]) -> torch.Tensor:
        named = [classifier.votes(number, text, client) for number, text in enumerate(texts)]
        return torch.from_numpy(np.stack(named, axis=1))

    grid = simulated(prompter_app(Prompter(votes, sizes, labels, sigma, classifier.secret)), len(sizes))
    prompters = Prompters(grid, grid.nodes_by_partition(), sizes)
    summed = ask_prompters(prompters, questions, labels, config.prompts, sigma)
    return NoisyCounts(tuple(map(tuple, summed.counts.tolist())), summed.found.clients, summed.found.failures)
