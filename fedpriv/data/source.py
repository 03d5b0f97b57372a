"""The base of all data sets: where they come from and what they declare; they are named early, so import lazily."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.core.config.data import CorpusConfig, TableConfig
from fedpriv.core.errors import InputError, some_of

if TYPE_CHECKING:
    from fedpriv.data.files import Arrays
    from fedpriv.data.schema import Schema


@dataclass(frozen=True)
class Place:
    """Where an experiment says that its data set lies."""

    path: str  # of a file of your own
    root: Path  # the folder of the data sets
    download: bool  # whether what is not there is fetched
    memory: int  # MiB that reading a file may take
    table: TableConfig | None = None  # what the columns of a table of your own are
    text: CorpusConfig | None = None  # how texts become sequences; `None`: these are no texts
    key: str = ""  # the column, or array, that says whose an example is; empty: the data set's own, if it has one
    owner: str = ""  # the column, or array, that says which person an example is of; empty: nobody says
    label: str = ""  # the column of what is predicted; empty: as the form has it
    size: int | None = None  # of the square that pictures are brought to; `None`: they stay as they are
    channels: str | None = None  # whether an image's are its first axis or its last; `None`: its shape tells
    test_share: float | None = None  # share of the examples that is the test set, where the files have none


PARQUET = (".parquet", ".pq")  # what the names of Parquet files end with


def home(path: str) -> Path:
    """Return a path with ~ replaced."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path}: {error}") from None


def data_folder(root: str) -> Path:
    """Return where named data sets lie: ``root``, or $FEDPRIV_DATA, or ./data."""
    return home(root or os.environ.get("FEDPRIV_DATA") or "data")


TRAIN, TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation", "dev")
"""What parts of data sets are called; of several test parts the first in this order is read."""


def named_parts(names: Iterable[str]) -> tuple[str | None, str | None]:
    """Return the names of the training and of the test data among others, in capitals or not."""
    known = {name.lower(): name for name in names}
    train, test = (next((known[word] for word in words if word in known), None) for words in (TRAIN, TEST))
    return train, test


def split_names(names: Sequence[str], where: str) -> list[str]:
    """Return the names of the training and of the test data among those of a data set's parts; "" is all of it."""
    if list(names) == [""]:
        return [""]
    train, test = named_parts(names)
    if train is None:
        parts = some_of([name or "one without a name" for name in names])
        raise InputError(f"{where}: its parts are {parts}; one of them is expected to be {TRAIN[0]!r}")
    return [train] if test is None else [train, test]


def by_part(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Group files by the part of a data set that their names say."""
    parts: dict[str, list[Path]] = {}
    for path in paths:
        parts.setdefault(part_of(path.stem), []).append(path)
    return parts


def part_of(name: str) -> str:
    """Return the word of a file's name that says which part of a data set it is; empty: none does."""
    return next((word for word in re.split("[^a-z]+", name.lower()) if word in (*TRAIN, *TEST)), "")


@dataclass(frozen=True)
class DatasetStatus:
    """One line of ``fedpriv data``."""

    name: str  # as in `data.name`
    available: bool  # can be read without a download
    where: str  # the file or folder, "embedded in scikit-learn", or empty
    examples: int | None  # training and test images together; None when not available
    note: str  # the two numbers, or why it is not available


class Source(ABC):
    """A data set that experiments can name: a subclass with a name, entered in ``DATASETS``."""

    name: ClassVar[str]  # as in `data.name`
    title: ClassVar[str]  # what it is called
    # one a channel, on the [0, 1] scale; a public constant, never computed from the examples at hand. Empty: 0.5 for
    # each channel.
    mean: ClassVar[tuple[float, ...]] = ()
    std: ClassVar[tuple[float, ...]] = ()  # as mean
    class_names: ClassVar[tuple[str, ...]] = ()  # one a class; empty: they come with the images
    is_facts: ClassVar[bool] = False  # whether every feature is black or white: a fact that holds, or does not
    needs_path: ClassVar[bool] = False  # whether `data.path` has to name its file
    needs_table: ClassVar[bool] = False  # whether `data.table` says what its columns are
    is_text: ClassVar[bool] = False  # whether these are texts, of which `data.text` says how they are read
    is_kept: ClassVar[bool] = False  # whether images that were read are kept on the disk
    # of the keys `key`, `owner`, `label`, `size`, `channels`, `test_share`, `text` and `table` those with a meaning
    reads: ClassVar[tuple[str, ...]] = ()
    key_hint: ClassVar[str] = ""  # where it may say whose an example is
    read_off: ClassVar[str] = ""  # what of pictures is taken as public though nobody has told it

    @classmethod
    @abstractmethod
    def read(cls, place: Place) -> "tuple[Arrays, str]":
        """Return the images and labels, and where they were found."""

    @classmethod
    @abstractmethod
    def status(cls, place: Place) -> DatasetStatus | None:
        """Return what ``fedpriv data`` says of it, without a download; ``None``: it is not listed."""

    @classmethod
    def files(cls, place: Place) -> Sequence[Path] | Sequence[str] | None:
        """Return the files that :meth:`read` reads, fetched where allowed; a process reads them once; or ``None``."""
        return None

    @classmethod
    def schema(cls, place: Place) -> "Schema":
        """Return what the columns of a table are, from ``data.table`` and the rows."""
        allowed = "expected a table: csv, or hub or object with a section data.table"
        raise InputError(key="data.name", given=cls.name, allowed=allowed)


class Packaged(Source):
    """A data set that comes with a package."""

    where: ClassVar[str]  # in words
    examples: ClassVar[int]  # training and test images together

    @classmethod
    @abstractmethod
    def arrays(cls) -> "Arrays":
        """Return the images and labels."""

    @classmethod
    @override
    def read(cls, place: Place) -> "tuple[Arrays, str]":
        return cls.arrays(), cls.where

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...]:
        return ()

    @classmethod
    @override
    def status(cls, place: Place) -> DatasetStatus:
        return DatasetStatus(cls.name, True, cls.where, cls.examples, "needs no file")


class SingleFile(Source):
    """A data set that is one file in the folder of the data sets, and is not downloaded."""

    file: ClassVar[str]  # its name
    kind: ClassVar[str]  # of file, in words
    origin: ClassVar[str] = ""  # who publishes the data, and what the file has to hold

    @classmethod
    @abstractmethod
    def count(cls, path: Path, memory: int) -> int:
        """Return how many examples the file holds; errors are those of :meth:`~Source.read`."""

    @classmethod
    def found(cls, place: Place) -> Path:
        """Return where the file is."""
        path = place.root / cls.file
        if not path.is_file():
            raise InputError(
                key="data.name", given=cls.name, allowed=f"{path} is not there, and is not downloaded: {cls.wanted()}"
            )
        return path

    @classmethod
    def wanted(cls) -> str:
        """Return what the file has to hold, for whoever lacks it."""
        return cls.origin

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...]:
        return (cls.found(place),)

    @classmethod
    @override
    def status(cls, place: Place) -> DatasetStatus | None:
        path = place.root / cls.file
        if not path.is_file():
            return DatasetStatus(cls.name, False, "", None, f"no {cls.file} in {place.root}")
        try:
            return DatasetStatus(cls.name, True, str(path), cls.count(path, place.memory), cls.kind)
        except InputError as error:
            return DatasetStatus(cls.name, False, str(path), None, str(error))
