"""Texts and what stands beside them, from CSV files and JSON lines; and those that prompts are made of."""

import csv
import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from fedpriv.core.errors import InputError
from fedpriv.core.registry import suggestion
from fedpriv.data.source import home

if TYPE_CHECKING:
    from fedpriv.core.config.icl import TextConfig

__all__ = ["Columns", "Example", "Row", "Texts", "check_splits", "csv_wanted", "load_texts", "read_texts", "text_root"]

_TEST_SHARE = 0.2  # of files without a column "split"
_SPLITS = ("train", "test")  # private examples, and questions

JSON_LINES = (".jsonl", ".ndjson")
"""What the names of files of JSON lines end with; all others are CSV files."""


class Columns(NamedTuple):
    """The columns, or keys, that are read of a file; empty: there is none.

    Attributes:
        text: of the texts.
        label: of their labels.
        key: that says whose each is.
        split: that says which part of the data set it belongs to; may be missing.
    """

    text: str
    label: str = ""
    key: str = ""
    split: str = "split"

    @property
    def needed(self) -> tuple[str, ...]:
        """Those that have to be there, and to hold something."""
        return tuple(column for column in self[:3] if column)


class Row(NamedTuple):
    """A text and what stands beside it; ``None``: there is no such column."""

    text: str
    label: str | None = None
    key: str | None = None
    split: str | None = None


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

_KNOWN: Mapping[str, _Known] = {
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


def csv_wanted(columns: Columns, labels: Iterable[str], splits: Sequence[str] = ()) -> str:
    """Return what the file of a known data set has to be, for whoever lacks it.

    Args:
        columns: of the file.
        labels: what stands in the column of labels, where there is one.
        splits: what the column split says; empty: there is no such column.
    """
    values = {columns.label: tuple(labels), columns.split: splits}
    names = (*columns.needed, columns.split) if splits else columns.needed
    told = [f"{name} ({', '.join(values[name])})" if values.get(name) else name for name in names]
    return f"a gzipped CSV file with a header and the columns {', '.join(told)}"


def load_texts(config: "TextConfig", seed: int) -> Texts:
    """Read the texts that the settings name.

    A column ``split`` says which rows are private (train) and which are questions (test); a file that is known by name
    may have others, which are left out. Without one a fifth of the rows, drawn by the seed, are questions. Which rows
    are private depends on no text, so neighbours have as many.

    Raises:
        InputError: the file or a column is not there, or two columns have its name; the file is no CSV, a cell is empty
            or one too many, a split or a label is unknown, or there are fewer examples than asked for.
    """
    import numpy as np

    from fedpriv.core.randomness import numpy_stream  # with torch, which whoever lists data sets does not need

    known = _KNOWN.get(config.name)
    path = home(config.path) if known is None else text_root(config.root) / f"{config.name}.csv.gz"
    columns = (config.text, config.label) if known is None else (known.text, known.label)
    if known is not None and not path.is_file():
        raise InputError(
            f"data.name = {config.name!r}: {path} is not there, and is not downloaded: {known.title}, as "
            f"{csv_wanted(Columns(*columns), known.labels)}; a column split (train, test) may be missing"
        )
    rows = read_texts(path, Columns(*columns))
    if known is None:
        check_splits(path, rows)
    spoken = _spoken(path, rows, known, config.labels)
    numbers = {label: number for number, label in enumerate(spoken)}
    train, test = _parts([(Example(row.text, numbers[row.label or ""]), row.split) for row in rows], seed)
    if not train or not test:
        raise InputError(f"{path}: {len(train)} private examples and {len(test)} questions; both are wanted")
    if config.examples is not None:
        if config.examples > len(train):
            raise InputError(f"data.examples = {config.examples}, but {path} has {len(train)} private examples")
        kept = np.sort(numpy_stream(seed, "icl-examples").choice(len(train), config.examples, replace=False))
        train = [train[number] for number in kept]
    words = ("Text", "Label") if known is None else (known.text_word, known.label_word)
    return Texts(str(path), tuple(train), tuple(test), tuple(spoken.values()), *words)


def read_texts(path: Path, columns: Columns) -> list[Row]:
    """Read texts and what stands beside them; the file's name may end in .gz.

    Raises:
        InputError: the file or a column is not there, or two columns have its name; the file is no CSV or holds no JSON
            objects, a cell is empty or one too many, or no text is there at all.
    """
    read = _json_lines if path.name.removesuffix(".gz").endswith(JSON_LINES) else _csv
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            rows = list(read(path, file, columns))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; fedpriv data lists the data sets") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        kind = "CSV" if read is _csv else "JSON lines"
        raise InputError(f"{path}: cannot be read as {kind} in UTF-8: {error}") from None
    if not rows:
        raise InputError(f"{path}: there is no text in it")
    return rows


def _csv(path: Path, file: IO[Any], columns: Columns) -> Iterator[Row]:
    reader = csv.DictReader(file, restval="", strict=True)
    header = list(reader.fieldnames or ())
    for column in columns.needed:
        if column not in header:
            raise _missing(path, column, header)
    for column in (*columns.needed, columns.split):
        if header.count(column) > 1:
            raise InputError(f"{path}: two columns have the name {column!r}")
    for row in reader:
        if None in row:  # where the reader puts what is behind the last column
            raise InputError(f"{path}, line {reader.line_num}: the row has more cells than there are columns")
        yield _row(path, reader.line_num, row, columns)


def _json_lines(path: Path, file: IO[Any], columns: Columns) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            given = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: not JSON that can be read: {error}") from None
        if not isinstance(given, dict):
            raise InputError(f'{path}, line {number}: a JSON object is wanted, such as {{"{columns.text}": ...}}')
        for column in columns.needed:
            if column not in given:
                raise _missing(f"{path}, line {number}", column, list(given))
        read = {
            column: _cell(f"{path}, line {number}: {column!r}", given[column]) for column in columns if column in given
        }
        yield _row(path, number, read, columns)


def _cell(where: str, value: object) -> str:
    """The text of a JSON value; labels may be numbers, or true and false."""
    if isinstance(value, list | dict) or value in (math.inf, -math.inf):
        kind = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "too large a number"
        raise InputError(f"{where} holds {kind}; wanted is a text or a number")
    text = "" if value is None else str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} holds half of a pair of characters (a lone surrogate), which is no text") from None
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _missing(where: object, column: str, header: Sequence[str]) -> InputError:
    known = suggestion(column, header) if header else "; there are none"
    return InputError(f"{where}: there is no column {column!r}{known}")


def _row(path: Path, line: int, row: Mapping[str, str], columns: Columns) -> Row:
    for column in columns.needed:
        if not row[column].strip():
            raise InputError(f"{path}, line {line}: the cell of {column!r} is empty")
    label, key = (row[column] if column else None for column in (columns.label, columns.key))
    return Row(row[columns.text], label, key, row.get(columns.split))


def check_splits(path: Path, rows: Sequence[Row]) -> None:
    """Refuse splits of one's own file that nobody would read.

    Raises:
        InputError: one is neither train nor test, or is missing where others are there.
    """
    given = any(row.split is not None for row in rows)
    for number, row in enumerate(rows, start=1):
        if given and row.split is None:
            raise InputError(f"{path}, row {number}: it has no split, and other rows have one")
        if row.split not in (None, *_SPLITS):
            allowed = " and ".join(_SPLITS)
            raise InputError(f"{path}, row {number}: split = {row.split!r} is not allowed; allowed: {allowed}")


def _spoken(path: Path, rows: Sequence[Row], known: _Known | None, given: Sequence[str]) -> dict[str, str]:
    """What the model is to say for each label of the file."""
    present = sorted({row.label or "" for row in rows})
    usual = {label: label for label in present} if known is None else dict(known.labels)
    strange = [label for label in present if label not in usual]
    if strange:
        raise InputError(f"{path}: the label {strange[0]!r} is not known; allowed: {', '.join(usual)}")
    if given:
        if len(given) != len(usual):
            raise InputError(f"data.labels has {len(given)} entries, and {path} has {len(usual)} labels")
        usual = dict(zip(usual, given, strict=True))
    if len(set(usual.values())) != len(usual) or len(usual) < 2:
        said = ", ".join(map(repr, usual.values()))
        raise InputError(f"{path}: at least two labels, each with a word of its own, are wanted; given: {said}")
    return usual


def _parts(rows: Sequence[tuple[Example, str | None]], seed: int) -> tuple[list[Example], list[Example]]:
    """Private examples and questions."""
    if any(split is not None for _, split in rows):
        private, asked = ([row for row, split in rows if split == part] for part in _SPLITS)
        return private, asked
    from fedpriv.core.randomness import numpy_stream

    order = numpy_stream(seed, "icl-split").permutation(len(rows))
    chosen = set(order[: round(_TEST_SHARE * len(rows))].tolist())
    private = [row for number, (row, _) in enumerate(rows) if number not in chosen]
    return private, [rows[number][0] for number in sorted(chosen)]
