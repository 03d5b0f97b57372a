"""What a message of a Flower app holds: its parameters, and what of them training changes."""

from collections.abc import Iterable

import torch
from flwr.app import Message
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.wire import unpack
from fedpriv.gradients import Vector

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What PyTorch calls the running statistics of normalising layers."""


def is_training(message: Message) -> bool:
    """Whether a message asks a client to train; evaluation and queries are none of a mod's business."""
    return str(message.metadata.message_type).split(".")[0] == "train"


def round_of(message: Message) -> int | None:
    """The round, as Flower's strategies tell it; ``None``: this server does not."""
    for record in message.content.config_records.values():
        if isinstance(number := record.get("server-round"), int):
            return number
    return None


def arrays_of(message: Message, record: str) -> Vector:
    """Return the arrays of a record, by name, on the CPU, sharing no memory with it.

    Raises:
        InputError: the message has no such record.
        ValueError: an array cannot be read.
    """
    records = message.content.array_records
    if record not in records:
        raise InputError(
            key="record", given=record, allowed=f"the message has {', '.join(sorted(records)) or 'no ArrayRecord'}"
        )
    return unpack(records[record])


def moved(names: Iterable[str], before: Vector) -> tuple[str, ...]:
    """Return the names of what training moves: floating-point arrays that are no running statistics."""
    wanted = (name for name in names if name.rpartition(".")[2] not in STATISTICS)
    return tuple(name for name in wanted if before[name].is_floating_point())


def as_sent(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the type of another, within its range."""
    limits = torch.finfo(like.dtype)
    return tensor.clamp(limits.min, limits.max).to(like.dtype)
