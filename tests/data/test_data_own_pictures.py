"""Pictures of one's own in every form, written with the library that people write them with, against that library."""

import gzip
import io
import json
import os
import struct
import sys
import types
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import pyarrow as pa
import pytest
import torch
import torchvision
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pyarrow import parquet

from fedpriv.core.config import DataConfig, validated
from fedpriv.core.errors import InputError
from fedpriv.data import datasets as datasets_module
from fedpriv.data import pictures as decoding
from fedpriv.data.datasets import Dataset, load_dataset

DRAW = np.random.default_rng(0)


def loaded(name: str, path: Path, **keys: Any) -> Dataset:
    return load_dataset(validated(DataConfig, {"name": name, "path": str(path), **keys}, "a test"), 0)


def refusal(name: str, path: Path, **keys: Any) -> str:
    with pytest.raises(InputError) as caught:
        loaded(name, path, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pixels(*shape: int) -> np.ndarray:
    return DRAW.integers(0, 256, shape, dtype=np.uint8)


def saved(path: Path, picture: np.ndarray | Image.Image, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(path, **options)


def folder(root: Path, *above: str, colour: bool = True, each: int = 3) -> Path:
    """Pictures of two classes, in the folder itself or in parts of it."""
    for part in above or ("",):
        for label in ("cat", "dog"):
            for number in range(each):
                saved(root / part / label / f"{number}.png", pixels(6, 5, 3) if colour else pixels(6, 5))
    return root


def images(dataset: Dataset) -> np.ndarray:
    """(N, H, W, C): training, then test."""
    both = np.concatenate([dataset.x_train.numpy(), dataset.x_test.numpy()])
    return both.transpose(0, 2, 3, 1)


# --- folders ------------------------------------------------------------------------------------------------------


PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


@pytest.mark.parametrize("mode", PNG_MODES)
def test_opencv_and_pillow_read_the_same_pixels(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, size in product(("none", "text", "turned", "clear"), (None, 8, 5)):
        content = png(mode, text)
        with monkeypatch.context() as patch:
            quick = decoding.read_pictures([("a", content)], 1, size, 1 << 30, "here")
            patch.setattr(decoding, "_has_opencv", lambda: False)
            assert np.array_equal(quick, decoding.read_pictures([("a", content)], 1, size, 1 << 30, "here"))
        is_plain = mode in ("L", "RGB") and text == "none"
        assert (decoding._plain_png("a", content, None, 1 << 30) is not None) == is_plain


def png(mode: str, text: str) -> bytes:
    """A PNG of 8 x 8 random pixels; where asked with a text, turned by EXIF, or with a colour that is clear."""
    draw = np.random.default_rng(0)
    colours = draw.integers(0, 256, (8, 8, 4)).astype(np.uint8)
    deep = draw.integers(0, 2**16, (8, 8)).astype(np.uint16)
    picture = Image.fromarray(deep) if mode == "I;16" else Image.fromarray(colours).convert(mode)
    info, exif = PngInfo(), Image.Exif()
    info.add_text("Software", "a camera")
    exif[274] = 6
    clear = {"transparency": (1, 2, 3) if mode == "RGB" else 1} if mode in ("L", "P", "RGB") else {}
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "text": {"pnginfo": info},
        "turned": {"exif": exif},
        "clear": clear,
    }
    stream = io.BytesIO()
    picture.save(stream, "png", **options[text])
    return stream.getvalue()


def test_damaged_and_large_png_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    content = png("RGB", "none")

    for damaged in (content[:20], content[:40], content[:-40], content[:50] + b"?" + content[51:]):
        with pytest.raises(InputError, match="a: not a picture, truncated or damaged"):
            decoding.read_pictures([("a", damaged)], 1, None, 1 << 30, "here")
    with pytest.raises(InputError, match=r"data\.memory"):
        decoding.read_pictures([("a", content)], 1, None, 0, "here")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("test", ["test", "val", "validation"])
def test_a_folder_is_read_as_torchvision_reads_it(tmp_path: Path, test: str) -> None:
    """Grey, palette, transparent and plain pictures, in its order and with its classes."""
    folder(tmp_path, "train", test)
    saved(tmp_path / "train" / "cat" / "grey.png", pixels(6, 5))
    saved(tmp_path / "train" / "cat" / "clear.png", pixels(6, 5, 4))
    saved(tmp_path / "train" / "dog" / "palette.png", Image.fromarray(pixels(6, 5, 3)).quantize(8))
    saved(tmp_path / "train" / "dog" / "deep" / "below.bmp", pixels(6, 5, 3))
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no picture")
    dataset = loaded("folder", tmp_path)
    for part, x, y in (("train", dataset.x_train, dataset.y_train), (test, dataset.x_test, dataset.y_test)):
        oracle = torchvision.datasets.ImageFolder(str(tmp_path / part))
        ours = {(image.tobytes(), int(label)) for image, label in zip(x.permute(0, 2, 3, 1).numpy(), y, strict=True)}
        assert ours == {(np.asarray(image).tobytes(), label) for image, label in oracle}
        assert dataset.class_names == tuple(oracle.classes)
    assert dataset.shape == (3, 6, 5)
    assert dataset.left_out == "not read: 1 file of .txt"


def test_grey_pictures_have_one_channel(tmp_path: Path) -> None:
    dataset = loaded("folder", folder(tmp_path, colour=False), test_share=0.5)
    assert dataset.shape == (1, 6, 5)
    assert (len(dataset.x_train), len(dataset.x_test)) == (3, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_pictures_are_upright(tmp_path: Path, orientation: int) -> None:
    """As EXIF 2.3 defines orientations: of the stored rows and columns which side is up."""
    upright = pixels(6, 6, 3)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    for part in ("train", "test"):
        saved(tmp_path / part / "a" / "x.png", Image.fromarray(np.ascontiguousarray(stored)), exif=exif)
    assert np.array_equal(loaded("folder", tmp_path).x_train[0].permute(1, 2, 0).numpy(), upright)


def test_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    deep = DRAW.integers(0, 2**16, (6, 5)).astype(np.uint16)
    for part in ("train", "test"):
        saved(tmp_path / part / "a" / "x.png", deep)
    expected = np.floor(deep.astype(np.float64) * 255 / 65535 + 0.5)
    assert np.array_equal(loaded("folder", tmp_path).x_train[0, 0].numpy(), expected)


def test_pictures_of_all_sizes_become_squares(tmp_path: Path) -> None:
    """As torchvision's Resize and CenterCrop make them, but for rounding of where the middle is."""
    wide = np.tile(np.linspace(0, 255, 40).astype(np.uint8), (20, 1))
    for part in ("train", "test"):
        saved(tmp_path / part / "a" / "wide.png", wide)
        saved(tmp_path / part / "a" / "tall.png", wide.T.copy())
    dataset = loaded("folder", tmp_path, size=10)
    tall, across = dataset.x_train[0, 0].numpy(), dataset.x_train[1, 0].numpy()
    resized = torchvision.transforms.functional.resize(Image.fromarray(wide), 10)
    oracle = np.asarray(torchvision.transforms.functional.center_crop(resized, 10)).astype(int)
    assert np.abs(across - oracle).max() <= 7  # a pixel is 13 wide here, half of which a middle may differ by
    assert np.array_equal(tall, across.T)
    assert "data.size = 20 scales the shorter side" in refusal("folder", tmp_path)


def test_a_level_of_folders_are_clients(tmp_path: Path) -> None:
    for owner, count in (("ann", 4), ("bob", 10)):
        folder(tmp_path / owner, each=count // 2)
    dataset = loaded("folder", tmp_path, key="client", test_share=0.5)
    assert dataset.keys is not None and dataset.keys.names == ("ann", "bob")
    assert np.bincount(dataset.keys.train).tolist() == np.bincount(dataset.keys.test).tolist() == [2, 5]
    assert dataset.class_names == ("cat", "dog")


def test_folders_as_people_have_them(tmp_path: Path) -> None:
    """Parts in capitals, a class called train, hidden copies that tools make, and clients taken for classes."""
    brains = folder(tmp_path / "brains", "Training", "Testing")
    saved(brains / "Training" / "cat" / ".ipynb_checkpoints" / "0-checkpoint.png", pixels(6, 5, 3))
    (brains / "Training" / "dog" / "._0.png").write_bytes(b"of another system")
    dataset = loaded("folder", brains)
    assert (len(dataset.x_train), len(dataset.x_test)) == (6, 6) and dataset.class_names == ("cat", "dog")
    vehicles = folder(tmp_path / "vehicles")
    (vehicles / "cat").rename(vehicles / "train")
    assert loaded("folder", vehicles).class_names == ("dog", "train")
    wards = folder(tmp_path / "wards", "ann", "bob")
    (warning,) = loaded("folder", wards).warnings
    assert "folders cat, dog lie in each of ann, bob, which are read as classes" in warning
    assert loaded("folder", wards, key="client").warnings == ()
    assert "a folder 'Test' of test data, and none that is called 'train'" in refusal(
        "folder", folder(tmp_path / "half", "Test")
    )
    (wards / "bob" / "cow").mkdir()
    assert "bob/cow: there is no picture of this class" in refusal("folder", wards, key="client")


def bomb() -> bytes:
    """A PNG that says that it has 60,000 by 60,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    )


def test_wrong_folders(tmp_path: Path) -> None:
    good = folder(tmp_path / "good", "train", "test")
    assert "no such folder" in refusal("folder", tmp_path / "none")
    assert "no folder" in refusal("folder", good / "train" / "cat" / "0.png")
    assert "does not read data.size" in refusal("digits", good, size=4)
    assert "data.key = 'ann': allowed: 'client'" in refusal("folder", good, key="ann")
    assert "has test data of its own" in refusal("folder", good, test_share=0.5)
    (tmp_path / "empty" / "ann" / "cat").mkdir(parents=True)
    assert "no picture lies in CLIENT/CLASS/PICTURE" in refusal("folder", tmp_path / "empty", key="client")
    path = good / "train" / "cat" / "1.png"
    whole = path.read_bytes()
    for content in (b"", whole[:50], b"text" * 9, bomb()):
        path.write_bytes(content)
        assert "1.png: not a picture, truncated or damaged" in refusal("folder", good)
    saved(path, pixels(1000, 200, 3))
    assert "MiB of memory, data.memory = 1 allows 1" in refusal("folder", good, memory=1)
    saved(path, pixels(6, 7, 3))
    assert "1.png: 7x6 pixels, and" in refusal("folder", good) and "0.png has 5x6" in refusal("folder", good)
    path.write_bytes(whole)
    saved(good / "test" / "cow" / "0.png", pixels(6, 5, 3))
    assert "no training example has the class 'cow'" in refusal("folder", good)
    saved(good / "train" / "0.png", pixels(6, 5, 3))
    assert "0.png lies next to the folders of classes" in refusal("folder", good)


# --- the hub ------------------------------------------------------------------------------------------------------


def hub(count: int = 12, colour: bool = True) -> tuple[datasets.Dataset, np.ndarray]:
    """Pictures of three classes and four writers, and their pixels."""
    drawn = pixels(count, 6, 5, 3) if colour else pixels(count, 6, 5)
    rows = {
        "image": [Image.fromarray(each) for each in drawn],
        "label": [number % 3 for number in range(count)],
        "writer": [f"w{number % 4}" for number in range(count)],
    }
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee", "cow"])}
    return datasets.Dataset.from_dict(rows, datasets.Features({**kinds, "writer": datasets.Value("string")})), drawn


@pytest.mark.parametrize("form", ["parquet", "shards", "splits", "Other names", "folders", "saved", "saved dict"])
def test_data_sets_of_the_hub(tmp_path: Path, form: str) -> None:
    """As the library datasets reads them, in its order."""
    (data, drawn), (other, others) = hub(), hub(6)
    path = tmp_path / "data"
    path.mkdir()
    if form == "parquet":
        path = tmp_path / "data.parquet"
        data.to_parquet(path)
    elif form == "shards":
        for number in range(2):
            data.shard(2, number, contiguous=True).to_parquet(path / f"train-{number:05}-of-00002.parquet")
        other.to_parquet(path / "validation-00000-of-00001.parquet")
    elif form == "splits":
        data.to_parquet(path / "train.parquet")
        other.to_parquet(path / "test.parquet")
    elif form == "Other names":
        data.to_parquet(path / "Flowers_Train_0.parquet")
        other.to_parquet(path / "Flowers_Test_0.parquet")
        (path / ".cache").mkdir()
        other.to_parquet(path / ".cache" / "train.parquet")
    elif form == "folders":
        for name, part in (("train", data), ("test", other)):
            (path / name).mkdir()
            part.to_parquet(path / name / "0000.parquet")
    elif form == "saved":
        data.save_to_disk(path)
    else:
        datasets.DatasetDict({"test": other, "train": data}).save_to_disk(path)
    dataset = loaded("hub", path, key="writer")
    assert dataset.class_names == ("ant", "bee", "cow")
    assert dataset.keys is not None and dataset.keys.names == ("w0", "w1", "w2", "w3")
    found, labels = images(dataset), torch.cat([dataset.y_train, dataset.y_test]).numpy()
    owners = np.concatenate([dataset.keys.train, dataset.keys.test])
    if form in ("parquet", "saved"):  # a fifth of each writer's three pictures, in an order of its own
        assert np.bincount(dataset.keys.test).tolist() == [1, 1, 1, 1]
        rows = [int(np.flatnonzero((drawn == image).all((1, 2, 3)))[0]) for image in found]
        assert sorted(rows) == list(range(12))
    else:
        assert np.array_equal(found, np.concatenate([drawn, others]))
        rows = [*range(12), *range(6)]
    assert labels.tolist() == [row % 3 for row in rows]
    assert owners.tolist() == [row % 4 for row in rows]


def test_parquet_that_other_libraries_wrote(tmp_path: Path) -> None:
    """Structs of bytes, grey, with labels that are numbers or texts and a column of any name."""
    contents = []
    drawn = pixels(10, 4, 4)
    for each in drawn:
        buffer = io.BytesIO()
        Image.fromarray(each).save(buffer, "PNG")
        contents.append({"bytes": buffer.getvalue(), "path": None})
    columns = {"scan": contents, "label": [3, 10] * 5, "finding": ["well", "ill"] * 5}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert loaded("hub", tmp_path / "a.parquet").class_names == ("3", "10")
    dataset = loaded("hub", tmp_path / "a.parquet", label="finding", test_share=0.3)
    assert dataset.class_names == ("ill", "well")
    assert dataset.shape == (1, 4, 4) and len(dataset.x_test) == 3


def test_wrong_data_sets_of_the_hub(tmp_path: Path) -> None:
    data, _ = hub()
    path = tmp_path / "a.parquet"
    data.to_parquet(path)
    whole = path.read_bytes()
    assert "no such file or folder" in refusal("hub", tmp_path / "b.parquet")
    assert "data.label = 'lable': there is no such column; did you mean label?" in refusal("hub", path, label="lable")
    assert "data.key = 'who': there is no such column" in refusal("hub", path, key="who")
    assert "data.text.text = 'x': there is no such column" in refusal("hub", path, text={"text": "x"})
    parquet.write_table(parquet.read_table(path).drop_columns(["image"]), tmp_path / "none.parquet")
    assert "0 columns hold images" in refusal("hub", tmp_path / "none.parquet")
    (tmp_path / "empty").mkdir()
    assert "holds neither .parquet files" in refusal("hub", tmp_path / "empty")
    path.write_bytes(whole[:-9])
    assert "a.parquet: not a Parquet file, truncated or damaged" in refusal("hub", path)
    path.write_bytes(whole)
    wrong = [{"bytes": b"none", "path": None}, {"bytes": None, "path": "x"}]
    for pictures, labels, words in (
        (wrong, [0, None], "row 2, column 'label': None; expected a text or a whole number"),
        (wrong, ["a", ""], "row 2, column 'label': ''; expected a text or a whole number"),
        (wrong[:1] * 2, [0, 1], "row 1: not a picture, truncated or damaged"),
        (wrong[::-1], [0, 1], "row 1, column 'image': no bytes of a picture"),
    ):
        parquet.write_table(pa.table({"image": pictures, "label": labels}), path)
        assert words in refusal("hub", path, test_share=0.5)
    data.shard(2, 0).to_parquet(tmp_path / "empty" / "validation.parquet")
    assert "its parts are validation; one of them is expected to be 'train'" in refusal("hub", tmp_path / "empty")
    data.remove_columns("writer").to_parquet(tmp_path / "empty" / "train-1.parquet")
    data.to_parquet(tmp_path / "empty" / "train-2.parquet")
    assert "train-2.parquet: its columns are not those of" in refusal("hub", tmp_path / "empty")
    for name in ("small", "large"):
        (tmp_path / "several" / name).mkdir(parents=True)
        data.to_parquet(tmp_path / "several" / name / "train-0.parquet")
    assert "holds several data sets, large, small; data.path names one" in refusal("hub", tmp_path / "several")
    (tmp_path / "empty" / "dataset_info.json").write_text("{")
    assert "datasets.load_from_disk cannot read it" in refusal("hub", tmp_path / "empty")


@pytest.mark.parametrize("task", ["classify", "next"])
def test_texts_of_the_hub(tmp_path: Path, task: str) -> None:
    kinds = {"review": datasets.Value("string"), "stars": datasets.ClassLabel(names=["good", "bad"])}
    rows = {"review": [f"text {number}" for number in range(10)], "stars": [0, 1] * 5}
    datasets.Dataset.from_dict(rows, datasets.Features(kinds)).to_parquet(tmp_path / "train.parquet")
    text = {"text": "review", "length": 8, "test_share": 0.3, **({"label": "stars"} if task == "classify" else {})}
    dataset = loaded("hub", tmp_path / "train.parquet", text=text)
    assert dataset.is_next == (task == "next")
    assert task == "next" or dataset.class_names == ("good", "bad")
    assert dataset.notes == ()  # the schema names the labels
    assert dataset.text is not None
    assert dataset.text.tokenizer.decode(dataset.x_test[0].flatten().tolist()) == "text 7"
    assert task == "next" or dataset.y_test.tolist() == [1, 0, 1]


# --- arrays -------------------------------------------------------------------------------------------------------


def test_labels_that_are_numbers_have_their_order(tmp_path: Path) -> None:
    """0, 1, 2, ..., 11 and not 0, 1, 10, 11, 2, ..., as files have them and as texts."""
    numbers, text = [*range(12)] * 2, {"text": "t", "label": "y", "length": 4}
    datasets.Dataset.from_dict({"t": ["a"] * 24, "y": numbers}).to_parquet(tmp_path / "texts.parquet")
    (tmp_path / "texts.csv").write_text("t,y\n" + "".join(f"a,{number}\n" for number in numbers))
    np.savez(tmp_path / "a.npz", x_train=pixels(24, 4, 4), y_train=numbers, x_test=pixels(24, 4, 4), y_test=numbers)
    assert loaded("npz", tmp_path / "a.npz").class_names == tuple(map(str, range(12)))
    assert "The classes" in loaded("npz", tmp_path / "a.npz").notes[0]  # are taken as public
    for name, file in (("hub", "texts.parquet"), ("text", "texts.csv")):
        read = loaded(name, tmp_path / file, text=text)
        assert read.class_names == tuple(map(str, range(12))) and "The names of the labels" in read.notes[0]
        assert loaded(name, tmp_path / file, text={**text, "task": "next"}).notes == ()  # which has no labels


@pytest.mark.parametrize(
    "images_", ["uint8", "uint16", "float32", "float64", "bool", "int64", "channels first", "bands"]
)
@pytest.mark.parametrize("labels_", ["numbers", "column", "one-hot", "texts", "bytes"])
def test_arrays_as_people_save_them(tmp_path: Path, images_: str, labels_: str) -> None:
    """With MedMNIST's names, and a client for each example."""
    drawn, numbers = pixels(12, 6, 5, 4 if images_ == "bands" else 3), np.arange(12) % 3
    stored = {
        "uint8": drawn,
        "uint16": drawn.astype(np.uint16) * 257,
        "float32": (drawn / 255).astype(np.float32),
        "float64": drawn / 255,
        "bool": drawn > 127,
        "int64": drawn.astype(np.int64),
        "channels first": drawn.transpose(0, 3, 1, 2),
        "bands": drawn.transpose(0, 3, 1, 2),
    }[images_]
    words = np.array(["ant", "bee", "cow"])
    labels = {
        "numbers": numbers,
        "column": numbers[:, None].astype(np.uint8),
        "one-hot": np.eye(3)[numbers],
        "texts": words[numbers],
        "bytes": words.astype("S")[numbers],
    }[labels_]
    parts = {"train_images": stored[:9], "train_labels": labels[:9], "val_images": stored, "val_labels": labels}
    parts |= {"test_images": stored[9:], "test_labels": labels[9:]}
    owners = np.arange(12) % 4
    np.savez(tmp_path / "a.npz", **parts, client=owners[:9], client_test=owners[9:].astype(str))
    dataset = loaded("npz", tmp_path / "a.npz")
    assert dataset.left_out == "not read: val_images, val_labels"
    assert np.array_equal(images(dataset), (drawn > 127) * 255 if images_ == "bool" else drawn)
    assert torch.cat([dataset.y_train, dataset.y_test]).tolist() == numbers.tolist()
    assert dataset.class_names == (tuple(words) if labels_ in ("texts", "bytes") else ("0", "1", "2"))
    assert dataset.keys is not None
    assert [*dataset.keys.train, *dataset.keys.test] == owners.tolist()


def test_signals_are_pictures_of_one_row(tmp_path: Path) -> None:
    x, y = pixels(8, 20), np.arange(8) % 3 == 0
    np.savez(tmp_path / "a.npz", x_train=x[:6], y_train=y[:6], x_test=x[6:] / 255, y_test=y[6:])
    dataset = loaded("npz", tmp_path / "a.npz")
    assert dataset.shape == (1, 1, 20) and dataset.kind == "signal"
    np.testing.assert_array_equal(torch.cat([dataset.x_train, dataset.x_test]).flatten(1), x)
    assert torch.cat([dataset.y_train, dataset.y_test]).tolist() == y.tolist()


def test_an_array_of_another_name_says_whose_an_example_is(tmp_path: Path) -> None:
    parts = {"x_train": pixels(6, 4, 4), "y_train": np.arange(6) % 2, "x_test": pixels(2, 4, 4), "y_test": np.arange(2)}
    np.savez(tmp_path / "a.npz", **parts, site=np.array(["b", "a"] * 3))
    assert loaded("npz", tmp_path / "a.npz").keys is None
    keys = loaded("npz", tmp_path / "a.npz", key="site").keys
    assert keys is not None and (keys.train.tolist(), keys.test.tolist()) == ([1, 0] * 3, [])
    assert "data.key = 'ward': there is no such array" in refusal("npz", tmp_path / "a.npz", key="ward")
    assert "data.key = 'x_train': is what is learnt from" in refusal("npz", tmp_path / "a.npz", key="x_train")
    np.savez(tmp_path / "a.npz", **parts, class_names=np.array(["a", "a"]))
    assert "class_names has 'a' twice" in refusal("npz", tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", **{**parts, "y_train": np.array(["a", "b", "", "a", "b", "a"])})
    assert "y_train: row 3 is an empty text" in refusal("npz", tmp_path / "a.npz")


# --- files with clients -------------------------------------------------------------------------------------------


def writers(count: int = 5) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Writer -> grey pictures on [0, 1] and labels; each has another number of them."""
    return {f"f{n:02}": (pixels(n + 3, 6, 6) / 255, [(7 * k) % 3 for k in range(n + 3)]) for n in range(count)}


def write_leaf(path: Path, users: dict[str, tuple[np.ndarray, list[int]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": x.reshape(len(x), -1).tolist(), "y": y} for user, (x, y) in users.items()}
    tree = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data}
    path.write_text(json.dumps(tree))


def write_hdf5(path: Path, users: dict[str, tuple[np.ndarray, list[int]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for user, (x, y) in users.items():
            file.create_dataset(f"examples/{user}/pixels", data=x.astype(np.float32))
            file.create_dataset(f"examples/{user}/label", data=np.array(y, np.int32))


WRITE: dict[str, Any] = {"leaf": (write_leaf, "json"), "hdf5": (write_hdf5, "h5")}


@pytest.mark.parametrize("form", WRITE)
@pytest.mark.parametrize("layout", ["one file", "parts", "names"])
def test_files_with_clients(tmp_path: Path, form: str, layout: str) -> None:
    """Every picture, label and owner is there once; keys may be in one part alone."""
    write, ending = WRITE[form]
    users = writers()
    first, second = dict(list(users.items())[:4]), dict(list(users.items())[3:])
    path = tmp_path / f"data.{ending}"
    if layout == "one file":
        write(path, users)
    else:
        path = tmp_path / "data"
        inside = ("train/a", "test/b") if form == "leaf" else ("fed_emnist_train", "fed_emnist_test")
        inside = inside if layout == "parts" else ("All_Train_9", "All_Test_9")
        write(path / f"{inside[0]}.{ending}", first)
        write(path / f"{inside[1]}.{ending}", second)
    dataset = loaded(form, path, **({"test_share": 0.25} if layout == "one file" else {}))
    assert dataset.keys is not None and dataset.keys.names == tuple(users)
    assert dataset.class_names == ("0", "1", "2") and dataset.shape == (1, 6, 6)
    held = [np.bincount(keys, minlength=5).tolist() for keys in (dataset.keys.train, dataset.keys.test)]
    if layout == "one file":
        assert held[1] == [round(0.25 * (n + 3)) for n in range(5)]
        assert [a + b for a, b in zip(*held, strict=True)] == [n + 3 for n in range(5)]
        parts = [users]
    else:
        assert held == [[3, 4, 5, 6, 0], [0, 0, 0, 6, 7]]
        parts = [first, second]
    expected = sorted(
        (int(user[1:]), np.rint(image * 255).astype(np.uint8).tobytes(), label)
        for part in parts for user, (x, y) in part.items() for image, label in zip(x, y, strict=True)
    )  # fmt: skip
    owners = np.concatenate([dataset.keys.train, dataset.keys.test]).tolist()
    labels = torch.cat([dataset.y_train, dataset.y_test]).tolist()
    assert sorted(zip(owners, (image.tobytes() for image in images(dataset)), labels, strict=True)) == expected


def test_texts_with_clients(tmp_path: Path) -> None:
    """LEAF's are a text and what goes on, TensorFlow Federated's whole texts."""
    said = {"ann": ["to be", "or not"], "bob": ["a horse", "my kingdom", "for it"]}
    tree = {
        "user_data": {who: {"x": [t[:-1] for t in texts], "y": [t[-1] for t in texts]} for who, texts in said.items()}
    }
    (tmp_path / "s.json").write_text(json.dumps(tree))
    with h5py.File(tmp_path / "s.h5", "w") as file:
        for who, texts in said.items():
            file.create_dataset(f"examples/{who}/snippets", data=texts)
    for form, name in (("leaf", "s.json"), ("hdf5", "s.h5")):
        dataset = loaded(form, tmp_path / name, text={"length": 12, "test_share": 0.5})
        assert dataset.is_next and dataset.text is not None and dataset.keys is not None
        decode = dataset.text.tokenizer.decode
        assert [decode(row.flatten().tolist()) for row in dataset.x_train] == ["to be", "a horse"]
        assert [decode(row.flatten().tolist()) for row in dataset.x_test] == ["or not", "my kingdom", "for it"]
        assert (dataset.keys.train.tolist(), dataset.keys.test.tolist()) == ([0, 1], [0, 1, 1])


def leaf_file(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps({"user_data": {"ann": content}}))
    return path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"user_data": {"ann": {}, "ann": {}}}', "'ann' is there twice"),
        ({"x": [0.5, 1], "y": [1, 2]}, "user 'ann': images have shape ()"),
        ({"x": [[0.5] * 4] * 4, "y": [1, "b"] * 2}, "its labels are of several types, such as"),
        ({"x": [[0.5] * 4], "y": [""]}, "user 'ann': y holds an empty text"),
        ({"x": [[2e308] * 4], "y": [1]}, "user 'ann': x[0] holds inf; expected finite numbers"),
        ({"x": [], "y": []}, "there is no example in it"),
        ('{"user_data": ', "not JSON that can be read, truncated or damaged"),
        ("[]", 'expected LEAF\'s {"users"'),
        ({"x": [[0.5] * 4], "y": [1, 2]}, "user 'ann': expected two lists x and y of one length"),
        ({"x": [[0.5] * 5], "y": [1]}, "user 'ann': x holds lists of 5 numbers, which are no square"),
        ({"x": [[0.5] * 4, [0.5]], "y": [1, 2]}, "user 'ann': x holds list that are no images of one size"),
        ({"x": [[-0.5] * 4], "y": [1]}, "user 'ann': x is float64 from -0.5 to -0.5; expected"),
        (
            {"x": ["a.jpg"], "y": [1]},
            "user 'ann': x holds str; expected lists of numbers where the experiment has no",
        ),
        ({"x": [[0.5] * 4], "y": [1.5]}, "user 'ann': y holds float; expected whole numbers or texts"),
        ({"x": [[0.5] * 4], "y": [1]}, "data.test_share = 0.2 of each client's, at most 1, examples leaves no test"),
    ],
)
def test_wrong_files_of_leaf(tmp_path: Path, content: object, words: str) -> None:
    assert words in refusal("leaf", leaf_file(tmp_path / "a.json", content))


def test_wrong_files_with_clients(tmp_path: Path) -> None:
    (tmp_path / "empty" / "train").mkdir(parents=True)
    assert "holds no .json file" in refusal("leaf", tmp_path / "empty")
    assert "no such file or folder" in refusal("leaf", tmp_path / "none")
    assert "no such file" in refusal("hdf5", tmp_path / "none.h5")
    assert "holds no file of training data" in refusal("hdf5", tmp_path)
    path = tmp_path / "a.h5"
    path.write_bytes(b"no")
    assert "not an HDF5 file, truncated or damaged" in refusal("hdf5", path)
    label, image = {"examples/ann/label": np.zeros(2, int)}, np.zeros((2, 4, 4))
    bob = {"examples/bob/label": np.zeros(2, int), "examples/bob/pixels": np.zeros((2, 5, 5))}
    for fields, words in (
        ({"other/ann/pixels": image}, "has no group 'examples'"),
        ({"examples/ann/scan": image}, "client 'ann': expected pixels or image or x; it has scan"),
        (
            {"examples/ann/pixels": image},
            "client 'ann': expected 'label', a whole number for each",
        ),
        ({"examples/ann/pixels": image[0], **label}, "images are float64 of shape (4, 4)"),
        (
            {"examples/ann/pixels": np.zeros((2, 4, 4, 4)), **label},
            "client 'ann' has shape (2, 4, 4, 4): data.channels =",
        ),
        ({"examples/ann/pixels/0": image, **label}, "client 'ann': expected pixels or image or x; it has label"),
        ({"examples/ann/pixels": image, "examples/ann/label/0": image}, "client 'ann': expected 'label'"),
        ({"examples/ann/pixels": image[:1], **label}, "client 'ann': 1 examples and 2 labels"),
        ({"examples/ann/pixels": image - 1, **label}, "client 'ann' is float64 from -1 to -1; expected"),
        ({"examples/ann/pixels": image, **label, **bob}, "client 'bob': images have shape (5, 5)"),
    ):
        with h5py.File(path, "w") as file:
            for name, values in fields.items():
                file.create_dataset(name, data=values)
        assert words in refusal("hdf5", path, test_share=0.5)
    with h5py.File(path, "w") as file:
        file.create_group("examples")
    assert "there is no example in it" in refusal("hdf5", path)
    for texts, words in ((b"one", "expected a list"), (np.array([b"\xff"]), "a text is no UTF-8")):
        with h5py.File(path, "w") as file:
            file.create_dataset("examples/ann/snippets", data=texts)
        assert words in refusal("hdf5", path, text={"length": 8})
    with h5py.File(path, "w") as file:  # declared, and not there
        for field, shape in (("label", (10**9,)), ("pixels", (10**9, 4, 4))):
            file.create_dataset(f"examples/ann/{field}", shape, np.int32, chunks=True)
    assert "client 'ann': reading it takes" in refusal("hdf5", path)
    for name in ("b_train.h5", "c_train.h5"):
        write_hdf5(tmp_path / "several" / name, writers())
    assert "holds b_train.h5, c_train.h5; one file of training" in refusal("hdf5", tmp_path / "several")


# --- idx files ----------------------------------------------------------------------------------------------------


def write_idx(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    content = head + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files(tmp_path: Path, ending: str) -> None:
    """Labels may count from 1, as those of EMNIST's letters."""
    x, y = pixels(9, 5, 4), np.arange(9) % 3 + 1
    for part, rows in (("train", slice(0, 6)), ("t10k", slice(6, 9))):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{ending}", x[rows])
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{ending}", y[rows])
    dataset = loaded("idx", tmp_path)
    assert np.array_equal(images(dataset)[..., 0], x)
    assert torch.cat([dataset.y_train, dataset.y_test]).tolist() == (y - 1).tolist()
    assert dataset.class_names == ("1", "2", "3")
    (tmp_path / f"train-labels-idx1-ubyte{ending}").rename(tmp_path / "labels")
    assert "expected one file of labels of train data" in refusal("idx", tmp_path)
    assert "no such folder" in refusal("idx", tmp_path / "labels")


def test_emnist_is_upright(tmp_path: Path) -> None:
    """Its files hold columns in place of rows, as torchvision documents."""
    x, y = pixels(94, 28, 28), np.arange(94) % 47
    raw = tmp_path / "EMNIST" / "raw"
    for part in ("train", "test"):
        write_idx(raw / f"emnist-balanced-{part}-images-idx3-ubyte", x.transpose(0, 2, 1))
        write_idx(raw / f"emnist-balanced-{part}-labels-idx1-ubyte", y)
    dataset = loaded("emnist", Path(), root=str(tmp_path))
    assert np.array_equal(dataset.x_train[:, 0].numpy(), x)
    assert dataset.class_names[10] == "A" and dataset.class_names[46] == "t"


# --- objects ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["data", "made", "parts", "paths"])
def test_objects_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    given, drawn = hub()
    module = types.ModuleType("own_module")
    files = [str(tmp_path / f"{number}.png") for number in range(len(drawn))]
    for path, picture in zip(files, drawn, strict=True):
        Image.fromarray(picture).save(path)
    paths = given.remove_columns("image").add_column("image", files).cast_column("image", datasets.Image())
    parts = datasets.DatasetDict(train=given, test=given)
    vars(module).update(data=given, made=lambda: given, parts=parts, paths=paths, other=3)
    monkeypatch.setitem(sys.modules, "own_module", module)
    config = validated(DataConfig, {"name": f"own_module:{kind}", "key": "writer"}, "a test")
    dataset = load_dataset(config, 0)
    assert dataset.name == "object" and dataset.class_names == ("ant", "bee", "cow")
    assert {image.tobytes() for image in images(dataset)} == {image.tobytes() for image in drawn}
    for name, words in (
        ("own_module:other", "expected a DataFrame of pandas, a Dataset or .*; not int"),
        ("none_such:data", "no module none_such in "),
    ):
        with pytest.raises(InputError, match=f"data.name = '{name}': .*{words}"):
            load_dataset(validated(DataConfig, {"name": name}, "a test"), 0)


class Torch(torch.utils.data.Dataset[Any]):
    """Examples as they are given, as torch has data sets."""

    def __init__(self, *examples: Any) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> Any:
        return self.examples[row]


def torch_object(monkeypatch: pytest.MonkeyPatch, found: Any, **about: object) -> Dataset:
    monkeypatch.setitem(sys.modules, "own_module", module := types.ModuleType("own_module"))
    vars(module).update(data=lambda: found)
    return load_dataset(validated(DataConfig, {"name": "own_module:data", **about}, "a test"), 0)


def test_datasets_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors (C, H, W), Pillow's pictures and signals; with the client, or in two parts."""
    drawn = np.random.default_rng(0).integers(0, 256, (12, 6, 5, 3), dtype=np.uint8)
    tensors = [torch.from_numpy(each).permute(2, 0, 1) / 255 for each in drawn]
    labels = [3, 7, 9] * 4
    owners = [f"site {row % 2}" for row in range(12)]
    data = torch_object(monkeypatch, Torch(*zip(tensors, labels, owners, strict=True)), key="client", partition="key")
    assert data.class_names == ("3", "7", "9") and data.keys is not None
    there = {(each.tobytes(), label, owner) for each, label, owner in zip(drawn, labels, owners, strict=True)}
    y = [*data.y_train.tolist(), *data.y_test.tolist()]
    whose = [data.keys.names[each] for each in (*data.keys.train, *data.keys.test)]
    assert {(x.tobytes(), (3, 7, 9)[at], who) for x, at, who in zip(images(data), y, whose, strict=True)} == there
    pictures = [(Image.fromarray(each), torch.tensor(label)) for each, label in zip(drawn, labels, strict=True)]
    for kind in (tuple, list):  # random_split returns a list
        data = torch_object(monkeypatch, kind([Torch(*pictures[:8]), Torch(*pictures[8:])]))
        assert data.keys is None and np.array_equal(images(data), drawn)
    data = torch_object(monkeypatch, {"train": Torch(*pictures[:9]), "val": Torch(*pictures[9:])})
    assert (len(data.y_train), len(data.y_test)) == (9, 3)
    data = torch_object(monkeypatch, torch.utils.data.TensorDataset(torch.rand(10, 64), torch.arange(10) % 2))
    assert data.shape == (1, 1, 64) and data.example == "a signal of 1 series, 64 steps, as (C, H, W) = (1, 1, 64)"


@pytest.mark.parametrize(
    ("examples", "about", "words"),
    [
        ([(torch.rand(3, 4, 4), 0), (torch.rand(3, 5, 4), 1)], {}, "example 2 has float32 of shape"),
        ([("a text", 0)], {}, "expected numbers or a picture"),
        ([(torch.rand(3, 4, 4), 0.5)], {}, "y has dtype float64; fedpriv classifies"),
        ([(torch.rand(3, 4, 4), 0)], {"key": "client", "partition": "key"}, "these have 2"),
        ([(torch.rand(3, 4, 4), 0)], {"size": 8}, "data.size = 8: a Dataset of torch has examples"),
        ([(torch.rand(2, 4, 4), 0), torch.tensor(1.0)], {}, "example 2: no (x, y) or (x, y, client) that can be read"),
        ([(torch.rand(2, 4, 4), None)], {}, "a label of object"),
        ([{"x": 1}], {}, "expected a DataFrame of pandas, a Dataset"),
        ([(torch.randn(3, 4, 4) - 9, 0)], {}, "expected 0 to 255 in whole numbers, or 0 to 1"),
        ([(torch.full((3, 4, 4), 255.0), 0)], {}, "or 0 to 1 in floating point; x.astype('uint8') fits"),
    ],
)
def test_wrong_datasets_of_torch(
    monkeypatch: pytest.MonkeyPatch, examples: list[Any], about: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError) as raised:
        torch_object(monkeypatch, Torch(*examples * 3), **about)
    assert words in str(raised.value)


# --- what is kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "hub"])
def test_pictures_are_kept_and_never_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The second start reads no picture, and a changed, added or damaged file has it read again."""
    monkeypatch.setenv("FEDPRIV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets_module, "TICK", -1)
    path = tmp_path / "data"
    if form == "folder":
        changed = folder(path / "ann") / "cat" / "0.png"
    else:
        changed = path = tmp_path / "a.parquet"
        hub()[0].to_parquet(path)
    key = {"key": "client" if form == "folder" else "writer"}

    def again() -> Dataset:
        datasets_module._complete.cache_clear()
        return loaded(form, path, **key)

    first = again()
    with monkeypatch.context() as patched:
        patched.setattr(decoding, "_pixels", None)  # nothing is decoded
        second = again()
    assert second.digest == first.digest and second.class_names == first.class_names
    assert first.keys is not None and second.keys is not None
    assert second.keys.names == first.keys.names and np.array_equal(second.keys.test, first.keys.test)
    (entry,) = (tmp_path / "cache").iterdir()
    assert entry.stat().st_mode & 0o777 == 0o600
    entry.write_bytes(entry.read_bytes()[:-5])
    assert again().digest == first.digest
    times = changed.stat()
    if form == "folder":
        saved(changed, pixels(6, 5, 3))
    else:
        hub()[0].to_parquet(path)
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))  # as cp -p or a careless tool leaves it
    assert again().digest != first.digest
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_sixteen_bits_that_would_be_black_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "scan.npz"
    drawn, labels = pixels(8, 6, 6).astype(np.uint16), np.arange(8) % 2
    np.savez(path, x_train=drawn, y_train=labels, x_test=drawn, y_test=labels)

    words = refusal("npz", path)

    assert "x_train is uint16 up to 2" in words and "nearly black where 65535 is white" in words

    for number, each in enumerate(drawn):
        folder = tmp_path / "scans" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(each * 16).save(folder / f"{number}.png")
    words = refusal("folder", tmp_path / "scans")
    assert "have 16 bits and are nearly black" in words and "where 65535 is white" in words
    Image.fromarray(drawn[0] * 256).save(tmp_path / "scans" / "a" / "bright.png")  # the others are dark beside it
    assert images(loaded("folder", tmp_path / "scans")).max() > 200
