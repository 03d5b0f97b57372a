"""What a client keeps to itself over the messages of a run: its secret, and what it was sent in each round.

A client answers a round once. Asked again with the same parameters and settings it computes the same answer, noise
included; asked with others it refuses: the difference of two answers would have less noise than the ledger counts on.

In a simulation the run's secret is every client's, and Flower's context holds the rest. In a deployment each client
draws its own from the operating system, and both lie in a file of the folder that the environment variable
``FEDPRIV_MEMORY`` names, so that a restart changes nothing; where it names none, in Flower's context.
"""

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flwr.app import ConfigRecord, Context
from pydantic import Field, TypeAdapter, ValidationError

from fedpriv.errors import RefusedError
from fedpriv.randomness import Secret
from fedpriv.seeds import MEMORY

__all__ = ["secret_for"]

_RECORD = "memory"


@dataclass(frozen=True)
class _Memory:
    """What is kept.

    Attributes:
        secret: hexadecimal; empty where the run has one for all clients.
        rounds: round -> the digest of what was received in it, hexadecimal.
    """

    secret: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    rounds: dict[str, str]


_MEMORY = TypeAdapter(_Memory)


def secret_for(context: Context, round_number: int, received: bytes, shared: Secret | None) -> Secret:
    """Note what this client is about to answer, and return the secret that its noise is keyed by.

    Args:
        context: the client's, from Flower.
        round_number: the round, from 1.
        received: the digest of all that the answer depends on.
        shared: the run's secret; ``None``: this client has its own.

    Raises:
        RefusedError: the client was asked in this round before, and was sent something else; or its memory is
            damaged.
    """
    folder = os.environ.get(MEMORY, "")
    path = Path(folder) / f"{context.run_id}-{context.node_config['partition-id']}.json" if folder else None
    memory = _read(path, context) or _Memory("" if shared else secrets.token_hex(32), {})
    known = memory.rounds.setdefault(str(round_number), received.hex())
    if known != received.hex():
        raise RefusedError(f"round {round_number} was answered before, to other parameters or settings")
    _write(path, context, memory)
    return shared or Secret(bytes.fromhex(memory.secret))


def _read(path: Path | None, context: Context) -> _Memory | None:
    if path is None:
        records = context.state.config_records
        return _MEMORY.validate_json(str(records[_RECORD]["json"])) if _RECORD in records else None
    try:
        return _MEMORY.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        raise RefusedError(f"the client's memory of this run, {path.name}, is damaged") from None


def _write(path: Path | None, context: Context, memory: _Memory) -> None:
    text = json.dumps(vars(memory))
    if path is None:
        context.state.config_records[_RECORD] = ConfigRecord({"json": text})
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
