"""The experiment: what one TOML file says, validated.

Every key has a default, a description and a range. A wrong key or value raises :class:`fedpriv.errors.InputError` with
a line that names the file, the key, what was given and what is allowed.
"""

from fedpriv.config.data import DataConfig
from fedpriv.config.experiment import Experiment
from fedpriv.config.file import load_experiment, load_run, override, parse_override, read_toml
from fedpriv.config.meaning import describe, json_schema
from fedpriv.config.pate import PateConfig
from fedpriv.config.robustness import LEAST_NOISE, MOST_NOISE, CertifyConfig, EvadeConfig, RobustnessConfig
from fedpriv.config.sections import (
    AdversaryConfig,
    EngineConfig,
    FederationConfig,
    ReportConfig,
    TrainingConfig,
)
from fedpriv.config.service import ServiceConfig
from fedpriv.config.wrong import validated

__all__ = [
    "LEAST_NOISE",
    "MOST_NOISE",
    "AdversaryConfig",
    "CertifyConfig",
    "DataConfig",
    "EngineConfig",
    "EvadeConfig",
    "Experiment",
    "FederationConfig",
    "PateConfig",
    "ReportConfig",
    "RobustnessConfig",
    "ServiceConfig",
    "TrainingConfig",
    "describe",
    "json_schema",
    "load_experiment",
    "load_run",
    "override",
    "parse_override",
    "read_toml",
    "validated",
]
