"""canaries.json: what one run with canaries shows of epsilon."""

from typing import ClassVar

from fedpriv.core.figure import EpsilonBound, Figure, Interval
from fedpriv.core.records.reading import FileRecord


class CanaryAudit(FileRecord):
    """canaries.json."""

    path: ClassVar[str] = "canaries.json"

    game: str = ""  # what a canary is, and what the adversary adds up
    clients: int  # that had canaries
    epsilon_bound: EpsilonBound
    # the same with a confidence at which a bound above what is proven is an error, and not chance
    surer_bound: EpsilonBound
    proven_epsilon: float | None  # the ledger's, of its worst client; `None`: nothing is proven
    adjacency: str | None  # the ledger's, which the canaries keep to

    @property
    def figure(self) -> Figure:
        """The bound between 0 and what the ledger claims."""
        bound, proven = self.epsilon_bound, self.proven_epsilon
        measured = Interval(bound.epsilon, bound.epsilon, None, bound.confidence)
        holds = proven is None or self.surer_bound.epsilon <= proven
        return Figure("ε", measured, 0.0, ceiling=proven, theorem=bound.method, unit="number", holds=holds)
