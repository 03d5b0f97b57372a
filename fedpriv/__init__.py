"""fedpriv: a crash-test lab for federated learning.

>>> import fedpriv
>>> run = fedpriv.run("configs/quickstart.toml", mechanism={"name": "gaussian", "sigma": 0.1})  # doctest: +SKIP
>>> run.epsilon, run.accuracy, run.report  # doctest: +SKIP
"""

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpriv.attacks import reconstruct as reconstruct
    from fedpriv.core.config import Experiment as Experiment
    from fedpriv.core.config import load_experiment as load_experiment
    from fedpriv.core.errors import InputError as InputError
    from fedpriv.core.errors import RunFailedError as RunFailedError
    from fedpriv.core.lab import attack_run as attack_run
    from fedpriv.core.lab import resume_run as resume_run
    from fedpriv.core.lab import start_run as start_run
    from fedpriv.core.notebook import Run as Run
    from fedpriv.core.notebook import run as run
    from fedpriv.core.progress import Silent as Silent
    from fedpriv.core.report import write_report as write_report

__version__ = version("fedpriv")

# Imported when they are first used: PyTorch and Flower take seconds.
_HOME = {
    "Experiment": "fedpriv.core.config",
    "InputError": "fedpriv.core.errors",
    "Run": "fedpriv.core.notebook",
    "RunFailedError": "fedpriv.core.errors",
    "Silent": "fedpriv.core.progress",
    "attack_run": "fedpriv.core.lab",
    "load_experiment": "fedpriv.core.config",
    "reconstruct": "fedpriv.attacks",
    "resume_run": "fedpriv.core.lab",
    "run": "fedpriv.core.notebook",
    "start_run": "fedpriv.core.lab",
    "write_report": "fedpriv.core.report",
}

# In a repository the rooms clients, server and attacks lie beside this folder, and links in it lead to them. Flower's
# packed app and a checkout without links lack those: there the rooms are found where they lie.
_HERE = Path(__file__).resolve().parent
if not (_HERE / "clients").is_dir():
    __path__.append(str(_HERE.parent))


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
