"""The words, and a limit, that settings, the ledger and the command line share."""

from typing import Literal

__all__ = ["MOST_LABEL_EPSILON", "AdjacencyName", "CalibrationName", "SamplingName", "UnitName"]

UnitName = Literal["example", "update"]
SamplingName = Literal["shuffled", "fixed", "poisson", "full"]
AdjacencyName = Literal["replace-one", "zero-out"]
CalibrationName = Literal["analytic", "extended", "classic"]

MOST_LABEL_EPSILON = 20.0
"""Of randomised response: above, answers are changed so rarely that draws of 53 bits no longer have the odds."""
