"""Where a run's seed and secret are in a deployment: on the machines that need them, never on the wire.

Who knows the seed knows how data are shared out and, where nothing is secret, can draw a mechanism's noise again and
subtract it. In a simulation nobody listens between server and clients: the seed is part of the experiment that every
message names, and the secret reaches the clients with the app. In a deployment both stay behind: server and clients
read them from a file in the folder that the environment variable ``FEDPRIV_SEEDS`` names.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole

if TYPE_CHECKING:
    from fedpriv.core.randomness import Secret

SEEDS = "FEDPRIV_SEEDS"
"""The environment variable that names the folder with a run's seed."""

MEMORY = "FEDPRIV_MEMORY"
"""The environment variable that names the folder in which a client keeps what nobody else may know."""

_NAME = re.compile(r"[0-9a-f]{16}")


class SeededExperiment(NamedTuple):
    """An experiment with its seed, and the run's secret; ``None``: it follows from the seed."""

    experiment: Experiment
    secret: Secret | None


def keep_seed(folder: Path, experiment: Experiment, secret: Secret) -> str:
    """Write seed and secret into a file that only its owner can read, and return the file's random name."""
    name = secrets.token_hex(8)
    content = {"seed": experiment.seed, "secret": secret.key.hex() if experiment.hides_batches else None}
    write_whole(folder / name, json.dumps(content).encode(), mode=0o600)
    return name


def forget_seed(folder: Path, name: str) -> None:
    """Remove what :func:`keep_seed` wrote."""
    (folder / name).unlink(missing_ok=True)


def without_seed(experiment: Experiment) -> Experiment:
    """The experiment as it may be made public."""
    return experiment.model_copy(update={"seed": 0})


@lru_cache(maxsize=2)
def kept_for(text: str, name: str, secret: Secret | None = None) -> SeededExperiment:
    """Return the experiment with the seed and the secret that are kept on this machine under ``name``."""
    from fedpriv.core.randomness import Secret  # here, because PyTorch takes longer to import than deploy down to run

    experiment = Experiment.model_validate_json(text)
    if not name:
        return SeededExperiment(experiment, secret)
    folder = os.environ.get(SEEDS)
    if not folder:
        raise InputError(f"{SEEDS} is not set here: it names the folder with the seed of the run")
    if not _NAME.fullmatch(name):
        raise InputError(f"the run asks for the seed {name[:40]!r}, which is not a name of one")
    try:
        content = json.loads((Path(folder) / name).read_text(encoding="ascii"))
        seed, key = int(content["seed"]), content["secret"]
        secret = None if key is None else Secret(bytes.fromhex(key))
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"the seed {name} of the run is not in {SEEDS} here") from None
    return SeededExperiment(Experiment.model_validate({**experiment.model_dump(), "seed": seed}), secret)
