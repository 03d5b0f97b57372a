"""Read messages of a Flower app: parameters, which of them training changes, round and client."""

from collections.abc import Iterable

import torch
from flwr.app import Context, Message
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.wire import unpack
from fedpriv.gradients import Vector

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What PyTorch calls the running statistics of normalising layers."""


def is_training(message: Message) -> bool:
    """Whether a message asks a client to train; evaluation and queries are none of a mod's business."""
    return str(message.metadata.message_type).split(".")[0] == "train"


def client_of(context: Context) -> int:
    """The number of the client's partition; 0 where Flower was told of none."""
    return int(context.node_config.get("partition-id", 0))


def round_of(message: Message) -> int | None:
    """The round, as Flower's strategies tell it; ``None``: this server does not."""
    for record in message.content.config_records.values():
        if isinstance(number := record.get("server-round"), int):
            return number
    return None


def arrays_of(message: Message, record: str) -> Vector:
    """Return the arrays of a record, by name, on the CPU, sharing no memory with it."""
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


def update_of(before: Vector, after: Vector, names: Iterable[str]) -> Vector:
    """Return after minus before in float32, of the arrays of these names."""
    names = tuple(names)
    if missing := [name for name in names if name not in after or after[name].shape != before[name].shape]:
        raise InputError(f"the reply has no {missing[0]!r} of the shape that was sent")
    return {name: (after[name].double() - before[name].double()).float() for name in names}


def as_sent(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the type of another, within its range."""
    limits = torch.finfo(like.dtype)
    return tensor.clamp(limits.min, limits.max).to(like.dtype)
