"""The app as it is sent: the code that runs here, and one experiment without its seed."""

import shutil
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import tomli_w

from fedpriv.config import Experiment
from fedpriv.seeds import without_seed

__all__ = ["EXPERIMENT", "make_app"]

EXPERIMENT = "experiment.toml"
"""The experiment's file inside the app."""

_ROOMS = ("fedpriv", "clients", "server", "attacks")


def make_app(folder: Path, experiment: Experiment) -> None:
    """Write the app into ``folder``, which must not exist yet.

    The code travels with it, so that all machines run the same version, whatever they have installed.
    """
    for room in _ROOMS:
        shutil.copytree(_home(room), folder / room, ignore=_only_python)
    (folder / EXPERIMENT).write_text(without_seed(experiment).to_toml(), encoding="utf-8")
    (folder / "pyproject.toml").write_text(tomli_w.dumps(_project()), encoding="utf-8")


def _project() -> dict[str, object]:
    """What Flower wants to know; the apps and settings are those of the project's own pyproject.toml."""
    app = {
        "publisher": "fedpriv",
        "fab-include": [*(f"{room}/**/*.py" for room in _ROOMS), EXPERIMENT],
        "components": {"serverapp": "server.app:app", "clientapp": "clients.app:app"},
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


def _home(room: str) -> Path:
    found = find_spec(room)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"the package {room} is not installed")
    return Path(found.origin).parent


def _only_python(folder: str, names: list[str]) -> list[str]:
    return [
        name for name in names if name == "__pycache__" or not (name.endswith(".py") or (Path(folder) / name).is_dir())
    ]
