"""A client's memory over the messages of a run: its secret, the settings, what it was sent.

A client answers a round once. Asked again with the same parameters and settings it computes the same answer, noise
included; asked with others it refuses: the difference of two answers would have less noise than the ledger counts on.
The settings are those of the first question, for the whole run: otherwise a later one could ask for less noise.

In a simulation the run's secret is every client's, and Flower's context holds the rest. In a deployment each client
draws its own from the operating system, and all of it lies in the folder that the environment variable
``FEDPRIV_MEMORY`` names, so that a restart changes nothing; where it names none, in Flower's context. Each thing is a
file that is written once: of two processes that answer for one client, one is first, and the other finds what it wrote.
"""

import os
import re
import secrets
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from flwr.app import ConfigRecord, Context

from fedpriv.core.config import Experiment
from fedpriv.core.errors import RefusedError
from fedpriv.core.files import write_once
from fedpriv.core.randomness import Secret
from fedpriv.core.seeds import MEMORY
from fedpriv.core.wire import record_in

_RECORD = "memory"
_KEPT = re.compile(rb"[0-9a-f]{64}")


def check_question(context: Context, experiment: Experiment, round_number: int) -> None:
    """Note the settings that this client is asked with, and refuse others than those of its first question."""
    rounds = experiment.federation.rounds
    if not 1 <= round_number <= rounds:
        raise RefusedError(f"round {round_number} is none of this run, which has rounds 1 to {rounds}")
    settings = _digest(experiment)
    if kept(context, "settings", settings) != settings:
        raise RefusedError("the settings are not those with which this client was first asked in this run")


def check_data(context: Context, digest: bytes, shared: Secret | None) -> None:
    """Note the data that this client answers from, and refuse to go on with others."""
    data = own_secret(context, shared).derived("data", digest).key
    if kept(context, "data", data) != data:
        raise RefusedError("the data are not those with which this client was first asked in this run")


def secret_for(context: Context, round_number: int, received: bytes, shared: Secret | None) -> Secret:
    """Note what this client is about to answer, and return the secret that its noise is keyed by."""
    secret = own_secret(context, shared)
    # Keyed: it tells nothing of the data, and what another secret has answered is not answered again.
    answered = secret.derived("answered", received).key
    if kept(context, f"round-{round_number}", answered) != answered:
        raise RefusedError(f"round {round_number} was answered before, to other parameters or from other data")
    return secret


def own_secret(context: Context, shared: Secret | None) -> Secret:
    """Return what this client's noise is drawn from: the run's secret or, without one, its own, for the whole run."""
    return shared or Secret(kept(context, "secret", secrets.token_bytes(32)))


def remembers(context: Context) -> bool:
    """Leave a secret on this client's disk, and return whether one was there: a restarted SuperNode answers by it.

    That a folder is named shows nothing: a container's new one is empty.
    """
    drawn = secrets.token_bytes(32)
    return Path(os.environ.get(MEMORY, "")).is_absolute() and kept(context, "secret", drawn) != drawn


def kept(context: Context, name: str, value: bytes) -> bytes:
    """Return what a client keeps under a name; from the first call on that is ``value``."""
    folder = os.environ.get(MEMORY, "")
    if not folder:
        return _kept_by_flower(context, name, value)
    if not (Path(folder).is_absolute() and Path(folder).is_dir()):
        # Another process, which starts elsewhere or before a disk is there, would answer a round once more.
        raise RefusedError(f"{MEMORY} does not name a folder on this client's machine by an absolute path: {folder}")
    path = Path(folder) / f"{context.run_id}-{context.node_config['partition-id']}-{name}"
    if write_once(path, value.hex().encode(), mode=0o600):
        return value
    content = path.read_bytes() if path.is_file() else b""
    if not _KEPT.fullmatch(content):
        raise RefusedError(f"the client's memory of this run, {path.name}, is damaged")
    return bytes.fromhex(content.decode())


@lru_cache(maxsize=2)
def _digest(experiment: Experiment) -> bytes:
    """Of all settings; writing them out takes longer than a step of a small network, and a run has one experiment."""
    return sha256(experiment.to_json().encode()).digest()


def _kept_by_flower(context: Context, name: str, value: bytes) -> bytes:
    if _RECORD not in context.state:
        context.state[_RECORD] = ConfigRecord()
    known = record_in(context.state, _RECORD, ConfigRecord).setdefault(name, value)
    if not isinstance(known, bytes):
        raise RefusedError(f"the client's memory of this run, {name}, is damaged")
    return known
