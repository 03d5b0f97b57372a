"""Where an experiment's seed is in a deployment: on the machines that need it, never on the wire.

Who knows the seed can draw a mechanism's noise again and subtract it. In a simulation nobody listens between server and
clients, and the seed is part of the experiment that every message names. In a deployment it stays behind: server and
clients read it from a file in the folder that the environment variable ``FEDPRIV_SEEDS`` names.
"""

import os
import re
import secrets
from pathlib import Path

from fedpriv.config import Experiment
from fedpriv.errors import InputError
from fedpriv.files import write_whole

__all__ = ["SEEDS", "forget_seed", "keep_seed", "with_seed", "without_seed"]

SEEDS = "FEDPRIV_SEEDS"
"""The environment variable that names the folder."""

_NAME = re.compile(r"[0-9a-f]{16}")


def keep_seed(folder: Path, experiment: Experiment) -> str:
    """Write the experiment's seed into a file that only its owner can read, and return the file's random name.

    Raises:
        WriteError: it cannot be written.
    """
    name = secrets.token_hex(8)
    write_whole(folder / name, str(experiment.seed).encode(), mode=0o600)
    return name


def forget_seed(folder: Path, name: str) -> None:
    """Remove what :func:`keep_seed` wrote."""
    (folder / name).unlink(missing_ok=True)


def without_seed(experiment: Experiment) -> Experiment:
    """The experiment as it may be told to everybody."""
    return experiment.model_copy(update={"seed": 0})


def with_seed(experiment: Experiment, name: str) -> Experiment:
    """Return the experiment with the seed that is kept on this machine under ``name``.

    Args:
        experiment: from :func:`without_seed`.
        name: from :func:`keep_seed`; it comes over the wire. Empty: the experiment has its seed.

    Raises:
        InputError: this machine keeps no seed of that name.
    """
    if not name:
        return experiment
    folder = os.environ.get(SEEDS)
    if not folder:
        raise InputError(f"{SEEDS} is not set here: it names the folder with the seed of the run")
    if not _NAME.fullmatch(name):
        raise InputError(f"the run asks for the seed {name[:40]!r}, which is not a name of one")
    try:
        seed = int((Path(folder) / name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        raise InputError(f"the seed {name} of the run is not in {SEEDS} here") from None
    return Experiment.model_validate({**experiment.model_dump(), "seed": seed})
