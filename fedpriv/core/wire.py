"""How tensors travel: Flower array records with .npy bytes, the same as Flower's own conversion, but faster."""

import io
import math
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.npz import HEADER_BYTES, parse_header
from fedpriv.gradients import Vector

_NPY = "numpy.ndarray"
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)


def pack(vector: Vector) -> ArrayRecord:
    """Return a record with a copy of each tensor under its name."""
    record = ArrayRecord()
    for name, value in vector.items():
        record[name] = _to_array(value)  # of a dictionary Flower would make each array again
    return record


def record_in(content: RecordDict, name: str, kind: type[R]) -> R:
    """Return the record of a kind under a name; Flower's own views copy all records of that kind each time."""
    found = content.get(name)
    if not isinstance(found, kind):
        raise KeyError(name)
    return found


def unpack(record: ArrayRecord) -> Vector:
    """Return the tensors of a record, on the CPU, sharing no memory with it."""
    return {name: _to_tensor(array) for name, array in record.items()}


def _to_array(tensor: Tensor) -> Array:
    values = tensor.detach().cpu().contiguous().numpy()
    data = b"".join((_header(values.dtype.str, values.shape), values.data))
    return Array(_name(values.dtype), tuple(values.shape), _NPY, data)


def _to_tensor(array: Array) -> Tensor:
    if array.stype != _NPY:
        raise ValueError(f"an array is serialised as {array.stype!r}, expected {_NPY!r}")
    try:
        kind = np.dtype(array.dtype)
        header = _header(kind.str, tuple(array.shape))
    except (TypeError, ValueError) as error:
        raise ValueError(f"an array says that it is {array.dtype!r} of shape {array.shape}: {error}") from None
    size = kind.itemsize * math.prod(array.shape)
    if array.data.startswith(header) and len(array.data) == len(header) + size:
        values = np.frombuffer(array.data, kind, offset=len(header)).reshape(array.shape).copy()
    else:
        values = _load(array)
    try:
        return torch.from_numpy(values)
    except TypeError:
        raise ValueError(f"an array holds {array.dtype}, no numbers that PyTorch has") from None


def _load(array: Array) -> NDArray[Any]:
    """Read what another writer laid out otherwise, once its header asks for no more memory than it should."""
    try:
        header = parse_header(array.data[:HEADER_BYTES])
    except ValueError as error:
        raise ValueError(f"an array cannot be read: {error}") from None
    kind, shape, size = header.dtype, header.shape, len(array.data) - header.length
    if str(kind) != array.dtype or shape != tuple(array.shape):
        raise ValueError(f"an array holds {kind} {shape}, its sender said {array.dtype} {array.shape}")
    if size != header.nbytes:
        raise ValueError(f"an array of {kind} {shape} comes with {size} bytes")
    try:
        values: NDArray[Any] = np.load(io.BytesIO(array.data), allow_pickle=False)
    except (EOFError, OSError, ValueError) as error:
        raise ValueError(f"an array cannot be read: {error}") from None
    return values


@lru_cache(maxsize=64)
def _name(kind: "np.dtype[Any]") -> str:
    # numpy looks it up anew each time, which takes as long as copying a small tensor.
    return str(kind)


@lru_cache(maxsize=4096)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue()
