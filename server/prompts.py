"""The server's part of votes with prompts: it asks clients, and gets the sum of their noisy counts under masks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedpriv.masking import votes_limit
from fedpriv.server.exchange import exchanged
from fedpriv.server.secure import VotesSum, ask_for_votes
from fedpriv.server.uploads import Allowed

__all__ = ["Prompters", "ask_prompters"]

_ROUND = 1


@dataclass(frozen=True)
class Prompters:
    """Clients with examples, as the server reaches them; see :class:`fedpriv.server.exchange.Reached`.

    Attributes:
        grid: Flower's way to the clients.
        nodes: node ids by client.
        examples: how many each client has.
    """

    grid: Grid
    nodes: Mapping[int, int]
    examples: Sequence[int]

    def allowed_masked(self, client: int) -> Allowed:
        """Return what a client may send under a mask."""
        return Allowed(self.examples[client], math.inf, False)

    def send(self, kind: str, number: int, contents: Mapping[int, RecordDict]) -> dict[int, Message]:
        """Send clients a message, each its own content, and return the answers by client."""
        return exchanged(self.grid, self.nodes, kind, number, contents, None)


def ask_prompters(prompters: Prompters, questions: Sequence[str], labels: int, prompts: int, sigma: float) -> VotesSum:
    """Have all clients vote on all questions at once, under masks.

    Args:
        prompters: the clients.
        questions: Q texts.
        labels: K.
        prompts: votes of a client.
        sigma: deviation of the noise on each count of the sum, in votes.

    Returns:
        Their sum, and who is in it.

    Raises:
        RunFailedError: too few clients are left for the sum to be unmasked, or their shares do not fit.
    """
    clients = len(prompters.examples)
    asked = RecordDict({"task": ConfigRecord({"questions": list(questions), "round": _ROUND})})
    contents = dict.fromkeys(range(clients), asked)
    limit = votes_limit(prompts, sigma, clients)
    return ask_for_votes(prompters, _ROUND, contents, (len(questions), labels), limit)
