"""The experiment: what one TOML file says, validated.

Every key has a default, a description and a range. A wrong key or value raises :class:`fedpriv.errors.InputError` with
a line that names the file, the key, what was given and what is allowed.
"""

from fedpriv.config.experiment import Experiment, describe, json_schema
from fedpriv.config.file import load_experiment, load_run, override, read_toml
from fedpriv.config.robustness import CertifyConfig, EvadeConfig, RobustnessConfig
from fedpriv.config.sections import (
    AdversaryConfig,
    DataConfig,
    EngineConfig,
    FederationConfig,
    ReportConfig,
    TrainingConfig,
)
from fedpriv.config.wrong import validated

__all__ = [
    "AdversaryConfig",
    "CertifyConfig",
    "DataConfig",
    "EngineConfig",
    "EvadeConfig",
    "Experiment",
    "FederationConfig",
    "ReportConfig",
    "RobustnessConfig",
    "TrainingConfig",
    "describe",
    "json_schema",
    "load_experiment",
    "load_run",
    "override",
    "read_toml",
    "validated",
]
