"""Data sets: images and labels, where they are found, and the public constants that scale them.

Pictures that were read once are kept on the disk, so that the next start reads no file of theirs. An entry is found by
the names, inodes, sizes and times of change of all files. Nobody can set the time of change, so no entry is of other
contents. Files that changed just now, when these may not tell yet, are neither kept nor found. The folder is
$FEDPRIV_CACHE, else fedpriv in $XDG_CACHE_HOME or ~/.cache. With FEDPRIV_CACHE empty nothing is kept.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from typing import IO
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from fedpriv.core.columns import ColumnSpec, is_signal
from fedpriv.core.config import DataConfig
from fedpriv.core.errors import InputError, some_of
from fedpriv.core.files import TICK, content_digest
from fedpriv.core.names import END
from fedpriv.core.numbers import several
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.registry import DATASETS
from fedpriv.core.settings import Groups
from fedpriv.data.files import Arrays, Keys, checked
from fedpriv.data.source import DatasetStatus, Place, data_folder
from fedpriv.data.tokenizers import TextFacts
from fedpriv.models.machinery.settings import SequenceShape

__all__ = [
    "Dataset",
    "DatasetStatus",
    "files_digest",
    "group_numbers",
    "list_datasets",
    "load_dataset",
    "place_of",
    "unit_scale",
]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels, all in memory. The tensors are shared by everyone who loads them: do not write into them."""

    name: str  # as in `data.name`
    # (N, C, H, W), uint8, or float32 on [0, 1] as tables may have it; of texts tokens, int32 (N, 1, 1, T)
    x_train: Tensor
    # int64 (N,), from 0 to `classes` - 1; where the next token is predicted that, (N, T), negative where nothing is
    y_train: Tensor
    x_test: Tensor  # (M, C, H, W), likewise
    y_test: Tensor  # int64 (M,) or (M, T), likewise
    class_names: tuple[str, ...]  # one a class
    # one a channel, on the [0, 1] scale. Public constants of the data set, never computed from the examples at hand.
    mean: tuple[float, ...]
    std: tuple[float, ...]  # as mean
    source: str  # one line that says where the images came from
    # of a table, whose rows are "images" of one line, (1, 1, features); empty: these are images
    columns: tuple[ColumnSpec, ...] = ()
    notes: tuple[str, ...] = ()  # what a reader of anything proven about the data must know
    warnings: tuple[str, ...] = ()  # what was read and is probably not meant
    unread: tuple[str, ...] = ()  # columns, arrays or files that are not read
    text: TextFacts | None = None  # of texts; `None`: these are images or rows
    keys: Keys | None = None  # whose each example is; `None`: nobody says
    owners: np.ndarray | None = None  # (N,), the number of the person that each training example is of; or nobody says

    @property
    def left_out(self) -> str:
        """One line on what is not read; empty: all is."""
        hint = "; data.text.label = 'COLUMN' would classify" if self.is_next else ""
        return f"not read: {some_of(self.unread)}{hint}" if self.unread else ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        _, channels, height, width = self.x_train.shape
        return channels, height, width

    @property
    def classes(self) -> int:
        """The number of classes, those without an example included."""
        return len(self.class_names)

    @property
    def kind(self) -> str:
        """What an example is: image, signal, row or sentence."""
        if self.text is not None:
            return "sentence"
        return "row" if self.columns else "signal" if is_signal(*self.shape[1:]) else "image"

    @property
    def example(self) -> str:
        """What an example is, in words."""
        channels, height, width = self.shape
        if self.text is not None:
            return f"a sequence of {width} tokens"
        if self.columns:
            return f"a row of {several(len(self.columns), 'column')}, {several(width, 'number')}"
        if self.kind == "signal":
            series, steps = channels * min(height, width), several(max(height, width), "step")
            return f"a signal of {series} series, {steps}, as (C, H, W) = {self.shape}"
        return f"an image of {several(channels, 'channel')}, {height} x {width} pixels"

    @property
    def is_next(self) -> bool:
        """Whether the next token is predicted, and no class of a whole example."""
        return self.y_train.ndim > 1

    @property
    def counted(self) -> tuple[str, ...]:
        """The kinds of examples that are counted: classes, or where there are none sequences."""
        return ("sequences",) if self.is_next else self.class_names

    def kinds(self, labels: Tensor) -> Tensor:
        """Return the kind of each example, (N,), from labels (N, ...)."""
        return torch.zeros(len(labels), dtype=torch.int64) if self.is_next else labels

    def random(self, examples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return examples that tell nothing: inputs (B, C, H, W), as the data set holds them, and labels."""
        if self.text is None:
            images = torch.randint(256, (examples, *self.shape), generator=generator, dtype=torch.uint8)
            return images, torch.arange(examples) % self.classes
        size = self.text.tokenizer.size
        tokens = torch.randint(END + 1, size, (examples, *self.shape), generator=generator, dtype=torch.int32)
        labels = torch.arange(examples) % self.classes
        return tokens, tokens.flatten(1).roll(-1, dims=1).long() if self.is_next else labels

    def sequences(self, folder: Path) -> SequenceShape | None:
        """What a network for these texts takes and gives, with pretrained weights in a folder; ``None``: no texts."""
        if self.text is None:
            return None
        tokenizer = self.text.tokenizer
        return SequenceShape(self.shape[-1], tokenizer.size, tokenizer.name, self.classes, self.is_next, folder)

    def tested_keys(self) -> Keys:
        """Return whose each example is, if this is said of test examples, too."""
        if self.keys is None or len(self.keys.test) != len(self.y_test):
            allowed = f"the test examples of data.name = {self.name!r} do not say whose they are"
            raise InputError(key="federation.evaluate", given="clients", allowed=allowed)
        return self.keys

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all images and labels."""
        digest = sha256()
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.numpy().data)
        return digest.digest()

    def normalise(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Scale images (..., C, H, W) to what the network is fed; of texts return the tokens, int64 (B, T)."""
        if self.text is not None:
            return images.flatten(1).long()
        values = unit_scale(images, dtype)
        return (values - _channels(self.mean, values)).div_(_channels(self.std, values))


def unit_scale(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return images, uint8 or floating point, as floating point on [0, 1]; tokens stay whole, of 64 bits."""
    if images.dtype == torch.int32:
        return images.long()
    values = images.to(dtype)
    return values if images.is_floating_point() else values.div_(255)


def load_dataset(config: DataConfig, seed: int) -> Dataset:
    """Load the data set that the config names, once in a process as long as its files hold the same."""
    place = place_of(config)
    files = DATASETS[config.name].files(place)
    kept = _stamp(config.name, place, files)
    digest = token_bytes(32) if files is None else files_digest(files) if kept is None else kept.encode()
    load = _complete.__wrapped__ if files is None else _complete  # what nobody knows the state of is not held
    complete = load(config.name, place, digest, is_kept=kept is not None)
    chosen = complete if config.train_examples is None else _subset(complete, config.train_examples, seed)
    return chosen if config.groups is None else _grouped(chosen, config.groups)


def _stamp(name: str, place: Place, files: Iterable[Path | str] | None) -> str | None:
    """What kept images of these files are found by; ``None``: a file has changed just now, or none are kept."""
    if files is None or not DATASETS[name].is_kept or place.text is not None or place.table is not None or place.owner:
        return None
    if os.environ.get("FEDPRIV_CACHE") == "":
        return None
    settings = name, place.key, place.label, place.size, place.test_share
    digest, newest = sha256(f"{_VERSION} {settings!r}".encode()), 0
    for path in files:
        try:
            status = os.stat(path)  # noqa: PTH116 (of tens of thousands of files)
        except OSError:  # whoever reads the file says what is wrong with it
            return None
        newest = max(newest, status.st_ctime_ns)
        seen = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        digest.update(f"{path}\0{seen}\n".encode())
    return digest.hexdigest() if time.time_ns() - newest > TICK else None


def files_digest(files: Iterable[Path | str]) -> bytes:
    """Return SHA-256 of the names and contents of files; with one that cannot be read, another each time."""
    digest = sha256()
    for path in files:
        try:
            digest.update(sha256(str(path).encode()).digest() + content_digest(Path(path)))
        except OSError:  # whoever reads the file says what is wrong with it
            digest.update(token_bytes(32))
    return digest.digest()


def group_numbers(groups: Groups, classes: int, what: str) -> Tensor:
    """Return the group (classes,), int64, that each class is in."""
    numbers = torch.full((classes,), -1)
    for number, group in enumerate(groups):
        if max(group) >= classes:
            raise InputError(f"{what}: there is no class {max(group)}; classes are 0 to {classes - 1}")
        numbers[torch.tensor(group)] = number
    if bool((numbers < 0).any()):
        raise InputError(f"{what}: class {int(numbers.argmin())} is in no group; each of 0 to {classes - 1} is in one")
    return numbers


def place_of(config: DataConfig) -> Place:
    """Return where the config says that its data set lies."""
    given = {field.name: getattr(config, field.name) for field in fields(Place) if field.name != "root"}
    return Place(root=data_folder(config.root), **given)


def list_datasets(root: str) -> tuple[DatasetStatus, ...]:
    """Say which of the named data sets lie in :func:`data_folder`, without any download."""
    place = Place("", data_folder(root), False, DataConfig().memory)
    return tuple(status for source in DATASETS.values() if (status := source.status(place)) is not None)


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]


@lru_cache(maxsize=4)
def _complete(name: str, place: Place, digest: bytes, *, is_kept: bool) -> Dataset:
    """``digest``: of the files, by which a replaced one is told from the one before."""
    source, where = DATASETS[name], place.path
    arrays = _kept(digest.decode()) if is_kept else None
    if arrays is None:
        arrays, where = source.read(place)
        arrays = checked(arrays, where)
        files = source.files(place)
        now = _stamp(name, place, files) if files is not None and is_kept else None
        if files is not None and (now.encode() if now else files_digest(files)) != digest:
            raise InputError(f"{source.title}, {where}: was changed while it was read; start again")
        if is_kept:
            _keep(digest.decode(), arrays)
    said = f"{source.title}, {where}"
    x_train, x_test = _images(arrays.x_train), _images(arrays.x_test)
    channels = x_train.shape[1]
    centre, scale = (0.5, 0.5) if place.table is None else (0.0, 1.0)  # rows of a table stay on [0, 1]
    mean, std = source.mean or (centre,) * channels, source.std or (scale,) * channels
    if channels != len(mean):
        raise InputError(f"{said}: images have {channels} channels; {name} has {len(mean)}")
    names = arrays.class_names or tuple(str(label) for label in range(int(arrays.y_train.max()) + 1))
    y_train, y_test = _labels(arrays.y_train), _labels(arrays.y_test)
    images = x_train, y_train, x_test, y_test
    facts = {key: getattr(arrays, key) for key in ("columns", "notes", "warnings", "unread", "text", "keys")}
    if source.read_off and not arrays.columns and arrays.text is None:
        facts["notes"] += (source.read_off,)
    owners = arrays.keys.train if place.owner and place.owner == place.key and arrays.keys else arrays.owners
    return Dataset(name, *images, names, mean, std, said, **facts, owners=owners)


@lru_cache(maxsize=4)
def _subset(complete: Dataset, count: int, seed: int) -> Dataset:
    available = len(complete.x_train)
    if count > available:
        raise InputError(
            key="data.train_examples", given=count, allowed=f"{complete.name} has {available} training examples"
        )
    rows = torch.from_numpy(np.sort(numpy_stream(seed, "train-examples").choice(available, count, replace=False)))
    source = f"{complete.source}; {count} of its {available} training examples, drawn by the seed"
    return replace(
        complete,
        x_train=complete.x_train[rows],
        y_train=complete.y_train[rows],
        source=source,
        keys=None if complete.keys is None else complete.keys.chosen(rows.numpy()),
        owners=None if complete.owners is None else complete.owners[rows.numpy()],
    )


@lru_cache(maxsize=4)
def _grouped(dataset: Dataset, groups: Groups) -> Dataset:
    numbers = group_numbers(groups, dataset.classes, "data.groups")
    names = tuple("/".join(dataset.class_names[label] for label in group) for group in groups)
    source = f"{dataset.source}; {dataset.classes} classes in {len(groups)} groups"
    y_train, y_test = numbers[dataset.y_train], numbers[dataset.y_test]
    return replace(dataset, y_train=y_train, y_test=y_test, class_names=names, source=source)


def _images(images: np.ndarray) -> Tensor:
    channels_first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.require(channels_first, requirements=["C", "W"]))


def _labels(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))


_VERSION = 3  # of what entries hold, and of how pictures are read
_MOST = 8  # entries; the ones that were used last stay


def _kept(stamp: str) -> Arrays | None:
    """What was kept under the stamp; ``None``: it is not there, or cut off."""
    path = _folder() / f"{stamp}.arrays"
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError), path.open("rb") as file:
        found = _load(file)
        os.utime(path)
        return found
    return None


def _folder() -> Path:
    named = os.environ.get("FEDPRIV_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedpriv"


def _keep(stamp: str, arrays: Arrays) -> None:
    """Write an entry; a full or write-protected disk keeps nothing, and stops nobody."""
    path = _folder() / f"{stamp}.arrays"
    part = path.with_suffix(f".{uuid4().hex}.part")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            part.touch(0o600, exist_ok=False)
            with part.open("wb") as file:
                _save(file, arrays)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        entries = sorted(path.parent.glob("*.arrays"), key=lambda entry: entry.stat().st_mtime)
        for entry in entries[:-_MOST]:
            entry.unlink(missing_ok=True)


def _save(file: IO[bytes], arrays: Arrays) -> None:
    keys = arrays.keys
    names = {"class_names": arrays.class_names, "key_names": None if keys is None else keys.names}
    names |= {"warnings": arrays.warnings, "unread": arrays.unread}
    file.write(json.dumps(names).encode() + b"\n")
    owners = () if keys is None else (keys.train, keys.test)
    images = (x.transpose(0, 3, 1, 2) for x in (arrays.x_train, arrays.x_test))  # as they lie in memory
    for values in (arrays.y_train, arrays.y_test, *owners, *images):
        np.save(file, values, allow_pickle=False)


def _load(file: IO[bytes]) -> Arrays:
    names = json.loads(file.readline())
    count = 4 if names["key_names"] is None else 6
    y_train, y_test, *owners, x_train, x_test = (np.load(file, allow_pickle=False) for _ in range(count))
    images = [x.transpose(0, 2, 3, 1) for x in (x_train, x_test)]
    arrays = Arrays(images[0], y_train, images[1], y_test, tuple(names["class_names"]))
    arrays = replace(arrays, warnings=tuple(names["warnings"]), unread=tuple(names["unread"]))
    return replace(arrays, keys=Keys(owners[0], owners[1], tuple(names["key_names"]))) if owners else arrays
