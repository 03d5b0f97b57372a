"""Files that ask for more memory than they look like: refused in one line before any is given, whatever they say."""

import bz2
import gzip
import io
import json
import re
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedpriv.attacks import observation
from fedpriv.core.config import DataConfig, Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.npz import HEADER_BYTES, parse_header, read_arrays, read_headers
from fedpriv.core.runs import RunFolder
from fedpriv.data import files as data_files
from fedpriv.data.datasets import list_datasets, load_dataset
from fedpriv.data.files import read_npz

MIB = 1 << 20
PACKED = {"stored": zipfile.ZIP_STORED, "deflated": zipfile.ZIP_DEFLATED, "lzma": zipfile.ZIP_LZMA}
# LZMA keeps a dictionary of 8 MiB by default, and unpacks 4 KiB of zeros to 28 MiB.
LIMITS = {"stored": 2 * MIB, "deflated": 2 * MIB, "lzma": 40 * MIB}
NAMES = ("x_train", "y_train", "x_test", "y_test")


def arrays(**changes: np.ndarray) -> dict[str, np.ndarray]:
    labels = np.arange(20) % 4
    right = {"x_train": np.zeros((20, 8, 8), np.uint8), "y_train": labels, "x_test": np.ones((8, 8, 8), np.uint8)}
    return {**right, "y_test": labels[:8], **changes}


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def archive(
    path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED, sizes: dict[str, int] | None = None
) -> Path:
    """Write an archive whose directory says of some members that they have another size than they have."""
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in members.items():
            file.writestr(name, content)
        for member in file.filelist:
            member.file_size = (sizes or {}).get(member.filename, member.file_size)
    return path


def packed(path: Path, method: int = zipfile.ZIP_DEFLATED, **changes: np.ndarray) -> Path:
    return archive(path, {f"{name}.npy": npy(value) for name, value in arrays(**changes).items()}, method)


@contextmanager
def at_most(bytes_: int) -> Iterator[None]:
    """Of what Python and numpy ask for in this block, all at once."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= bytes_, f"{peak / MIB:.1f} MiB"


def refusal(function: Callable[..., object], *given: Any, bytes_: int = 2 * MIB, **options: Any) -> str:
    with at_most(bytes_), pytest.raises(InputError) as caught:
        function(*given, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


# ---- what files ask for ---------------------------------------------------------------------------------------------

LARGE = {
    "x_train": {"x_train": np.zeros((20, 300, 300, 3), np.uint8), "x_test": np.zeros((8, 300, 300, 3), np.uint8)},
    "x_test": {"x_test": np.zeros((50_000, 8, 8), np.uint8), "y_test": np.zeros(50_000, np.uint8)},
    "y_train": {"x_train": np.zeros((200_000, 2, 2), np.uint8), "y_train": np.arange(200_000) % 4}
    | {"x_test": np.zeros((8, 2, 2), np.uint8)},
    "class_names": {"class_names": np.array([f"{number:0300}" for number in range(5_000)])},
}


@pytest.mark.parametrize(
    ("which", "method"), [("x_train", "lzma"), ("x_test", "deflated"), ("y_train", "lzma"), ("class_names", "deflated")]
)
def test_what_is_asked_for_is_told_and_allowed_to_the_mib(which: str, method: str, tmp_path: Path) -> None:
    path = packed(tmp_path / "own.npz", PACKED[method], **LARGE[which])
    assert path.stat().st_size < 500_000
    message = refusal(read_npz, path, 1, bytes_=LIMITS[method])
    found = re.fullmatch(
        rf"{re.escape(str(path))}: reading it takes (\d+) MiB of memory, data\.memory = 1 allows 1; "
        r"--set data\.memory=(\d+) reads it",
        message,
    )
    assert found is not None, message
    assert found[1] == found[2]
    needed = int(found[1])
    assert f"--set data.memory={needed} reads it" in refusal(read_npz, path, needed - 1, bytes_=LIMITS[method])
    content = read_npz(path, needed)
    for name, value in arrays(**LARGE[which]).items():
        np.testing.assert_array_equal(getattr(content, name), value)


@pytest.mark.parametrize("which", LARGE)
def test_reading_takes_what_was_told(which: str, tmp_path: Path) -> None:
    """Within a tenth and a MiB, by Python's own account of what was allocated."""
    path = packed(tmp_path / "own.npz", zipfile.ZIP_STORED, **LARGE[which])
    needed = sum(map(data_files.needed_memory, read_headers(path, (*NAMES, "class_names")).values()))
    tracemalloc.start()
    load_dataset(DataConfig(name="npz", path=str(path)), 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 1.1 * needed + MIB
    assert which == "class_names" or peak >= 0.45 * needed


def test_the_default_refuses_what_is_larger_than_most_machines(tmp_path: Path) -> None:
    """26 MB that ask for 5.6 GiB: here neither is written."""
    shape = (40_000, 224, 224, 3)
    size = int(np.prod(shape, dtype=np.int64))
    members = {f"{name}.npy": npy(value) for name, value in arrays().items()}
    members |= {"x_train.npy": header(shape), "y_train.npy": npy(np.arange(40_000) % 4)}
    members["x_test.npy"] = npy(np.zeros((8, 224, 224, 3), np.uint8))
    path = archive(tmp_path / "own.npz", members, sizes={"x_train.npy": len(header(shape)) + size})
    message = refusal(load_dataset, DataConfig(name="npz", path=str(path)), 0)
    assert "takes 11,488 MiB of memory, data.memory = 4096 allows 4,096; --set data.memory=11488" in message


def test_images_that_are_no_bytes_are_refused_as_such_however_many(tmp_path: Path) -> None:
    """More memory would not help."""
    path = packed(tmp_path / "own.npz", x_train=np.zeros((20, 300, 300, 3)))
    assert refusal(read_npz, path, 1).endswith("x_train has dtype float64; expected uint8 (0 to 255)")


@pytest.mark.parametrize("memory", [0, -1, 1.5, 1_000_001])
def test_the_key_is_a_whole_number_of_mib(memory: float) -> None:
    with pytest.raises(ValueError, match="memory"):
        DataConfig.model_validate({"memory": memory})


# ---- what they hold -------------------------------------------------------------------------------------------------

BIG = 1 << 36
START = header((20, 8, 8))
LIES: dict[str, tuple[bytes, int | None, str]] = {
    "a header of more than is there": (header((BIG,)), None, "its header fits another array than the one of 128 bytes"),
    "a header of less than is there": (START + bytes(1281), None, "its header fits another array"),
    "a directory of more than is there": (header((20, 64, BIG)), len(START) + 1280 * BIG, "x_train is empty|takes"),
    "both of more than is there": (START + bytes(99), len(START) + 1280, "cannot be read, truncated or damaged"),
    "a directory of less than is there": (START + bytes(1280), 700, "fits another array|Bad CRC"),
    "a shape below zero": (header((-20, -64)), None, r"no array has the type uint8 and the shape \(-20, -64\)"),
    "a size beyond numbers": (header((10**4000, 10**4000)), None, "its header fits another array"),
    "items of no size": (header((BIG,), "<U0"), None, "no array has the type <U0"),
    "objects": (header((20,), "|O") + bytes(160), None, "x_train holds Python objects, which are not read"),
    "a header of 4 GiB": (
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b" " * 500,
        None,
        "its header is damaged",
    ),
    "a header that is no header": (b"\x93NUMPY\x01\x00\x10\x00" + b"[" * 16, None, "its header is damaged"),
    "a header of an unknown version": (
        b"\x93NUMPY\x09\x00" + START[8:],
        None,
        r"its header has version 9\.0; read are 1\.0 and 2\.0",
    ),
    "no header": (b"a picture", None, "it does not begin as an array that numpy has saved"),
    "nothing": (b"", None, "it does not begin as an array that numpy has saved"),
}


@pytest.mark.parametrize("method", PACKED)
@pytest.mark.parametrize("lie", LIES)
def test_an_array_that_lies_about_its_size_is_refused(lie: str, method: str, tmp_path: Path) -> None:
    content, size, why = LIES[lie]
    members = {f"{name}.npy": npy(value) for name, value in arrays().items()} | {"x_train.npy": content}
    sizes = {} if size is None else {"x_train.npy": size}
    path = archive(tmp_path / "own.npz", members, PACKED[method], sizes)
    message = refusal(read_npz, path, 100, bytes_=LIMITS[method])
    assert message.startswith(f"{path}: ")
    assert re.search(why, message), message


def test_more_than_the_directory_says_is_not_unpacked(tmp_path: Path) -> None:
    """A bomb with the right checksum: 20 MB of zeros, of which the directory names 1,408 bytes."""
    members = {f"{name}.npy": npy(value) for name, value in arrays().items()}
    members["x_train.npy"] = START + bytes(20_000_000)
    path = archive(tmp_path / "own.npz", members, zipfile.ZIP_DEFLATED, {"x_train.npy": len(START) + 1280})
    with zipfile.ZipFile(path, "a") as file:
        file.getinfo("x_train.npy").CRC = zlib.crc32(START + bytes(1280))
        file._didModify = True  # type: ignore[attr-defined]
    with at_most(2 * MIB):
        np.testing.assert_array_equal(read_npz(path, 1).x_train, np.zeros((20, 8, 8), np.uint8))


def test_packed_by_bzip2_is_refused_which_nothing_limits(tmp_path: Path) -> None:
    assert len(bz2.compress(bytes(4_500_000))) < 50
    path = packed(tmp_path / "own.npz", zipfile.ZIP_BZIP2)
    assert refusal(read_npz, path, 100) == (
        f"{path}: x_train is packed in a way that is not read; save it with np.savez or np.savez_compressed"
    )


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("second", ["x_train.npy", "x_train"])
def test_two_arrays_of_one_name_are_refused(second: str, tmp_path: Path) -> None:
    path = packed(tmp_path / "own.npz")
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(second, npy(np.ones((20, 8, 8), np.uint8)))
    assert refusal(read_npz, path, 100) == f"{path}: the archive holds x_train 2 times"


def test_arrays_in_folders_and_other_arrays_are_not_read(tmp_path: Path) -> None:
    members = {f"{name}.npy": npy(value) for name, value in arrays().items()}
    path = archive(tmp_path / "own.npz", {**members, "more.npy": header((BIG,)), "a/x_train.npy": header((BIG,))})
    assert len(read_npz(path, 1).x_train) == 20
    members["a/x_train.npy"] = members.pop("x_train.npy")
    assert refusal(read_npz, archive(path, members), 100).startswith(f"{path}: lacks x_train;")


ARRAYS = {
    "numbers": np.arange(70_000.0).reshape(7, 100, 100),
    "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "texts": np.array(["a", "ää"]),
    "none": np.zeros((3, 0)),
    "one": np.array(2.5, np.float32),
    "other end": np.arange(5, dtype=">u2"),
}


@pytest.mark.parametrize("method", PACKED)
@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_are_read_as_numpy_reads_them(array: np.ndarray, method: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", {"a.npy": npy(array), "b": npy(array)}, PACKED[method])
    headers = read_headers(path, ["a", "b", "c"])
    with np.load(path, allow_pickle=False) as expected:
        for name, one in headers.items():
            whole = expected[name]
            assert (one.dtype, one.shape, one.nbytes) == (whole.dtype, whole.shape, whole.nbytes)
            np.testing.assert_array_equal(read_arrays(path, headers)[name], whole)
    assert list(headers) == ["a", "b"]


def test_headers_are_all_that_is_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path / "own.npz", zipfile.ZIP_STORED, x_train=np.zeros((20, 600, 600, 3), np.uint8))
    asked: list[int] = []
    read = zipfile.ZipExtFile.read

    def counted(stream: zipfile.ZipExtFile, size: int = -1) -> bytes:
        asked.append(size)
        return read(stream, size)

    monkeypatch.setattr(zipfile.ZipExtFile, "read", counted)
    read_headers(path, NAMES)
    assert asked
    assert max(asked) <= HEADER_BYTES
    assert min(asked) > 0


@pytest.mark.parametrize("keep", [0, 5, 9, 30, 70])
def test_headers_that_are_cut_off_are_none(keep: int) -> None:
    with pytest.raises(ValueError, match=r"does not begin as an array|header is damaged"):
        parse_header(START[:keep])


# ---- other files ----------------------------------------------------------------------------------------------------


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes() + content


def mnist(folder: Path, **changes: bytes) -> Path:
    (folder / "MNIST" / "raw").mkdir(parents=True)
    labels = bytes(range(10))
    right = {"train-images-idx3": idx((10, 28, 28), bytes(7840)), "train-labels-idx1": idx((10,), labels)}
    right |= {"t10k-images-idx3": idx((10, 28, 28), bytes(7840)), "t10k-labels-idx1": idx((10,), labels)}
    for name, content in {**right, **changes}.items():
        (folder / "MNIST" / "raw" / f"{name}-ubyte.gz").write_bytes(gzip.compress(content, 1))
    return folder


def load_mnist(root: Path, memory: int = 4096) -> None:
    load_dataset(DataConfig(name="mnist", root=str(root), download=False, memory=memory), 0)


def test_idx_files_that_ask_for_too_much_are_refused(tmp_path: Path) -> None:
    root = mnist(tmp_path, **{"train-images-idx3": idx((2**31, 2**31, 2**31), b"")})
    assert "MNIST/raw: reading it takes " in refusal(load_mnist, root)
    assert "--set data.memory=" in refusal(load_mnist, root)


def test_more_than_an_idx_file_says_is_not_unpacked(tmp_path: Path) -> None:
    root = mnist(tmp_path, **{"train-images-idx3": idx((10, 28, 28), bytes(20_000_000))})
    assert "more bytes of data, its header says (10, 28, 28)" in refusal(load_mnist, root)


def test_labels_as_large_as_they_like_are_listed(tmp_path: Path) -> None:
    """One count a label up to 2^40 would be 8 TiB."""
    labels = np.array([2**40] * 14 + [3] * 14 + [1])
    np.savez(tmp_path / "lfw.npz", y_train=labels, y_test=labels[:0])
    (status,) = (one for one in list_datasets(str(tmp_path)) if one.name == "lfw")
    assert (status.available, status.examples) == (True, 28)


def png(width: int, height: int) -> bytes:
    """Says that it has so many pixels, and holds none."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    start = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", start) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [251, 11_000, 60_000])
def test_pictures_of_another_size_are_not_unpacked(side: int, tmp_path: Path) -> None:
    folder = tmp_path / "lfw-py" / "lfw-deepfunneled"
    for person in ("a", "b"):
        (folder / person).mkdir(parents=True)
        for number in range(14):
            (folder / person / f"{number}.jpg").write_bytes(png(side, side))
    Image.preinit()  # the first picture of a process loads Pillow's plugins, which is not what is measured
    message = refusal(load_dataset, DataConfig(name="lfw", root=str(tmp_path), download=False), 0)
    assert f"{side}x{side} pixels; expected 250x250" in message or "decompression bomb" in message


TENSORS: dict[str, dict[str, dict[str, Any]]] = {
    "more than is there": {"a": {"shape": [2**40], "data_offsets": [0, 2**42]}},
    "the same bytes twice": {name: {"shape": [4], "data_offsets": [0, 16]} for name in "ab"},
    "a size beyond numbers": {"a": {"shape": [2**62, 4], "data_offsets": [0, 0]}},
    "less than is there": {"a": {"shape": [2], "data_offsets": [0, 8]}},
}


@pytest.mark.parametrize("lie", TENSORS)
def test_checkpoints_and_observations_ask_for_what_the_file_holds(lie: str, tmp_path: Path) -> None:
    """safetensors sees to that: tensors cover the file once, and nothing is packed."""
    about = json.dumps({name: {"dtype": "F32", **one} for name, one in TENSORS[lie].items()}).encode()
    content = struct.pack("<Q", len(about)) + about + bytes(16)
    folder = RunFolder.create(tmp_path / "run", Experiment())
    (folder.path / "checkpoint" / "server.safetensors").write_bytes(content)
    assert "server.safetensors is damaged" in refusal(folder.load_checkpoint)
    (tmp_path / "0001-0000.safetensors").write_bytes(content)
    assert "0001-0000.safetensors is damaged" in refusal(observation._read_tensors, tmp_path / "0001-0000.safetensors")
