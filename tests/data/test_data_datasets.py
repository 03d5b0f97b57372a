"""Data sets: found in every layout, exactly what the files hold, and refused in one line when they cannot be used."""

import gzip
import hashlib
import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from fedpriv.core.config import DataConfig
from fedpriv.core.errors import InputError
from fedpriv.core.registry import DATASETS
from fedpriv.data.datasets import Dataset, list_datasets, load_dataset
from fedpriv.data.source import Place
from tests.command_line import python

IDX = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}


def images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def arrays(shape: tuple[int, ...] = (8, 8, 3), classes: int = 4, **changes: Any) -> dict[str, np.ndarray]:
    """A small data set that is right, and then ``changes``; None leaves an array out."""
    right = {
        "x_train": images(20, *shape),
        "y_train": np.arange(20, dtype=np.uint8) % classes,
        "x_test": images(8, *shape, seed=1),
        "y_test": np.arange(8, dtype=np.uint8) % classes,
    }
    return {name: value for name, value in (right | changes).items() if value is not None}


def load(name: str = "digits", seed: int = 0, **options: Any) -> Dataset:
    return load_dataset(DataConfig(**{"name": name, "download": False} | options), seed)


def own(path: Path, seed: int = 0, **options: Any) -> Dataset:
    return load_dataset(DataConfig(name="npz", path=str(path), **options), seed)


def refusal(function: Callable[..., object], *given: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        function(*given, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write_idx(folder: Path, values: dict[str, np.ndarray], packed: bool) -> Path:
    folder.mkdir(parents=True)
    for name, stem in IDX.items():
        array = values[name]
        content = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
        (folder / f"{stem}.gz").write_bytes(gzip.compress(content)) if packed else (folder / stem).write_bytes(content)
    return folder


# --- digits -------------------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns_split_into_four_fifths_and_one() -> None:
    from sklearn.datasets import load_digits

    data = load("digits")
    assert data.shape == (1, 8, 8) and data.classes == 10
    assert (len(data.x_train), len(data.x_test)) == (1437, 360)
    assert data.x_train.dtype == data.x_test.dtype == torch.uint8
    assert data.y_train.dtype == data.y_test.dtype == torch.int64
    original = load_digits()
    levels = {level: round(level * 255 / 16) for level in range(17)}
    expected = sorted(
        (int(y), bytes(levels[int(v)] for v in x.flatten()))
        for x, y in zip(original.images, original.target, strict=True)
    )
    together = zip(torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test]), strict=True)
    assert sorted((int(y), x.numpy().tobytes()) for x, y in together) == expected
    whole = np.bincount(original.target)
    np.testing.assert_allclose(data.y_test.bincount().numpy(), whole / 5, atol=1)


def test_the_split_of_digits_is_public() -> None:
    """The same for every seed; the first labels pin it across versions."""
    assert load("digits", 0) is load("digits", 1)
    assert hashlib.sha256(load("digits").y_test.numpy().tobytes()).hexdigest()[:16] == "4493b2052e7b4258"


# --- scale --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
def test_normalise_takes_mean_and_deviation_of_each_channel(shape: tuple[int, ...], tmp_path: Path) -> None:
    data = Dataset("x", *[torch.zeros(1, 3, 4, 4)] * 4, ("a",), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "")  # type: ignore[arg-type]
    pixels = torch.from_numpy(images(1, *shape, 3, 4, 4)[0])
    fed = data.normalise(pixels)
    assert fed.dtype == torch.float32 and fed.shape == pixels.shape
    mean, std = np.array([0.1, 0.2, 0.3])[:, None, None], np.array([0.4, 0.5, 0.6])[:, None, None]
    np.testing.assert_allclose(fed, (pixels.numpy() / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(data.normalise(pixels.double() / 255), fed)


# --- files of one's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8), (15, 16, 13), (9, 5, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_own_file_is_read_as_it_is(shape: tuple[int, ...], dtype: type, tmp_path: Path) -> None:
    content = arrays(shape)
    content["y_train"] = content["y_train"].astype(dtype)
    np.savez(tmp_path / "own.npz", **content, something_else=np.zeros(3))
    data = own(tmp_path / "own.npz")
    channels = shape[2] if len(shape) == 3 else 1
    assert data.shape == (channels, *shape[:2])
    np.testing.assert_array_equal(data.x_test.permute(0, 2, 3, 1).reshape(8, *shape), content["x_test"])
    np.testing.assert_array_equal(data.x_train.permute(0, 2, 3, 1).reshape(20, *shape), content["x_train"])
    np.testing.assert_array_equal(data.y_train, content["y_train"].astype(int))
    assert data.y_train.dtype == torch.int64
    assert data.class_names == ("0", "1", "2", "3")
    assert data.mean == data.std == (0.5,) * channels
    assert "own.npz" in data.source


@pytest.mark.parametrize("names", [np.array(["cat", "dog", "sheep", "yak", "gnu"]), np.array([b"a", b"b", b"c", b"d"])])
def test_class_names_say_how_many_classes_there_are(names: np.ndarray, tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **arrays(class_names=names))
    data = own(tmp_path / "own.npz")
    assert data.classes == len(names) and all(isinstance(name, str) for name in data.class_names)


@pytest.mark.parametrize(("said", "shape"), [("first", (15, 16, 13)), ("last", (13, 15, 16)), (None, (13, 15, 16))])
def test_which_axis_has_the_channels(said: str | None, shape: tuple[int, ...], tmp_path: Path) -> None:
    """As the setting says; unset, the shorter axis, and a note says so."""
    np.savez(tmp_path / "own.npz", **(content := arrays((15, 16, 13))))
    data = own(tmp_path / "own.npz", channels=said)
    axes = (0, 1, 2, 3) if said == "first" else (0, 3, 1, 2)
    assert data.shape == shape and np.array_equal(data.x_test, content["x_test"].transpose(axes))
    note = "The last axis of x_train, (20, 15, 16, 13), was taken as 13 channels; else set data.channels."
    assert (note in data.notes) == (said is None)
    assert data.example == "an image of {} channels, {} x {} pixels".format(*shape)


@pytest.mark.parametrize(("said", "shape"), [("first", (22, 1, 64)), ("last", (64, 1, 22)), (None, (1, 22, 64))])
def test_signals_with_channels(said: str | None, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Channels of a signal are those of the network; whoever says which axis they are says that it is a signal."""
    np.savez(tmp_path / "own.npz", **(content := arrays((22, 64))))
    data = own(tmp_path / "own.npz", channels=said)
    x = content["x_train"].swapaxes(1, 2) if said == "last" else content["x_train"]
    assert data.shape == shape and np.array_equal(data.x_train.reshape(20, *x.shape[1:]), x)
    assert data.kind == ("image" if said is None else "signal")


def test_arrays_without_test_data(tmp_path: Path) -> None:
    """A share of each client's examples is drawn, with their labels; where there are test data it is refused."""
    x, client = np.arange(40, dtype=np.uint8)[:, None].repeat(64, 1).reshape(40, 8, 8), np.arange(40) // 10
    np.savez(tmp_path / "own.npz", x_train=x, y_train=np.arange(40) % 3, client=client)
    data = own(tmp_path / "own.npz", test_share=0.3)
    train, test = (part[:, 0, 0, 0].numpy() for part in (data.x_train, data.x_test))
    assert sorted([*train, *test]) == list(range(40)) and np.bincount(test // 10).tolist() == [3] * 4
    assert data.keys is not None
    for rows, labels, owners in ((train, data.y_train, data.keys.train), (test, data.y_test, data.keys.test)):
        assert labels.tolist() == (rows % 3).tolist() and owners.tolist() == (rows // 10).tolist()
    np.savez(tmp_path / "own.npz", **arrays())
    assert refusal(own, tmp_path / "own.npz", test_share=0.3).endswith("own.npz has test data of its own")


@pytest.mark.parametrize("values", [[1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0], [0, 2, 5, 11]])
def test_labels_with_gaps_are_the_classes(values: list[Any], tmp_path: Path) -> None:
    """Whole numbers that do not count from 0 are named, in order."""
    chosen = np.array(values)
    np.savez(tmp_path / "own.npz", **arrays(y_train=chosen[np.arange(20) % 4], y_test=chosen[np.arange(8) % 4]))
    data = own(tmp_path / "own.npz")
    assert data.class_names == tuple(f"{value:g}" for value in values)
    assert data.y_train.tolist() == [row % 4 for row in range(20)]


def test_compressed_files_are_read(tmp_path: Path) -> None:
    content = arrays()
    np.savez_compressed(tmp_path / "deflated.npz", **content)
    with zipfile.ZipFile(tmp_path / "lzma.npz", "w", zipfile.ZIP_LZMA) as archive:
        for name, value in content.items():
            buffer = io.BytesIO()
            np.save(buffer, value)
            archive.writestr(f"{name}.npy", buffer.getvalue())
    assert torch.equal(own(tmp_path / "deflated.npz").x_train, own(tmp_path / "lzma.npz").x_train)


WRONG = [
    ({"x_train": None}, "own.npz: has y_train, x_test, y_test, and lacks x_train; expected x_train, y_train, "),
    ({"y_test": None}, "lacks y_test"),
    ({"y_test": None, "x_test": None, "client": np.zeros(3, int)}, "client has shape (3,); expected 20, as x_train"),
    ({"x_train": np.full((20, 8, 8, 3), 2, np.float32)}, "x_train is float32 from 2 to 2; expected 0 to 255 in whole"),
    ({"x_test": np.full((8, 8, 8, 3), np.nan)}, "x_test[0] holds nan (and 7 more examples); expected finite numbers"),
    (
        {"x_train": np.where(np.arange(20) == 7, np.inf, 0.0)[:, None], "x_test": None, "y_test": None},
        "x_train[7] holds inf; expected finite numbers",
    ),
    ({"x_train": np.full((20, 8, 8, 3), -1)}, "in floating point; (x - low) / (high - low) fits"),
    ({"x_train": np.full((20, 8, 8, 3), "a")}, "x_train has dtype <U1; expected numbers"),
    (
        {"x_train": np.zeros((20,), np.uint8)},
        "x_train has shape (20,); expected (N, T), (N, H, W), (N, H, W, C) or (N, C, H, W)",
    ),
    ({"x_train": np.zeros((20, 1, 8, 8, 3), np.uint8)}, "x_train has shape (20, 1, 8, 8, 3)"),
    ({"x_train": np.zeros((20, 8, 8, 8), np.uint8)}, "data.channels = 'first' or 'last' says which axis has"),
    ({"x_train": np.zeros((20, 8, 9, 3), np.uint8)}, "images of x_train have shape (8, 9, 3), of x_test (8, 8, 3)"),
    ({"x_train": np.zeros((19, 8, 8, 3), np.uint8)}, "y_train has 20 labels for 19 images"),
    ({"y_test": np.zeros(9, np.uint8)}, "y_test has 9 labels for 8 images"),
    ({"y_train": np.arange(20) % 4 - 1}, "y_train has the label -1; labels count from 0"),
    (
        {"y_train": np.arange(20) % 4 + 0.5},
        "y_train has dtype float64; fedpriv classifies: expected integers, the numbers of classes",
    ),
    ({"y_train": np.array(["cat"] * 20)}, "no training example has the class 0; training examples have cat"),
    (
        {"y_train": np.ones((20, 4), int)},
        "y_train: row 1 is [1, 1, 1, 1]; expected one 1 in each row, and 0 elsewhere: an example has one label",
    ),
    (
        {"y_train": np.zeros((20, 4, 1), int)},
        "y_train has shape (20, 4, 1); fedpriv classifies whole examples: expected (20,), a label each",
    ),
    ({"client": np.zeros(19)}, "client is float64 of shape (19,); expected 20 numbers or texts, one an example"),
    ({"y_train": np.arange(20) % 4 + 1}, "no training example has the class 0; training examples have 1, 2, 3, 4"),
    ({"y_test": np.arange(8) + 1}, "no training example has the class 4; training examples have 0, 1, 2, 3"),
    (
        {"x_train": np.zeros((30, 8, 8), np.uint8), "y_train": np.arange(30) ** 2},
        "its labels are 30 different numbers from 0 to 841; fedpriv classifies: write ranges of an amount",
    ),
    ({"class_names": np.array(["a", "b", "c"])}, "label 3 has no class; 3 classes are named, counted from 0"),
    ({"class_names": np.arange(4)}, "class_names is int64 of shape (4,); expected a list of texts"),
    ({"class_names": np.array(["a", "b", "c", "d"], dtype=object)}, "class_names holds Python objects"),
    ({"x_train": np.array([[1], [1, 2]], dtype=object)}, "x_train holds Python objects, which are not read"),
    ({"x_train": np.zeros((0, 8, 8, 3), np.uint8), "y_train": np.zeros(0, int)}, "x_train is empty"),
    ({"x_test": np.zeros((0, 8, 8, 3), np.uint8), "y_test": np.zeros(0, int)}, "x_test is empty"),
    ({"x_train": np.zeros((20, 0, 8, 3), np.uint8)}, "x_train is empty: shape (20, 0, 8, 3)"),
]


@pytest.mark.parametrize(("changes", "why"), WRONG, ids=[why[:40] for _, why in WRONG])
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **arrays(**changes))
    message = refusal(own, tmp_path / "own.npz")
    assert message.startswith(f"{tmp_path / 'own.npz'}: ") and why in message


def test_files_that_are_not_there_or_not_named_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(own, tmp_path / "none.npz") == f"{tmp_path / 'none.npz'}: no such file"
    assert "no such file" in refusal(own, tmp_path)
    torch.save(arrays(), tmp_path / "own.pt")
    makes = "numpy.savez(FILE, x_train=..., y_train=..., ...) makes one of arrays"
    path = tmp_path / "own.pt"
    assert refusal(own, path) == f"{path}: what torch.save writes, not an .npz archive; {makes}"
    monkeypatch.chdir(tmp_path)
    moved = f"moved.npz: no such file in the current folder, {tmp_path}, where relative paths begin"
    assert refusal(own, Path("moved.npz")) == moved


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "npy", "pickle"])
def test_damaged_files_are_refused(method: int, damage: str, tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, value in arrays().items():
            buffer = io.BytesIO()
            np.save(buffer, value)
            archive.writestr(f"{name}.npy", buffer.getvalue())
    whole = path.read_bytes()
    buffer = io.BytesIO()
    np.save(buffer, images(2, 8, 8))
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "flipped": whole[:300] + bytes(byte ^ 0xFF for byte in whole[300:900]) + whole[900:],
            "empty": b"",
            "text": b"these are no images",
            "npy": buffer.getvalue(),
            "pickle": pickle.dumps({"x_train": 1}),
        }[damage]
    )
    message = refusal(own, path)
    assert message.startswith(f"{path}: ")
    assert "truncated" in message


# --- subsets ------------------------------------------------------------------------------------------------------


def test_a_subset_is_drawn_by_the_seed() -> None:
    complete = load("digits")
    first, again, other = (load("digits", seed, train_examples=300) for seed in (1, 1, 2))
    assert len(first.x_train) == len(first.y_train) == 300
    assert torch.equal(first.x_train, again.x_train) and not torch.equal(first.x_train, other.x_train)
    rows = {(x.numpy().tobytes(), int(y)) for x, y in zip(complete.x_train, complete.y_train, strict=True)}
    chosen = {(x.numpy().tobytes(), int(y)) for x, y in zip(first.x_train, first.y_train, strict=True)}
    assert chosen <= rows and len(chosen) == 300
    assert first.x_test is complete.x_test and first.class_names == complete.class_names
    assert "300 of its 1437 training examples" in first.source
    assert torch.equal(load("digits", train_examples=1437).x_train, complete.x_train)


def test_more_examples_than_there_are_are_refused() -> None:
    message = refusal(load, "digits", train_examples=1438)
    assert message == "data.train_examples = 1438: digits has 1437 training examples"


def test_loading_twice_gives_the_same_object() -> None:
    config = DataConfig(name="digits", train_examples=10)
    assert load_dataset(config, 3) is load_dataset(config.model_copy(update={"partition": "shards"}), 3)


# --- the MNISTs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(FOLDERS))
@pytest.mark.parametrize("packed", [True, False])
def test_mnists_are_read_where_they_lie(name: str, packed: bool, tmp_path: Path) -> None:
    content = arrays((28, 28), 10)
    folder = write_idx(tmp_path / FOLDERS[name] / "raw", content, packed)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    folder.chmod(0o555)
    data = load(name, root=str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, "nothing is written beside"
    np.testing.assert_array_equal(data.x_train[:, 0], content["x_train"])
    np.testing.assert_array_equal(data.y_test, content["y_test"])
    assert data.shape == (1, 28, 28) and data.classes == 10
    assert str(folder) in data.source


def test_unpacked_files_come_before_packed_ones_and_both_before_npz(tmp_path: Path) -> None:
    unpacked, packed, archive = (arrays((28, 28), 10, x_train=images(20, 28, 28, seed=s)) for s in (5, 6, 7))
    np.savez(tmp_path / "mnist.npz", **archive)
    np.testing.assert_array_equal(load("mnist", root=str(tmp_path)).x_train[:, 0], archive["x_train"])
    folder = write_idx(tmp_path / "second" / "MNIST" / "raw", packed, packed=True)
    np.savez(tmp_path / "second" / "mnist.npz", **archive)
    np.testing.assert_array_equal(load("mnist", root=str(tmp_path / "second")).x_train[:, 0], packed["x_train"])
    write_idx(tmp_path / "third", unpacked, packed=False)
    (tmp_path / "third" / IDX["x_train"]).rename(folder / IDX["x_train"])
    (tmp_path / "second").rename(tmp_path / "fourth")
    np.testing.assert_array_equal(load("mnist", root=str(tmp_path / "fourth")).x_train[:, 0], unpacked["x_train"])


@pytest.mark.parametrize("stem", list(IDX.values()))
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda whole: gzip.compress(whole)[:-20], "truncated or damaged"),
        (lambda whole: gzip.compress(whole)[:5], "truncated or damaged"),
        (lambda whole: gzip.compress(whole)[:30] + b"\x00" * 40, "truncated or damaged"),
        (lambda whole: b"<html>404</html>", "truncated or damaged"),
        (lambda whole: gzip.compress(whole[:-1]), "its header says"),
        (lambda whole: gzip.compress(whole + b"\x00"), "its header says"),
        (lambda whole: gzip.compress(b"\x00\x00\x0d\x01\x00\x00\x00\x01" + b"\x00" * 4), "not an idx file"),
        (lambda whole: gzip.compress(b""), "not an idx file"),
        (lambda whole: gzip.compress(b"\x00\x00\x08\x03\x00\x00"), "not an idx file"),
    ],
)
def test_damaged_idx_files_are_refused(stem: str, damage: Callable[[bytes], bytes], why: str, tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "MNIST" / "raw", arrays((28, 28), 10), packed=True)
    path = folder / f"{stem}.gz"
    path.write_bytes(damage(gzip.decompress(path.read_bytes())))
    message = refusal(load, "mnist", root=str(tmp_path))
    assert message.startswith(f"{path}: ") and why in message


def test_idx_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write_idx(tmp_path / "MNIST" / "raw", arrays((28, 28), 10, y_test=np.arange(9, dtype=np.uint8)), packed=True)
    assert "y_test has 9 labels for 8 images" in refusal(load, "mnist", root=str(tmp_path))
    write_idx(tmp_path / "b" / "MNIST" / "raw", arrays((28, 28), 11), packed=True)
    assert "label 10 has no class; 10 classes are named" in refusal(load, "mnist", root=str(tmp_path / "b"))


# --- CIFAR --------------------------------------------------------------------------------------------------------


def cifar_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """torchvision's layout of CIFAR-10 with small batches, and their MD5 sums in place of the real ones."""
    from torchvision.datasets import CIFAR10

    folder = root / CIFAR10.base_folder
    folder.mkdir()
    content = arrays((32, 32, 3), 10)

    def write(name: str, entry: dict[str, Any]) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(entry))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    def batch(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
        return {"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), "labels": y.tolist()}

    train = [write(f"data_batch_{i + 1}", batch(content["x_train"][i::2], content["y_train"][i::2])) for i in range(2)]
    test = [write("test_batch", batch(content["x_test"], content["y_test"]))]
    name, digest = write("batches.meta", {"label_names": [f"class {i}" for i in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", train)
    monkeypatch.setattr(CIFAR10, "test_list", test)
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": digest})
    return content


def test_cifar_is_read_from_torchvisions_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = cifar_folder(tmp_path, monkeypatch)
    data = load("cifar10", root=str(tmp_path))
    order = np.concatenate([np.arange(0, 20, 2), np.arange(1, 20, 2)])
    np.testing.assert_array_equal(data.x_train.permute(0, 2, 3, 1), content["x_train"][order])
    np.testing.assert_array_equal(data.y_train, content["y_train"][order])
    np.testing.assert_array_equal(data.x_test.permute(0, 2, 3, 1), content["x_test"])
    assert data.class_names[3] == "class 3" and data.shape == (3, 32, 32)


def test_a_complete_set_may_lie_in_two_files(tmp_path: Path) -> None:
    first, rest = arrays((32, 32, 3), 10), arrays((32, 32, 3), 10, x_train=images(20, 32, 32, 3, seed=7))
    np.savez(tmp_path / "cifar10.npz", **first)
    assert "cifar10.npz with cifar10_rest.npz lies in" in refusal(load, "cifar10-complete", root=str(tmp_path))
    np.savez(tmp_path / "cifar10_rest.npz", **rest)
    data, alone = load("cifar10-complete", root=str(tmp_path)), load("cifar10", root=str(tmp_path))
    for given, name in ((data.x_train, "x_train"), (data.x_test, "x_test")):
        wanted = np.concatenate([first[name], rest[name]])
        assert np.array_equal(given.permute(0, 2, 3, 1).numpy(), wanted)
    assert np.array_equal(data.y_train.numpy(), np.concatenate([first["y_train"], rest["y_train"]]))
    assert np.array_equal(data.y_test.numpy(), np.concatenate([first["y_test"], rest["y_test"]]))
    # The first file alone is what it was.
    assert torch.equal(alone.x_train, data.x_train[: len(alone.x_train)])
    np.savez(tmp_path / "cifar10_rest.npz", **rest, class_names=np.array(list("abcdefghij")))
    place = Place("", tmp_path, False, 4096)
    with pytest.raises(InputError, match=r"cifar10_rest\.npz: its classes, or the shape of its images"):
        DATASETS["cifar10-complete"].read(place)


def test_a_damaged_cifar_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar_folder(tmp_path, monkeypatch)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"cut")
    message = refusal(load, "cifar10", root=str(tmp_path))
    assert "cifar-10-batches-py: Dataset not found or corrupted" in message and "delete the folder" in message


def test_cifar_archives_must_have_their_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", **arrays((32, 32, 3), 10))
    assert load("cifar10", root=str(tmp_path)).class_names == tuple(map(str, range(10)))
    np.savez(tmp_path / "cifar100.npz", **arrays((32, 32, 3), 4, class_names=np.array(list("abcd"))))
    assert "4 classes; cifar100 has 100" in refusal(load, "cifar100", root=str(tmp_path))
    (tmp_path / "grey").mkdir()
    np.savez(tmp_path / "grey" / "cifar10.npz", **arrays((32, 32), 10))
    assert "images have 1 channels; cifar10 has 3" in refusal(load, "cifar10", root=str(tmp_path / "grey"))


# --- faces --------------------------------------------------------------------------------------------------------


def test_faces_keep_fourteen_images_of_people_who_have_them(tmp_path: Path) -> None:
    """Three of five people have 14 or more images over both parts of the archive; 42 images, a fifth of them test."""
    counts = [20, 13, 14, 3, 16]
    labels = np.repeat(np.arange(5), counts)
    pixels = images(len(labels), 32, 32, 3)
    test = np.arange(len(labels)) % 5 == 0
    names = np.array(["Ann", "Bo", "Cy", "Di", "Ed"])
    np.savez(
        tmp_path / "lfw.npz",
        x_train=pixels[~test], y_train=labels[~test], x_test=pixels[test], y_test=labels[test], class_names=names,
    )  # fmt: skip
    data = load("lfw", root=str(tmp_path))
    assert data.class_names == ("Ann", "Cy", "Ed")
    y = torch.cat([data.y_train, data.y_test])
    assert y.bincount().tolist() == [14, 14, 14]
    assert len(data.y_test) == 9 and set(data.y_test.bincount().tolist()) == {3}
    person = {image.tobytes(): names[label] for image, label in zip(pixels, labels, strict=True)}
    drawn = torch.cat([data.x_train, data.x_test]).permute(0, 2, 3, 1).contiguous().numpy()
    assert [person[image.tobytes()] for image in drawn] == [data.class_names[label] for label in y]
    assert len({image.tobytes() for image in drawn}) == 42
    assert {status.name: status.examples for status in list_datasets(str(tmp_path))}["lfw"] == 42


def faces_folder(root: Path, counts: dict[str, int], side: int = 250) -> Path:
    """torchvision's layout; every picture has one colour in its central 128 pixels and another around it."""
    folder = root / "lfw-py" / "lfw-deepfunneled"
    for index, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.full((side, side, 3), 200, np.uint8)
            pixels[61:189, 61:189] = [20 * index, 5 * number, 100]
            Image.fromarray(pixels).save(folder / name / f"{name}_{number + 1:04d}.jpg", quality=100, subsampling=0)
    return folder


def test_faces_are_cut_and_reduced_from_torchvisions_folder(tmp_path: Path) -> None:
    faces_folder(tmp_path, {"Ann": 15, "Bo": 2, "Cy": 14})
    data = load("lfw", root=str(tmp_path))
    assert data.class_names == ("Ann", "Cy") and data.shape == (3, 32, 32)
    x, y = torch.cat([data.x_train, data.x_test]).int(), torch.cat([data.y_train, data.y_test])
    assert y.bincount().tolist() == [14, 14]
    inside = x[:, :, 2:-2, 2:-2]  # away from the ringing of JPEG at the edge
    assert (inside.amax((2, 3)) - inside.amin((2, 3))).max() <= 4, "only the centre is seen"
    assert (x - inside.float().mean((2, 3)).int()[:, :, None, None]).abs().max() <= 12, "the frame is cut away"
    assert torch.all((inside[:, 0].float().mean((1, 2)) - 40 * y).abs() < 4)
    assert len({int(value) for value in inside[y == 1, 1].float().mean((1, 2)) / 5 + 0.5}) == 14


def test_faces_average_blocks_of_four(tmp_path: Path) -> None:
    """A lossless picture under a .jpg name, so that the average can be compared to the bit."""
    folder = faces_folder(tmp_path, {"Ann": 14, "Bo": 14})
    pixels = images(1, 250, 250, 3)[0]
    for path in folder.rglob("*.jpg"):
        Image.fromarray(pixels).save(path, format="PNG")
    data = load("lfw", root=str(tmp_path))
    expected = np.zeros((32, 32, 3))
    for row in range(128):
        for column in range(128):
            expected[row // 4, column // 4] += pixels[61 + row, 61 + column] / 16.0
    np.testing.assert_array_equal(data.x_train[0].permute(1, 2, 0), np.rint(expected))


def test_faces_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "lfw.npz", **arrays((32, 32, 3), 4))
    assert "0 people have 14 images or more" in refusal(load, "lfw", root=str(tmp_path))
    small = faces_folder(tmp_path / "small", {"Ann": 14, "Bo": 14}, side=200)
    assert "200x200 pixels; expected 250x250" in refusal(load, "lfw", root=str(tmp_path / "small"))
    for path in small.rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:100])
    assert "not a picture, truncated or damaged" in refusal(load, "lfw", root=str(tmp_path / "small"))


# --- roots and downloads ------------------------------------------------------------------------------------------


def test_the_root_is_the_config_then_the_environment_then_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, folder in enumerate(("config", "environment", "work/data")):
        (tmp_path / folder).mkdir(parents=True)
        np.savez(
            tmp_path / folder / "cifar10.npz", **arrays((32, 32, 3), 10, x_train=images(20, 32, 32, 3, seed=number))
        )
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path / "environment"))
    first = [load("cifar10", root=str(tmp_path / "config")), load("cifar10")]
    monkeypatch.delenv("FEDPRIV_DATA")
    for number, data in enumerate([*first, load("cifar10")]):
        np.testing.assert_array_equal(data.x_train.permute(0, 2, 3, 1), images(20, 32, 32, 3, seed=number))


NAMES = ("mnist", "fashion-mnist", "cifar10", "cifar100", "lfw")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_found_says_what_was_looked_for_where_and_what_to_do(name: str, tmp_path: Path) -> None:
    message = refusal(load, name, root=str(tmp_path), download=False)
    assert re.match(rf"data\.name = '{name}': neither \S+ \(torchvision's files\) nor {name}\.npz lies in ", message)
    assert str(tmp_path) in message and "FEDPRIV_DATA" in message and "data.download = true" in message


KINDS = {
    "mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100", "lfw": "LFWPeople",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error", [OSError("no network\nhere"), RuntimeError("not found"), ValueError("gone")])
def test_a_failed_download_is_told_in_one_line(
    name: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torchvision import datasets

    def fail(root: Path, download: bool, **_: object) -> None:
        print("Downloading ...")
        raise error

    monkeypatch.setattr(datasets, KINDS[name], fail)
    message = refusal(load, name, root=str(tmp_path), download=True)
    assert f"{name}.npz lies in {tmp_path}" in message
    assert message.endswith(f"its download failed: {' '.join(str(error).split())}")
    assert capfd.readouterr() == ("", "")


def test_a_download_is_read_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    content = arrays((28, 28), 10)

    def fetch(root: Path, download: bool) -> None:
        write_idx(Path(root) / "MNIST" / "raw", content, packed=True)

    monkeypatch.setattr(datasets, "MNIST", fetch)
    data = load("mnist", root=str(tmp_path), download=True)
    np.testing.assert_array_equal(data.x_train[:, 0], content["x_train"])


@pytest.mark.slow
def test_without_a_network_the_error_is_one_line_and_nothing_is_printed(tmp_path: Path) -> None:
    """torchvision itself, in another process behind an address that nobody answers at."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "program.py").write_text(
        "from fedpriv.core.config import DataConfig\nfrom fedpriv.data.datasets import load_dataset\n"
        "from fedpriv.core.errors import InputError\n"
        "for name in ('mnist', 'cifar10', 'lfw'):\n"
        f"    try: load_dataset(DataConfig(name=name, root={str(tmp_path / 'empty')!r}), 0)\n"
        "    except InputError as error: print('refused', 'download failed' in str(error), '\\n' in str(error))"
    )
    nobody = "http://127.0.0.1:9"
    done = python("program.py", cwd=tmp_path, http_proxy=nobody, https_proxy=nobody)
    assert (done.stdout, done.stderr) == (3 * "refused True False\n", "")


# --- fedpriv data -------------------------------------------------------------------------------------------------


def test_the_list_of_an_empty_folder_has_digits_only(tmp_path: Path) -> None:
    statuses = list_datasets(str(tmp_path))
    texts = {"agnews", "cola", "rotten_tomatoes", "shakespeare", "sms_spam", "sst2"}
    assert {s.name for s in statuses} == {"adult", "cifar10-complete", "digits", "emnist", "location30", *NAMES, *texts}
    (digits,) = (s for s in statuses if s.available)
    assert (digits.name, digits.where) == ("digits", "embedded in scikit-learn")
    assert digits.examples == len(load("digits").x_train) + len(load("digits").x_test)
    assert all(s.examples is None and not s.where and str(tmp_path) in s.note for s in statuses if s is not digits)


def test_the_list_counts_what_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "MNIST" / "raw", arrays((28, 28), 10), packed=True)
    write_idx(tmp_path / "FashionMNIST" / "raw", arrays((28, 28), 10), packed=False)
    np.savez(tmp_path / "cifar100.npz", **arrays((32, 32, 3), 10))
    (tmp_path / "cifar-10-batches-py").mkdir()
    faces_folder(tmp_path, {"Ann": 15, "Bo": 2, "Cy": 14})
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path))
    listed = {s.name: s.examples for s in list_datasets("") if s.available}
    assert listed == {
        "digits": 1797, "mnist": 28, "fashion-mnist": 28, "cifar10": 60000, "cifar10-complete": 60000, "cifar100": 28,
        "lfw": 28
    }  # fmt: skip


def test_the_list_survives_damaged_files(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "MNIST" / "raw", arrays((28, 28), 10), packed=True)
    (folder / f"{IDX['y_train']}.gz").write_bytes(b"cut")
    (tmp_path / "cifar10.npz").write_bytes(b"cut")
    np.savez(tmp_path / "cifar100.npz", x_train=images(2, 32, 32, 3))
    np.savez(tmp_path / "lfw.npz", **arrays((32, 32, 3), y_train=np.full(20, -1)))
    (tmp_path / "cola.csv.gz").write_bytes(gzip.compress(b"split,label,sentence\n")[:-9])
    statuses = {s.name: s for s in list_datasets(str(tmp_path))}
    for name, why in (
        ("mnist", "damaged"),
        ("cifar10", "truncated"),
        ("cifar100", "lacks y_train"),
        ("lfw", "label -1"),
        ("cola", "ended before the end-of-stream marker"),
    ):
        assert not statuses[name].available and statuses[name].examples is None
        assert why in statuses[name].note and "\n" not in statuses[name].note


# --- the real files -----------------------------------------------------------------------------------------------

REAL = {
    "mnist": ((1, 28, 28), 60000, 10000, 10),
    "fashion-mnist": ((1, 28, 28), 60000, 10000, 10),
    "cifar10": ((3, 32, 32), 14000, 2500, 10),
    "cifar10-complete": ((3, 32, 32), 50000, 10000, 10),
    "cifar100": ((3, 32, 32), 10000, 2000, 100),
    "lfw": ((3, 32, 32), 1187, 297, 106),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REAL if name != "cifar10-complete"])  # 12 seconds of LZMA
def test_real_data_sets_have_their_size_and_constants(name: str, shared_data: Path) -> None:
    """The published mean and standard deviation hold for complete sets to 4 digits, for the CIFAR subsets to 0.002."""
    data = load(name, root=str(shared_data), download=False)
    shape, train, test, classes = REAL[name]
    assert (data.shape, len(data.x_train), len(data.x_test), data.classes) == (shape, train, test, classes)
    assert len(data.y_train.unique()) == classes
    if name != "lfw":
        # Of how often each value is there: as floats the images would take a second of writing to memory.
        counts = torch.stack([torch.bincount(data.x_train[:, c].flatten(), minlength=256) for c in range(shape[0])])
        shares, values = counts / counts.sum(dim=1, keepdim=True, dtype=torch.float64), torch.arange(256.0).double()
        mean = shares @ values
        deviation = (shares @ values.square() - mean.square()).sqrt()
        tolerance = 1e-4 if train >= 50_000 else 2e-3
        np.testing.assert_allclose(mean / 255, data.mean, atol=tolerance)
        np.testing.assert_allclose(deviation / 255, data.std, atol=tolerance)


def test_the_list_of_the_real_folder(shared_data: Path) -> None:
    listed = {s.name: s.examples for s in list_datasets(str(shared_data))}
    texts = {"agnews": 12_600, "cola": 9594, "rotten_tomatoes": 9596, "shakespeare": 7097, "sms_spam": 5171}
    listed.pop("emnist")  # may be there or not
    assert listed == {"adult": 48_842, "digits": 1797, "location30": 5010, "sst2": 69_170} | texts | {
        name: 1484 if name == "lfw" else a + b for name, (_, a, b, _) in REAL.items()
    }


def places(count: int = 5010) -> dict[str, np.ndarray]:
    stream = np.random.default_rng(0)
    return {"x": stream.integers(2, size=(count, 446), dtype=np.uint8), "y": np.arange(count, dtype=np.uint8) % 30}


def test_people_are_rows_of_446_places(tmp_path: Path) -> None:
    np.savez(tmp_path / "location30.npz", **places())
    data = load("location30", root=str(tmp_path))
    assert (data.shape, len(data.x_train), len(data.x_test), data.classes) == ((1, 1, 446), 4000, 1010, 30)
    assert set(data.x_train.unique().tolist()) == {0, 255}
    # Every person is in one part.
    rows = np.concatenate([data.x_train[:, 0, 0].numpy(), data.x_test[:, 0, 0].numpy()]) // 255
    assert sorted(map(bytes, rows)) == sorted(map(bytes, places()["x"]))
    assert np.bincount(data.y_test.numpy()).min() > 30


def test_other_rows_than_places_are_refused(tmp_path: Path) -> None:
    assert "is not there" in refusal(load, "location30", root=str(tmp_path))
    for wrong, said in (
        ({"x": places()["x"]}, "lacks y"),
        (places() | {"x": places()["x"] * 2}, "x has the value 2; expected 0 or 1"),
        (places() | {"x": places()["x"].astype(float)}, "x is float64 of shape"),
        (places() | {"y": places()["y"][:7]}, "has 7 labels for 5010 images"),
    ):
        np.savez(tmp_path / "location30.npz", **wrong)
        assert said in refusal(load, "location30", root=str(tmp_path))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lbfgs failed to converge")
@pytest.mark.parametrize(("name", "accuracy"), [("fashion-mnist", 0.801), ("mnist", 0.888)])
def test_a_linear_model_learns_the_labels(name: str, accuracy: float, shared_data: Path) -> None:
    """A wrong pairing of images and labels would show: logistic regression on the first 3,000 images."""
    from sklearn.linear_model import LogisticRegression

    data = load(name, root=str(shared_data), download=False)
    x, x_test = (images.flatten(1).numpy() / 255 for images in (data.x_train[:3000], data.x_test))
    model = LogisticRegression(max_iter=20).fit(x, data.y_train[:3000].numpy())
    assert model.score(x_test, data.y_test.numpy()) == pytest.approx(accuracy, abs=0.02)


def test_groups_join_classes_and_leave_images_alone() -> None:
    """Label by label, through a table by hand; a subset is drawn before, and is the same one."""
    groups = ((9, 1, 2), (0, 3, 4, 5, 6, 7), (8,))
    table = {label: number for number, group in enumerate(groups) for label in group}
    config = DataConfig(train_examples=100)
    plain, joined = load_dataset(config, 3), load_dataset(config.model_copy(update={"groups": groups}), 3)
    assert joined.y_train.tolist() == [table[label] for label in plain.y_train.tolist()]
    assert joined.y_test.tolist() == [table[label] for label in plain.y_test.tolist()]
    assert joined.x_train is plain.x_train and joined.x_test is plain.x_test
    assert joined.class_names == ("9/1/2", "0/3/4/5/6/7", "8") and joined.classes == 3
    assert joined.digest != plain.digest and joined.source.endswith("; 10 classes in 3 groups")


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (((0, 1), (2,)), "data.groups: class 3 is in no group; each of 0 to 9 is in one"),
        (((0, 1), (10,)), "data.groups: there is no class 10; classes are 0 to 9"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups: tuple[tuple[int, ...], ...], why: str) -> None:
    with pytest.raises(InputError, match=f"^{why}$"):
        load_dataset(DataConfig(groups=groups), 0)


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([[0, 1, 2]], "at least 2 items"),
        ([[0, 1], []], "at least 1 item"),
        ([[0, 1], [1, 2]], "class 1 is named twice"),
        ([[0, -1], [2]], "greater than or equal to 0"),
        ([[0, True], [2]], "expected a number"),
    ],
)
def test_groups_that_are_none_are_refused(groups: list[list[int]], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        DataConfig.model_validate({"groups": groups})
