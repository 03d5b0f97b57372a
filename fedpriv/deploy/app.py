"""Pack the app that is sent: the code that runs here, and one experiment without its seed."""

import shutil
from importlib.metadata import version
from pathlib import Path

import tomli_w

import fedpriv
from fedpriv.core.config import Experiment
from fedpriv.core.seeds import without_seed

EXPERIMENT = "experiment.toml"
"""The experiment's file inside the app."""


def make_app(folder: Path, experiment: Experiment) -> None:
    """Write the app into ``folder``, which must not exist yet, with the code, so that all machines run the same."""
    shutil.copytree(Path(fedpriv.__file__).parent, folder / "fedpriv", ignore=_only_python)
    (folder / EXPERIMENT).write_text(without_seed(experiment).to_toml(), encoding="utf-8")
    (folder / "pyproject.toml").write_text(tomli_w.dumps(_project()), encoding="utf-8")


def _project() -> dict[str, object]:
    """What Flower wants to know; the apps and settings are those of the project's own pyproject.toml."""
    app = {
        "publisher": "fedpriv",
        "fab-include": ["fedpriv/**/*.py", EXPERIMENT],
        "components": {"serverapp": "fedpriv.server.app:app", "clientapp": "fedpriv.clients.app:app"},
        "config": {"experiment": EXPERIMENT, "overrides": "", "seed": ""},
    }
    project = {
        "name": "fedpriv",
        "version": version("fedpriv"),
        "description": "A crash-test lab for federated learning.",
        "license": "Apache-2.0",
        "dependencies": [],
    }
    return {"project": project, "tool": {"flwr": {"app": app}}}


def _only_python(folder: str, names: list[str]) -> list[str]:
    return [
        name for name in names if name == "__pycache__" or not (name.endswith(".py") or (Path(folder) / name).is_dir())
    ]
