"""Read messages of a Flower app: arrays, which of them training changes, round, client, and the form of a reply."""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.npz import parse_header
from fedpriv.core.wire import unpack
from fedpriv.gradients import Vector
from fedpriv.server import uploads

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What PyTorch calls the running statistics of normalising layers."""

PARAMETERS = "arrays"
REPLIES = {"fitins.parameters": "fitres.parameters"}
"""Records of a message whose reply has another one: those of ``NumPyClient`` and ``Client``."""

SAME = 1e-2  # of its length, by which a reply differs from what it holds
_ROUNDED = 0.5  # of a length, by which a few levels round numbers

MASKED = "secaggplus_configs"
"""The ConfigRecord of Flower's secure aggregation; outside its mod it names a stage."""

Form = Literal["weights", "update", "negated update", "gradient"]
"""What a reply holds: parameters after training, after minus before, before minus after, or a gradient."""


class WrongAppError(InputError):
    """What is wrong with an app or its settings, whatever its data are."""


def type_of(message: Message) -> str:
    """The type of a message: train, evaluate, query or an older one, with the action it names."""
    return str(message.metadata.message_type)


def is_training(message: Message) -> bool:
    """Whether a message asks a client to train."""
    return type_of(message).split(".")[0] == "train"


def client_of(context: Context) -> int:
    """The number of the client's partition, or of its node where Flower was given no partition."""
    told = context.node_config.get("partition-id", context.node_id)
    try:
        return int(told)
    except ValueError:
        raise WrongAppError(
            key="partition-id", given=told, allowed="a whole number, another one for each node"
        ) from None


def round_of(message: Message) -> int | None:
    """The round, as Flower's strategies tell it, older ones as the message's group; ``None``: this server does not."""
    for record in message.content.config_records.values():
        if isinstance(number := record.get("server-round"), int):
            return number
    group = message.metadata.group_id
    return int(group) if group.isdecimal() else None


def stage_of(content: RecordDict) -> str | None:
    """The stage of secure aggregation, empty inside its mod; ``None``: there is none."""
    record = content.config_records.get(MASKED)
    return None if record is None else str(record.get("stage", ""))


def record_of(content: RecordDict, wanted: str | None) -> str:
    """Return the name of the record with the parameters: the requested one, or the only one."""
    names = sorted(content.array_records)
    usual = [name for name in (PARAMETERS, *REPLIES) if name in names]
    found = wanted or next(iter(usual or names), PARAMETERS)
    if wanted is None and not usual and len(names) > 1:
        raise WrongAppError(
            f"of {', '.join(names)} the setting record names the one with parameters; reply_record, in a reply"
        )
    if found not in names:
        allowed = f"the message has {', '.join(names) or 'no ArrayRecord'}"
        raise WrongAppError(key="record", given=found, allowed=allowed)
    return found


def arrays_of(content: RecordDict, record: str) -> Vector:
    """Return the arrays of a record, by name, on the CPU, sharing no memory with it."""
    return unpack(_described(content.array_records[record]))


def parameters_in(message: Message) -> str:
    """Return which record of a training message or its reply has the parameters; empty where it cannot be told."""
    if message.has_error() or not is_training(message):
        return ""
    content = RecordDict({name: record for name, record in message.content.array_records.items() if len(record)})
    try:
        return record_of(content, None)
    except InputError:
        return ""


def parameters_of(message: Message) -> Vector:
    """Return the arrays of a training message or its reply; none where they are not to be read."""
    name = parameters_in(message)
    try:
        return arrays_of(message.content, name) if name else {}
    except (InputError, ValueError):
        return {}


def _described(record: ArrayRecord) -> ArrayRecord:
    """The same record; arrays of older clients and servers get their type and shape from their bytes."""
    if all(array.dtype for array in record.values()):
        return record
    told = ArrayRecord()
    for name, array in record.items():
        if array.data:
            header = parse_header(array.data)
            told[name] = Array(str(header.dtype), tuple(header.shape), array.stype, array.data)
    return told


def moved(before: Vector) -> tuple[str, ...]:
    """Return the names of what training moves: floating-point arrays that are no running statistics."""
    kinds = {value.dtype for value in before.values() if value.is_floating_point()}

    def moves(name: str, value: Tensor) -> bool:
        averaged = value.dtype == torch.float64 and len(kinds) > 1 and bool((value == value.round()).all())
        return value.is_floating_point() and not averaged and name.rpartition(".")[2] not in STATISTICS

    return tuple(name for name, value in before.items() if moves(name, value))


def update_of(before: Vector, reply: Vector, names: Iterable[str], form: Form) -> Vector:
    """Return after minus before in float32 (of a gradient: the gradient), of the arrays of these names."""
    names = tuple(names)
    if missing := [name for name in names if name not in reply or reply[name].shape != before[name].shape]:
        raise InputError(f"the reply has no {missing[0]!r} of the shape that was sent")
    start, sign = (1.0 if form == "weights" else 0.0), (-1.0 if form == "negated update" else 1.0)
    return {name: (sign * reply[name].double() - start * before[name].double()).float() for name in names}


def norm(values: Vector) -> float:
    """Return the Euclidean norm in float64, of whole numbers, too."""
    return uploads.norm({name: value.double() for name, value in values.items()})


def apart(reply: Vector, values: Vector) -> float | None:
    """Return how far a reply is from arrays; ``None``: it has not all of them, or of other shapes."""
    if any(name not in reply or reply[name].shape != value.shape for name, value in values.items()):
        return None
    return norm({name: reply[name].double() - value.double() for name, value in values.items()})


def nearest_form(before: Vector, reply: Vector, names: Iterable[str]) -> Form:
    """Tell parameters from an update by what lies nearer: the parameters that were sent, or zero."""
    there = {name: reply[name] for name in names if name in reply and reply[name].shape == before[name].shape}
    changed = apart(there, {name: before[name] for name in there})
    return "weights" if (changed or 0.0) <= norm(there) else "update"


def watched_form(reply: Vector, candidates: Mapping[Form, Vector]) -> Form | None:
    """Return which of the watched tensors a reply holds, to a hundredth of their norm; ``None``: none of them."""
    found = ((form, apart(reply, values), norm(values)) for form, values in candidates.items())
    return next((form for form, off, length in found if off is not None and off <= SAME * length), None)


def rescaled(reply: Vector, candidates: Mapping[Form, Vector]) -> tuple[Vector, Form | None]:
    """Return a reply whose whole numbers have the scale of what was watched, and what they hold; ``None``: none do.

    Uploads in eight bits have their scale elsewhere in the message, where the server finds it.
    """
    found: list[tuple[float, Form, Vector]] = []
    for form, values in candidates.items():
        whole = {
            name: reply[name].double()
            for name, value in values.items()
            if name in reply and reply[name].shape == value.shape and not reply[name].is_floating_point()
        }
        fitted = {name: _fitted(numbers, values[name].double()) for name, numbers in whole.items()}
        wrong = norm({name: value - values[name].double() for name, value in fitted.items()})
        length = norm({name: values[name] for name in fitted})
        if fitted and wrong < _ROUNDED * length:
            found.append((wrong / length, form, {name: value.float() for name, value in fitted.items()}))
    if not found:
        return reply, None
    _, form, scaled = min(found, key=lambda each: each[0])
    return reply | scaled, form


def _fitted(numbers: Tensor, wanted: Tensor) -> Tensor:
    """Numbers times what brings them nearest to others."""
    return numbers * ((numbers * wanted).sum() / numbers.square().sum().clamp_min(1.0))


def as_sent(tensor: Tensor, like: torch.dtype) -> Tensor:
    """Return a tensor in another type, within its range."""
    limits = torch.finfo(like)
    return tensor.clamp(limits.min, limits.max).to(like)
