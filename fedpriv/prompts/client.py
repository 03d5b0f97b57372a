"""A client whose prompts vote on questions, once; the server gets the sum of noisy counts under masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from flwr.app import Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from torch import Tensor

from fedpriv.clients.memory import secret_for
from fedpriv.clients.model_errors import discreet
from fedpriv.clients.training import answer_secret
from fedpriv.core.algorithm import SharedNoise, sums
from fedpriv.core.errors import RefusedError
from fedpriv.core.randomness import Secret

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
