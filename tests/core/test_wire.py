"""Tensors travel as the same bytes that Flower would write, and nothing else is taken for a tensor."""

import io

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord

from fedpriv.core.wire import pack, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 4), (2, 3, 1, 2)])
def test_the_bytes_are_flowers_own_and_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (10 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    record = pack({"a.weight": tensor})
    theirs = ArrayRecord(torch_state_dict={"a.weight": tensor})
    assert record["a.weight"] == theirs["a.weight"]
    for source in (record, theirs):
        back = unpack(source)["a.weight"]
        assert back.dtype == dtype
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)


def test_transposed_tensors_and_devices_views_are_laid_out_anew() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    assert torch.equal(unpack(pack({"a": tensor}))["a"], tensor)


def test_no_memory_is_shared() -> None:
    tensor = torch.zeros(3)
    record = pack({"a": tensor})
    first = unpack(record)["a"]
    first += 1
    tensor += 2
    assert torch.equal(unpack(record)["a"], torch.zeros(3))


def test_another_writers_header_is_read() -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.arange(4.0), version=(2, 0))
    record = ArrayRecord({"a": Array("float64", (4,), "numpy.ndarray", buffer.getvalue())})
    assert unpack(record)["a"].tolist() == [0, 1, 2, 3]


GOOD = pack({"a": torch.arange(6.0)})["a"].data


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (6,), "numpy.ndarray", GOOD[:-3]),
        Array("float32", (6,), "numpy.ndarray", GOOD[:20]),
        Array("float32", (6,), "numpy.ndarray", b""),
        Array("float32", (7,), "numpy.ndarray", GOOD),
        Array("float64", (6,), "numpy.ndarray", GOOD),
        Array("float32", (6,), "pickle", GOOD),
        Array("no type", (6,), "numpy.ndarray", GOOD),
        Array("object", (6,), "numpy.ndarray", GOOD),
        Array("U4", (6,), "numpy.ndarray", np.lib.format.MAGIC_PREFIX),
    ],
    ids=["cut", "header cut", "empty", "other shape", "other type", "other format", "unknown", "object", "text"],
)
def test_what_is_no_tensor_is_refused(array: Array) -> None:
    with pytest.raises(ValueError, match=r"^an array "):
        unpack(ArrayRecord({"a": array}))


def test_pickled_objects_are_never_loaded() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"x": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"^an array "):
        unpack(ArrayRecord({"a": Array("object", (1,), "numpy.ndarray", buffer.getvalue())}))


def test_no_room_is_made_for_bytes_that_are_not_there() -> None:
    """A header of a terabyte, by a sender who agrees with it: refused before numpy asks for the memory."""
    shape = (2**38,)
    buffer = io.BytesIO()
    np.lib.format.write_array_header_2_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
    with pytest.raises(ValueError, match=r"^an array of float32 \(274877906944,\) comes with 0 bytes"):
        unpack(ArrayRecord({"a": Array("float32", shape, "numpy.ndarray", buffer.getvalue())}))


def test_a_header_that_is_no_literal_is_refused() -> None:
    """Numpy's second try, for files of Python 2, tokenises the header and raises an error of the tokeniser's."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (6,)"
    content = np.lib.format.MAGIC_PREFIX + b"\x01\x00" + len(header).to_bytes(2, "little") + header
    with pytest.raises(ValueError, match=r"^an array cannot be read"):
        unpack(ArrayRecord({"a": Array("float32", (6,), "numpy.ndarray", content)}))
