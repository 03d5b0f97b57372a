"""One trial of a sweep: its settings, and what is done to its final model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedpriv.core.config import Experiment
from fedpriv.robustness.settings import CertifyConfig, EvadeConfig, RobustnessConfig


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        number: from 1.
        settings: what it has of the sweep's own: key of the experiment file -> value, in the order of the file.
        seed: of the experiment.
        experiment: resolved; the engine is inline.
    """

    number: int
    settings: Mapping[str, Any]
    seed: int
    experiment: Experiment

    @property
    def certify(self) -> CertifyConfig | None:
        """How its final model is certified: where ``[robustness.certify]`` is given, and there is noise."""
        smoothing = RobustnessConfig.noisy(self.experiment)
        return smoothing.certify if smoothing is not None and self._gives("certify") else None

    @property
    def evade(self) -> EvadeConfig | None:
        """How its final model is attacked: where ``[robustness.evade]`` is given, with noise or without."""
        robustness = RobustnessConfig.of(self.experiment)
        return robustness.evade if robustness is not None and self._gives("evade") else None

    def afterwards(self) -> dict[str, bool]:
        """What is done to its final model, as JSON types: sections that have their defaults would not show it."""
        asked = {"certified": self.certify is not None, "evaded": self.evade is not None}
        return {name: True for name, wanted in asked.items() if wanted}

    def _gives(self, section: str) -> bool:
        robustness = RobustnessConfig.of(self.experiment)
        return robustness is not None and section in robustness.model_fields_set
