"""Texts with labels, from CSV files: which are known by name, and your own."""

import csv
import gzip
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedpriv.config.icl import TextConfig
from fedpriv.data.source import DatasetStatus, home
from fedpriv.errors import InputError
from fedpriv.randomness import numpy_stream
from fedpriv.registry import suggestion

__all__ = ["KNOWN", "Example", "Texts", "list_texts", "load_texts", "text_root"]

_TEST_SHARE = 0.2  # of files without a column "split"
_SPLITS = ("train", "test")  # private examples, and questions

_Row = tuple[str, str, str | None]
"""Text, label and split; ``None``: there is no such column."""


@dataclass(frozen=True)
class Example:
    """A text and its label, from 0."""

    text: str
    label: int


@dataclass(frozen=True)
class Texts:
    """Private examples, public questions, and what a prompt says around them.

    Attributes:
        source: one line that says where they came from.
        examples: whom prompts may be made of.
        questions: test texts with their labels, for scoring.
        labels: what the model is to say, one a label.
        text_word: stands before a text in a prompt.
        label_word: stands before a label in a prompt.
    """

    source: str
    examples: tuple[Example, ...]
    questions: tuple[Example, ...]
    labels: tuple[str, ...]
    text_word: str
    label_word: str


@dataclass(frozen=True)
class _Known:
    """A data set that is known by name: its file NAME.csv.gz, and public words for prompts."""

    title: str
    text: str
    label: str
    labels: Mapping[str, str]
    text_word: str
    label_word: str


_SENTIMENT = {"0": "negative", "1": "positive"}

KNOWN: Mapping[str, _Known] = {
    "sst2": _Known("SST-2, phrases of film reviews", "sentence", "label", _SENTIMENT, "Review", "Sentiment"),
    "rotten_tomatoes": _Known("Rotten Tomatoes, film reviews", "sentence", "label", _SENTIMENT, "Review", "Sentiment"),
    "agnews": _Known(
        "AG News, topics of news", "text", "label",
        {"0": "World", "1": "Sports", "2": "Business", "3": "Technology"}, "Article", "Topic",
    ),
    "sms_spam": _Known(
        "SMS Spam Collection, text messages", "text", "label", {"ham": "ham", "spam": "spam"}, "Message", "Label"
    ),
}  # fmt: skip


def text_root(root: str) -> Path:
    """Return the folder of the data sets: ``root``, or $FEDPRIV_DATA, or ./data."""
    return home(root or os.environ.get("FEDPRIV_DATA") or "data")


def load_texts(config: TextConfig, seed: int) -> Texts:
    """Read the texts that the settings name.

    A column ``split`` says which rows are private (train) and which are questions (test); a file that is known by name
    may have others, which are left out. Without one a fifth of the rows, drawn by the seed, are questions. Which rows
    are private depends on no text, so neighbours have as many.

    Raises:
        InputError: the file or a column is not there, or two columns have its name; the file is no CSV, a cell is empty
            or one too many, a split or a label is unknown, or there are fewer examples than asked for.
    """
    known = KNOWN.get(config.name)
    path = home(config.path) if known is None else text_root(config.root) / f"{config.name}.csv.gz"
    columns = (config.text, config.label) if known is None else (known.text, known.label)
    if known is not None and not path.is_file():
        raise InputError(
            f"{path}: no such file, and it is not downloaded: {known.title}, as a gzipped CSV file with the columns "
            f"{', '.join(columns)} and split (train or test)"
        )
    rows = _rows(path, columns)
    if known is None:
        _check_splits(path, rows)
    spoken = _spoken(path, rows, known, config.labels)
    numbers = {label: number for number, label in enumerate(spoken)}
    train, test = _parts([(Example(text, numbers[label]), split) for text, label, split in rows], seed)
    if not train or not test:
        raise InputError(f"{path}: {len(train)} private examples and {len(test)} questions; both are wanted")
    if config.examples is not None:
        if config.examples > len(train):
            raise InputError(f"data.examples = {config.examples}, but {path} has {len(train)} private examples")
        kept = np.sort(numpy_stream(seed, "icl-examples").choice(len(train), config.examples, replace=False))
        train = [train[number] for number in kept]
    words = ("Text", "Label") if known is None else (known.text_word, known.label_word)
    return Texts(str(path), tuple(train), tuple(test), tuple(spoken.values()), *words)


def list_texts(root: str) -> tuple[DatasetStatus, ...]:
    """Say which of the named texts lie in ``root`` (empty: $FEDPRIV_DATA, else ./data)."""
    folder = text_root(root)
    return tuple(_status(name, folder / f"{name}.csv.gz") for name in KNOWN)


def _status(name: str, path: Path) -> DatasetStatus:
    if not path.is_file():
        return DatasetStatus(name, False, "", None, f"no {path.name} in {path.parent}")
    return DatasetStatus(name, True, str(path), None, "texts, for fedpriv icl")


def _rows(path: Path, columns: tuple[str, str]) -> list[_Row]:
    """Text, label and split of each row."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            header = list(reader.fieldnames or ())
            for column in columns:
                if column not in header:
                    close = suggestion(column, header)
                    raise InputError(f"{path}: there is no column {column!r}{close}")
            for column in (*columns, "split"):
                if header.count(column) > 1:
                    raise InputError(f"{path}: two columns have the name {column!r}")
            return [_row(path, reader.line_num, row, columns) for row in reader]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; fedpriv data lists the data sets") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file in UTF-8: {error}") from None


def _row(path: Path, line: int, row: Mapping[str | None, str], columns: tuple[str, str]) -> _Row:
    if None in row:  # where the reader puts what is behind the last column
        raise InputError(f"{path}, line {line}: the row has more cells than there are columns")
    for column in columns:
        if not row[column]:
            raise InputError(f"{path}, line {line}: the cell of {column!r} is empty")
    text, label = (row[column] for column in columns)
    return text, label, row.get("split")


def _check_splits(path: Path, rows: Sequence[_Row]) -> None:
    """Refuse splits of one's own file that nobody would read."""
    for number, (*_, split) in enumerate(rows, start=1):
        if split not in (None, *_SPLITS):
            allowed = " and ".join(_SPLITS)
            raise InputError(f"{path}, row {number}: split = {split!r} is not allowed; allowed: {allowed}")


def _spoken(path: Path, rows: Sequence[_Row], known: _Known | None, given: Sequence[str]) -> dict[str, str]:
    """What the model is to say for each label of the file."""
    found = sorted({label for _, label, _ in rows})
    usual = {label: label for label in found} if known is None else dict(known.labels)
    strange = [label for label in found if label not in usual]
    if strange:
        raise InputError(f"{path}: the label {strange[0]!r} is not known; allowed: {', '.join(usual)}")
    if given:
        if len(given) != len(usual):
            raise InputError(f"data.labels has {len(given)} entries, and {path} has {len(usual)} labels")
        usual = dict(zip(usual, given, strict=True))
    if len(set(usual.values())) != len(usual) or len(usual) < 2:
        raise InputError(f"{path}: two labels or more, each said differently, are wanted; given: {', '.join(usual)}")
    return usual


def _parts(rows: Sequence[tuple[Example, str | None]], seed: int) -> tuple[list[Example], list[Example]]:
    """Private examples and questions."""
    if any(split is not None for _, split in rows):
        private, asked = ([one for one, split in rows if split == part] for part in _SPLITS)
        return private, asked
    order = numpy_stream(seed, "icl-split").permutation(len(rows))
    chosen = set(order[: round(_TEST_SHARE * len(rows))].tolist())
    private = [one for number, (one, _) in enumerate(rows) if number not in chosen]
    return private, [rows[number][0] for number in sorted(chosen)]
