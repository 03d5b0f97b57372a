"""The words, and a few numbers, that settings, networks, the ledger and the command line share."""

from typing import Literal

__all__ = [
    "END",
    "LEAST_LABEL_EPSILON",
    "MOST_LABEL_EPSILON",
    "PAD",
    "START",
    "AdjacencyName",
    "CalibrationName",
    "SamplingName",
    "UnitName",
]

UnitName = Literal["example", "update"]
SamplingName = Literal["shuffled", "fixed", "poisson", "full"]
AdjacencyName = Literal["replace-one", "zero-out"]
CalibrationName = Literal["analytic", "extended", "classic"]

LEAST_LABEL_EPSILON = 1e-9
"""Of randomised response: far below, the chances of the true answer and of another one are one float64 number."""

MOST_LABEL_EPSILON = 20.0
"""Of randomised response: above, answers are changed so rarely that draws of 53 bits no longer have the odds."""

PAD, START, END = 0, 1, 2
"""Tokens of texts: nothing, and the beginning and the end of one."""
