"""Data sets: images and labels, where they are looked for, and the public constants that scale them."""

import contextlib
import http.client
import io
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpriv.config import DataConfig
from fedpriv.data.faces import count_in_archive, count_in_folder, faces_from_archive, faces_from_folder
from fedpriv.data.files import Arrays, check_memory, checked, read_idx, read_idx_shape, read_labels, read_npz
from fedpriv.errors import InputError
from fedpriv.npz import one_line
from fedpriv.randomness import numpy_stream

__all__ = ["Dataset", "DatasetStatus", "list_datasets", "load_dataset"]

EMBEDDED = "embedded in scikit-learn"
DIGITS_EXAMPLES = 1797
IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels, all in memory. The tensors are shared by everyone who loads them: do not write into them.

    Attributes:
        name: as in ``data.name``.
        x_train: uint8 (N, C, H, W).
        y_train: int64 (N,), from 0 to ``classes`` - 1.
        x_test: uint8 (M, C, H, W).
        y_test: int64 (M,).
        class_names: one a class.
        mean: one a channel, on the [0, 1] scale. Public constants of the data set, never computed from the examples
            at hand: the published ones for MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 (of their complete training
            sets); 0.5 for digits, LFW and .npz files.
        std: as mean.
        source: one line that says where the images came from.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        _, channels, height, width = self.x_train.shape
        return channels, height, width

    @property
    def classes(self) -> int:
        """The number of classes, those without an example included."""
        return len(self.class_names)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all images and labels."""
        digest = sha256()
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.numpy().data)
        return digest.digest()

    def normalise(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Scale images to what the network is fed.

        Args:
            images: (..., C, H, W), uint8 from 0 to 255 or floating point on [0, 1].
            dtype: in which it is computed.

        Returns:
            (image - mean) / std, of the same shape and on the same device.
        """
        values = images.to(dtype)
        if not images.is_floating_point():
            values = values / 255
        return (values - _channels(self.mean, values)) / _channels(self.std, values)

    def denormalise(self, x: Tensor) -> Tensor:
        """Undo :meth:`normalise`: (..., C, H, W) back to the [0, 1] scale, without clamping."""
        return x * _channels(self.std, x) + _channels(self.mean, x)


@dataclass(frozen=True)
class DatasetStatus:
    """One line of ``fedpriv data``.

    Attributes:
        name: as in ``data.name``.
        available: can be read without a download.
        where: the file or folder, "embedded in scikit-learn", or empty.
        examples: training and test images together; None when not available.
        note: the two numbers, or why it is not available.
    """

    name: str
    available: bool
    where: str
    examples: int | None
    note: str


@dataclass(frozen=True)
class _Known:
    """What is public about a data set: its title, the folder torchvision keeps it in, and its constants."""

    title: str
    folder: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...] = ()
    classes: int | None = None


NUMERALS = tuple(str(digit) for digit in range(10))
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
KNOWN = {
    "digits": _Known("scikit-learn digits", "", (0.5,), (0.5,), NUMERALS, 10),
    "mnist": _Known("MNIST", "MNIST/raw", (0.1307,), (0.3081,), NUMERALS, 10),
    "fashion-mnist": _Known("Fashion-MNIST", "FashionMNIST/raw", (0.2860,), (0.3530,), GARMENTS, 10),
    "cifar10": _Known(
        "CIFAR-10", "cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), classes=10
    ),
    "cifar100": _Known(
        "CIFAR-100", "cifar-100-python", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), classes=100
    ),
    "lfw": _Known("Labeled Faces in the Wild", "lfw-py/lfw-deepfunneled", (0.5,) * 3, (0.5,) * 3),
}


def load_dataset(config: DataConfig, seed: int) -> Dataset:
    """Load the data set that the config names, once in a process.

    It is looked for in the root (``data.root``, else $FEDPRIV_DATA, else ./data): first as torchvision's files, then
    as <name>.npz; if neither is there and ``data.download`` is set, torchvision fetches it into the root.

    Args:
        config: reads name, path, root, download, memory and train_examples.
        seed: draws the subset of ``train_examples`` training examples. The subset is public: the adversary may know it.

    Raises:
        InputError: nothing found, the download failed, a file is damaged or does not fit, it asks for more memory than
            ``data.memory``, or fewer training examples than asked for.
    """
    complete = _complete(config.name, config.path, str(_root(config.root)), config.download, config.memory)
    return complete if config.train_examples is None else _subset(complete, config.train_examples, seed)


def list_datasets(root: str) -> tuple[DatasetStatus, ...]:
    """Say which of the named data sets lie in ``root`` (empty: $FEDPRIV_DATA, else ./data), without any download."""
    return tuple(_status(name, _root(root)) for name in KNOWN)


def _root(root: str) -> Path:
    return _home(Path(root or os.environ.get("FEDPRIV_DATA") or "data"))


def _home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise InputError(f"{path}: {error}") from None


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]


@lru_cache(maxsize=4)
def _complete(name: str, path: str, root: str, download: bool, memory: int) -> Dataset:
    if name == "npz":
        return _from_own_file(path, memory)
    known = KNOWN[name]
    arrays, where = (_read_digits(), EMBEDDED) if name == "digits" else _read_known(name, Path(root), download, memory)
    return _dataset(name, arrays, known.mean, known.std, f"{known.title}, {where}")


@lru_cache(maxsize=4)
def _subset(complete: Dataset, count: int, seed: int) -> Dataset:
    available = len(complete.x_train)
    if count > available:
        raise InputError(f"data.train_examples = {count}, but {complete.name} has {available} training examples")
    rows = torch.from_numpy(np.sort(numpy_stream(seed, "train-examples").choice(available, count, replace=False)))
    source = f"{complete.source}; {count} of its {available} training examples, drawn by the seed"
    return replace(complete, x_train=complete.x_train[rows], y_train=complete.y_train[rows], source=source)


def _from_own_file(path: str, memory: int) -> Dataset:
    arrays = read_npz(_home(Path(path)), memory)
    channels = arrays.x_train.shape[3] if arrays.x_train.ndim == 4 else 1
    return _dataset("npz", arrays, (0.5,) * channels, (0.5,) * channels, f"own file, {path}")


def _dataset(name: str, arrays: Arrays, mean: tuple[float, ...], std: tuple[float, ...], source: str) -> Dataset:
    x_train, x_test = _images(arrays.x_train), _images(arrays.x_test)
    if x_train.shape[1] != len(mean):
        raise InputError(f"{source}: images have {x_train.shape[1]} channels; {name} has {len(mean)}")
    names = arrays.class_names or tuple(str(label) for label in range(int(arrays.y_train.max()) + 1))
    return Dataset(name, x_train, _labels(arrays.y_train), x_test, _labels(arrays.y_test), names, mean, std, source)


def _images(images: np.ndarray) -> Tensor:
    channels_first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.array(channels_first, order="C"))


def _labels(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))


def _read_digits() -> Arrays:
    """Optical digits, 8x8 with levels 0 to 16, scaled to 0 to 255; a fixed stratified fifth of them is the test set."""
    from sklearn.datasets import load_digits  # a second to import, and only this data set needs it
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    train, test = train_test_split(np.arange(len(images)), test_size=0.2, stratify=digits.target, random_state=0)
    return Arrays(images[train], digits.target[train], images[test], digits.target[test], NUMERALS)


def _read_known(name: str, root: Path, download: bool, memory: int) -> tuple[Arrays, str]:
    found = _find(name, root)
    if found is None and download:
        _download(name, root)
        found = _find(name, root)
    if found is None:
        raise InputError(f"{_not_found(name, root)}{'' if download else ', or data.download = true'}")
    return _read(name, found, memory), str(found)


def _find(name: str, root: Path) -> Path | None:
    """Return torchvision's folder or the .npz file of a data set, whichever is there."""
    folder, archive = root / KNOWN[name].folder, root / f"{name}.npz"
    if _complete_folder(name, folder):
        return folder
    return archive if archive.is_file() else None


def _complete_folder(name: str, folder: Path) -> bool:
    if name in ("mnist", "fashion-mnist"):
        return all(_idx_file(folder, stem).is_file() for stem in IDX_FILES)
    return folder.is_dir()


def _idx_file(folder: Path, stem: str) -> Path:
    """The unpacked file if torchvision has left one, else the packed one."""
    plain = folder / stem
    return plain if plain.is_file() else folder / f"{stem}.gz"


def _not_found(name: str, root: Path) -> str:
    return (
        f"data.name = {name!r}: neither {KNOWN[name].folder} (torchvision's files) nor {name}.npz lies in {root}; "
        f"put one there, or name another folder with data.root or FEDPRIV_DATA"
    )


def _read(name: str, found: Path, memory: int) -> Arrays:
    if found.suffix == ".npz":
        arrays = read_npz(found, memory)
        return faces_from_archive(arrays, str(found)) if name == "lfw" else _with_known_classes(name, arrays, found)
    if name == "lfw":
        return faces_from_folder(found)
    if name in ("cifar10", "cifar100"):
        return _read_cifar(name, found)
    return _read_idx_folder(name, found, memory)


def _with_known_classes(name: str, arrays: Arrays, where: Path) -> Arrays:
    """Give a known data set its own class names, and refuse an archive that has other classes."""
    known = KNOWN[name]
    names = arrays.class_names or known.class_names or tuple(str(label) for label in range(known.classes or 0))
    if len(names) != known.classes:
        raise InputError(f"{where}: {len(names)} classes; {name} has {known.classes}")
    return checked(replace(arrays, class_names=names), str(where))


def _read_idx_folder(name: str, folder: Path, memory: int) -> Arrays:
    paths = [_idx_file(folder, stem) for stem in IDX_FILES]
    check_memory(folder, sum(2 * math.prod(read_idx_shape(path)) for path in paths), memory)
    x_train, y_train, x_test, y_test = (read_idx(path) for path in paths)
    return checked(Arrays(x_train, y_train, x_test, y_test, KNOWN[name].class_names), str(folder))


def _read_cifar(name: str, folder: Path) -> Arrays:
    """Read torchvision's batches; it compares their MD5 sums before it unpickles them."""
    kind = _torchvision_class(name)
    try:
        train, test = (kind(folder.parent, train=part, download=False) for part in (True, False))
    except RuntimeError as error:
        raise InputError(f"{folder}: {one_line(error)}; delete the folder and load again") from None
    return Arrays(
        train.data, np.asarray(train.targets), test.data, np.asarray(test.targets), tuple(map(str, train.classes))
    )


def _torchvision_class(name: str) -> Callable[..., Any]:
    from torchvision import datasets  # seconds to import, and most experiments never need it

    kinds: dict[str, Callable[..., Any]] = {
        "mnist": datasets.MNIST,
        "fashion-mnist": datasets.FashionMNIST,
        "cifar10": datasets.CIFAR10,
        "cifar100": datasets.CIFAR100,
        "lfw": datasets.LFWPeople,
    }
    return kinds[name]


def _download(name: str, root: Path) -> None:
    kind = _torchvision_class(name)
    options = {"image_set": "deepfunneled"} if name == "lfw" else {}
    try:
        # torchvision prints what it tries; the outcome is all that matters here, and stdout belongs to results.
        with contextlib.redirect_stdout(io.StringIO()):
            kind(root, download=True, **options)
    except (OSError, ValueError, RuntimeError, EOFError, http.client.HTTPException) as error:
        raise InputError(f"{_not_found(name, root)}; its download failed: {one_line(error)}") from None


def _status(name: str, root: Path) -> DatasetStatus:
    if name == "digits":
        return DatasetStatus(name, True, EMBEDDED, DIGITS_EXAMPLES, "needs no file")
    found = _find(name, root)
    if found is None:
        return DatasetStatus(name, False, "", None, f"neither {KNOWN[name].folder} nor {name}.npz in {root}")
    try:
        count = _count(name, found)
    except InputError as error:
        return DatasetStatus(name, False, str(found), None, str(error))
    return DatasetStatus(name, True, str(found), count, "an .npz file" if found.is_file() else "torchvision's files")


def _count(name: str, found: Path) -> int:
    """Count images by reading headers or labels only."""
    if found.suffix == ".npz":
        labels = read_labels(found, DataConfig().memory)
        return count_in_archive(labels) if name == "lfw" else len(labels)
    if name == "lfw":
        return count_in_folder(found)
    if name in ("cifar10", "cifar100"):
        return 60_000  # the only size that torchvision accepts
    return sum(read_idx_shape(_idx_file(found, stem))[0] for stem in IDX_FILES if "labels" in stem)
