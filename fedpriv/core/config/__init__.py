"""The validated settings of an experiment file (TOML).

Every key has a default, a description and a range. A wrong key or value raises
:class:`fedpriv.core.errors.InputError` with a line that names the file, the key, what was given and what is allowed.
"""

from fedpriv.core.config.data import DataConfig
from fedpriv.core.config.error_text import validated
from fedpriv.core.config.experiment import Experiment, describe, json_schema
from fedpriv.core.config.file import load_experiment, load_run, override, parse_override, read_toml
from fedpriv.core.config.sections import (
    AdversaryConfig,
    EngineConfig,
    FederationConfig,
    TrainingConfig,
)

__all__ = [
    "AdversaryConfig",
    "DataConfig",
    "EngineConfig",
    "Experiment",
    "FederationConfig",
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
