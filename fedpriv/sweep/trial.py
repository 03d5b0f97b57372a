"""One trial of a sweep: its settings, and the audits of its final model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedpriv.core.config import Experiment


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    number: int  # from 1
    # its values of the settings that vary: key of the experiment file -> value, in the order of the file
    settings: Mapping[str, Any]
    seed: int  # of the experiment
    experiment: Experiment  # resolved; the engine is inline

    @property
    def asked(self) -> dict[str, str]:
        """The audits of its final model: description -> key in sweep.json, or empty."""
        from fedpriv.core.finding import findings  # with torch, which reading settings need not wait for

        every = (finding.asked_of_trials(self.experiment) for finding in findings())
        return {words: key for asked in every for words, key in asked.items()}
