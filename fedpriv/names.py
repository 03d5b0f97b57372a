"""The words that the ledger and the command line share."""

from typing import Literal

__all__ = ["CalibrationName", "MechanismName", "SamplingName", "UnitName"]

MechanismName = Literal["none", "gaussian", "laplace", "vmf", "hgm"]
UnitName = Literal["example", "update"]
SamplingName = Literal["shuffled", "fixed", "poisson", "full"]
CalibrationName = Literal["analytic", "extended", "classic"]
