"""The words, and a few numbers, that settings, networks, the ledger and the command line share."""

from enum import StrEnum
from typing import Literal, Self

UnitName = Literal["example", "update"]
SamplingName = Literal["shuffled", "fixed", "poisson", "balls-in-bins", "full"]
AdjacencyName = Literal["replace-one", "zero-out"]
"""The adjacencies that settings choose from; what follows from others, such as whole updates, is in the ledger."""
NormName = Literal["l2", "linf"]
CalibrationName = Literal["analytic", "extended", "classic"]


class Adjacency(StrEnum):
    """Which two data sets must look alike. Records hold its name, a colon, and what it means there in words."""

    REPLACE_ONE = "replace-one"
    REPLACE_ONE_UPDATE = "replace-one-update"
    REPLACE_ONE_CLIENT = "replace-one-client"
    REPLACE_ONE_VOTER = "replace-one-voter"
    REPLACE_LABEL = "replace-label"
    ZERO_OUT = "zero-out"
    ZERO_OUT_UPDATE = "zero-out-update"

    def worded(self, words: str) -> str:
        """Return what a record holds."""
        return f"{self}: {words}"

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Return the adjacency of what a record holds; ``None`` where it is not known."""
        name = text.partition(":")[0]
        return cls(name) if name in set(cls) else None

    @property
    def replaces(self) -> bool:
        """Whether something is replaced by anything else; zero-out compares with something that adds nothing."""
        return self not in (self.ZERO_OUT, self.ZERO_OUT_UPDATE)


LEAST_LABEL_EPSILON = 1e-9
"""Of randomised response: far below, the chances of the true answer and of another one are one float64 number."""

MOST_LABEL_EPSILON = 20.0
"""Of randomised response: above, answers are changed so rarely that draws of 53 bits no longer have the odds."""

PAD, START, END = 0, 1, 2
"""Tokens of texts: nothing, and the beginning and the end of one."""

NOTHING_PROVEN = "Nothing is proven:"
"""How a sentence begins that terminals print in red."""

AGAINST: dict[str, str] = {
    "clients": "",
    "sum": "; of sums under secure aggregation",
    "server": "; against everybody but the server",
}
"""Where noise is on sums, whom a figure is about; the ledger says it at length."""
