"""Pictures of one's own in every form, written with the library that people write them with, against that library."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision
from PIL import Image

from fedpriv.core.config import DataConfig, validated
from fedpriv.core.errors import InputError
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
    assert "has a folder test of its own" in refusal("folder", good, test_share=0.5)
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
    assert "0.png lies beside the folders of classes" in refusal("folder", good)
