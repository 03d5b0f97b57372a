"""Votes of prompts under secure aggregation: simulated clients share the noise, the server gets the masked sum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.clients.memory import secret_for
from fedpriv.clients.model_errors import discreet
from fedpriv.clients.training import answer_secret
from fedpriv.core.algorithm import SharedNoise, sums
from fedpriv.core.errors import RefusedError
from fedpriv.core.randomness import Secret
from fedpriv.engines.inline import simulated
from fedpriv.prompts.classify import Classifier
from fedpriv.prompts.folder import NoisyCounts
from fedpriv.server.exchange import Reached, Replies

_ROUND = 1


@dataclass(frozen=True)
class Prompter:
    """What the clients of a simulation know."""

    # (client, questions) -> what each of its prompts votes for, (t, Q) whole numbers from 0
    votes: Callable[[int, Sequence[str]], Tensor]
    examples: Sequence[int]  # how many each client has
    labels: int  # how many there are
    sigma: float  # deviation of the noise on each count of the sum, in votes
    secret: Secret  # what the shares of the noise are drawn from

    @property
    def clients(self) -> int:
        """How many there are."""
        return len(self.examples)


def prompter_app(prompter: Prompter) -> ClientApp:
    """Return the app of clients that vote under masks, and do nothing else."""
    app = ClientApp()

    @app.train("masked_votes")
    def vote(message: Message, context: Context) -> Message:
        """Vote on the questions in the message, and reply with masked noisy counts: the server reads only their sum."""
        client = int(context.node_config["partition-id"])
        with discreet(client):
            questions = _questions(message)
            asked = sha256("\0".join(questions).encode()).digest()
            own = answer_secret(secret_for(context, _ROUND, asked, prompter.secret), client, _ROUND, asked)
            votes, clients = prompter.votes(client, questions), prompter.clients
            noise = SharedNoise(prompter.sigma, clients, own.stream("votes"))
            reply = sums().votes_reply(message, context, votes, prompter.labels, noise)
        reply["client"] = MetricRecord({"partition": client, "examples": prompter.examples[client]})
        return Message(reply, reply_to=message)

    for kind, query in sums().queries.items():
        app.query(kind)(query)
    return app


def _questions(message: Message) -> list[str]:
    """What is asked in the one round that there is."""
    task = message.content.config_records["task"]
    questions = task["questions"]
    if task["round"] != _ROUND or not isinstance(questions, list) or not questions:
        raise RefusedError("prompts vote once, in round 1, on a list of questions")
    return [str(question) for question in questions]


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
