"""The words that the ledger and the command line share."""

from typing import Literal

__all__ = ["AdjacencyName", "CalibrationName", "SamplingName", "UnitName"]

UnitName = Literal["example", "update"]
SamplingName = Literal["shuffled", "fixed", "poisson", "full"]
AdjacencyName = Literal["replace-one", "zero-out"]
CalibrationName = Literal["analytic", "extended", "classic"]
