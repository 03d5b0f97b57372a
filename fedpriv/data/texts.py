"""Texts as data sets: from CSV files and JSON lines to sequences of tokens, their targets, and the client of each."""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.core.config.data import CorpusConfig
from fedpriv.core.errors import InputError, some_of
from fedpriv.core.registry import suggestion
from fedpriv.data.chats import ASSISTANT, Turn, open_template, turns_of
from fedpriv.data.files import PUBLIC_SEED, Arrays, Keys, check_memory
from fedpriv.data.source import PARQUET, Place, SingleFile, named_parts
from fedpriv.data.tokenizers import TextFacts, Tokenizer, labelled, next_tokens, open_tokenizer, tokenizer_files

SPLITS = ("train", "test")
"""Parts of a file with a column for them: training and test data, or private examples and questions."""

JSON_LINES = (".jsonl", ".ndjson")
"""What the names of files of JSON lines end with; all others are CSV files."""


class TextColumns(NamedTuple):
    """The columns, or keys, that are read of a file; empty: there is none."""

    text: str  # of the texts
    label: str = ""  # of their labels
    key: str = ""  # that says whose each is
    split: str = "split"  # that says which part of the data set it belongs to; may be missing
    prompt: str = ""  # of what stands before them

    @property
    def needed(self) -> tuple[str, ...]:
        """Those that have to be there, and to hold something."""
        return tuple(column for column in (*self[:3], self.prompt) if column)


class Row(NamedTuple):
    """A text and what stands beside it; ``None``: there is no such column."""

    text: str  # of a chat what was said
    label: str | None = None
    key: str | None = None
    split: str | None = None
    prompt: str | None = None
    chat: tuple[Turn, ...] = ()  # the messages; none: it is a text
    unread: tuple[str, ...] = ()  # at a file's first text: its columns that are not read

    @staticmethod
    def of(where: str, value: object) -> Row:
        """Return the text of a cell, or the chat that it holds."""
        if not isinstance(value, list):
            return Row(_cell(where, value))
        turns = turns_of(where, value)
        return Row("\n".join(_cell(where, turn.content) for turn in turns), chat=turns)


def csv_wanted(columns: TextColumns, labels: Iterable[str], splits: Sequence[str] = ()) -> str:
    """Return what the file of a known data set has to be, for whoever lacks it."""
    values = {columns.label: tuple(labels), columns.split: splits}
    names = (*columns.needed, columns.split) if splits else columns.needed
    told = [f"{name} ({', '.join(values[name])})" if values.get(name) else name for name in names]
    return f"a gzipped CSV file with a header and the columns {', '.join(told)}"


def read_texts(path: Path, columns: TextColumns) -> list[Row]:
    """Read texts and what stands beside them; the file's name may end in .gz."""
    if path.is_dir():
        return _folder(path)
    ending = Path(path.name.lower().removesuffix(".gz")).suffix
    if ending in PARQUET:
        raise InputError(f"{path}: Parquet is read with data.name = 'hub', and the same section [data.text]")
    read = _json_lines if ending in JSON_LINES else _json_list if ending == ".json" else _csv
    try:
        opened = gzip.open if path.suffix.lower() == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            rows = list(read(path, file, columns))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; fedpriv data lists the data sets") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        kind = "CSV" if read is _csv else "JSON"
        raise InputError(f"{path}: cannot be read as {kind} in UTF-8: {error}") from None
    if not rows:
        raise InputError(f"{path}: there is no text in it")
    return rows


def _csv(path: Path, file: IO[Any], columns: TextColumns) -> Iterator[Row]:
    tabs = path.name.lower().removesuffix(".gz").endswith(".tsv")
    reader = csv.DictReader(file, restval="", strict=True, delimiter="\t" if tabs else ",")
    header = list(reader.fieldnames or ())
    for column in columns.needed:
        if column not in header:
            raise _missing(path, column, header)
    for column in (*columns.needed, columns.split):
        if header.count(column) > 1:
            raise InputError(f"{path}: two columns have the name {column!r}")
    unread = tuple(column for column in header if column not in columns)
    for row in reader:
        if None in row:  # where the reader puts what is behind the last column
            raise InputError(f"{path}, line {reader.line_num}: the row has more cells than there are columns")
        yield _row(path, reader.line_num, row, columns)._replace(unread=unread)
        unread = ()


def _json_lines(path: Path, file: IO[Any], columns: TextColumns) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield _json_row(path, f"{path}, line {number}", number, _parsed(f"{path}, line {number}", line), columns)


def _json_list(path: Path, file: IO[Any], columns: TextColumns) -> Iterator[Row]:
    given = _parsed(str(path), file.read())
    if not isinstance(given, list):
        raise InputError(f'{path}: expected a JSON list of objects, such as [{{"{columns.text}": ...}}, ...]')
    for number, each in enumerate(given, start=1):
        yield _json_row(path, f"{path}, entry {number}", number, each, columns)


def _parsed(where: str, text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON that can be read: {error}") from None


def _json_row(path: Path, where: str, number: int, given: object, columns: TextColumns) -> Row:
    if not isinstance(given, dict):
        raise InputError(f'{where}: expected a JSON object, such as {{"{columns.text}": ...}}')
    for column in columns.needed:
        if column not in given:
            raise _missing(where, column, list(given))
    others = [column for column in columns[1:] if column in given]
    read = {column: _cell(f"{where}: {column!r}", given[column]) for column in others}
    row = Row.of(f"{where}: {columns.text!r}", given[columns.text])
    unread = tuple(column for column in given if column not in columns) if number == 1 else ()
    return _row(path, number, {**read, columns.text: row.text}, columns)._replace(chat=row.chat, unread=unread)


def _folder(root: Path) -> list[Row]:
    """Texts in LABEL/NAME.txt, in the folder itself or in its folders train and test."""
    train, test = named_parts(path.name for path in root.iterdir() if path.is_dir())
    parts: dict[str | None, Path] = {None: root / (train or "")}
    if train is not None and test is not None:
        parts = dict(zip(SPLITS, (root / train, root / test), strict=True))
    rows = []
    for split, part in parts.items():
        for path in text_files(part, "*/*"):
            try:
                text = path.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{path}: cannot be read as text in UTF-8: {error}") from None
            if not text.strip():
                raise InputError(f"{path}: the text is empty")
            rows.append(Row(text, path.parent.name, None, split))
    if not rows:
        raise InputError(f"{root}: no text lies in LABEL/NAME.txt, nor in train/LABEL/NAME.txt")
    return rows


def text_files(root: Path, pattern: str) -> list[Path]:
    """Return the .txt files of a folder, but for hidden ones."""
    found = (path for path in root.glob(pattern) if path.suffix.lower() == ".txt")
    return sorted(path for path in found if not any(name.startswith(".") for name in path.relative_to(root).parts))


def _cell(where: str, value: object) -> str:
    """The text of a JSON value; labels may be numbers, or true and false."""
    if isinstance(value, list | dict) or value in (math.inf, -math.inf):
        kind = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "too large a number"
        raise InputError(f"{where} holds {kind}; expected a text or a number")
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


def _row(path: Path, line: int, row: Mapping[str, str], columns: TextColumns) -> Row:
    for column in columns.needed:
        if not row[column].strip():
            raise InputError(f"{path}, line {line}: the cell of {column!r} is empty")
    label, key, prompt = (row[column] if column else None for column in (columns.label, columns.key, columns.prompt))
    return Row(row[columns.text], label, key, row.get(columns.split), prompt)


def ordered_words(labels: Sequence[str], where: str) -> tuple[str, ...]:
    """Order labels of one's own texts; refuse one that means none, many numbers, and a label for each text."""
    from fedpriv.data.own import FEW
    from fedpriv.data.schema import all_numbers, in_order
    from fedpriv.data.tables import MISSING_NUMBERS

    words = in_order(set(labels))
    missing = next((word for word in words if word.strip() in MISSING_NUMBERS), None)
    if missing is not None:
        raise InputError(f"{where}: the label {missing!r} says that there is none: take those texts out, or rename it")
    if len(words) > FEW and all_numbers(words):
        raise InputError(
            f"{where}: the labels are numbers with many values ({len(words):,}); fedpriv classifies: write ranges of "
            "them into the file, or leave data.text.label out"
        )
    if len(words) > FEW and 2 * len(words) > len(labels):
        raise InputError(f"{where}: the labels have {len(words):,} values in {len(labels):,} texts; fedpriv classifies")
    return words


def check_splits(path: Path, rows: Sequence[Row]) -> None:
    """Refuse splits of one's own file that nobody would read."""
    given = any(row.split is not None for row in rows)
    for number, row in enumerate(rows, start=1):
        if given and row.split is None:
            raise InputError(f"{path}, row {number}: it has no split, and other rows have one")
        if row.split not in (None, *SPLITS):
            allowed = " and ".join(SPLITS)
            raise InputError(where=f"{path}, row {number}", key="split", given=row.split, allowed=f"allowed: {allowed}")


_LABELS = "The names of the labels were read off the texts, and are taken as public."

# A text becomes numbers of 64 bits, a token and its target, and is held as an object of Python's meanwhile.
_MADE_OF_A_BYTE = 24


class TextSplit(NamedTuple):
    """Training and test texts."""

    train: Sequence[Row]  # clients' texts
    test: Sequence[Row]  # public ones


class Corpus(SingleFile):
    """Texts in one file of the folder of the data sets, which is not downloaded."""

    is_text = True
    kind = "texts"

    columns: ClassVar[TextColumns]  # of the file
    # what stands in the file for each, and its name; empty: texts have none
    labels: ClassVar[tuple[tuple[str, str], ...]] = ()
    # what the column split says of test texts; other texts than these and "train" are left out. Empty: there is no such
    # column.
    tests: ClassVar[tuple[str, ...]] = ("test",)
    has_repeats: ClassVar[bool] = False  # whether texts that are there already are left out

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...]:
        found = cls.found(place)
        files = text_files(found, "**/*") if found.is_dir() else [found]
        return (*files, *tokenizer_files(place.text or CorpusConfig(), place.root))

    @classmethod
    @override
    def wanted(cls) -> str:
        splits = ("train", *cls.tests) if cls.tests else ()
        return f"{cls.title}, as {csv_wanted(cls.columns, (value for value, _ in cls.labels), splits)}"

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        path, config = cls.found(place), place.text or CorpusConfig()
        part = cls._checked_parts(path, config, place.memory)
        return arrays_of(part, dict(cls.labels), config, place.root, str(path)), str(path)

    @classmethod
    def parts(cls, path: Path, config: CorpusConfig) -> TextSplit:
        """Return the texts of the file."""
        rows = read_texts(path, cls.columns)
        if cls.has_repeats:
            rows = list({row.text: row for row in reversed(rows)}.values())[::-1]
        if not cls.tests:
            return split_by_key(rows, config, str(path))
        return split_by_column(rows, cls.tests)

    @classmethod
    @override
    def count(cls, path: Path, memory: int) -> int:
        part = cls._checked_parts(path, CorpusConfig(), memory)
        return len(part.train) + len(part.test)

    @classmethod
    def _checked_parts(cls, path: Path, config: CorpusConfig, memory: int) -> TextSplit:
        check_memory(path, _MADE_OF_A_BYTE * _unpacked(path), memory)
        return cls.parts(path, config)


def split_by_column(rows: Sequence[Row], tests: Sequence[str] = SPLITS[1:]) -> TextSplit:
    """Return training and test texts as the column split says; others are left out."""
    return TextSplit([row for row in rows if row.split == SPLITS[0]], [row for row in rows if row.split in tests])


def split_by_key(rows: Sequence[Row], config: CorpusConfig, where: str) -> TextSplit:
    """Return the last texts of each key, or of all where there are no keys, as test texts."""
    counts = Counter(row.key for row in rows)
    firsts = {key: count - round(config.test_share * count) for key, count in counts.items()}
    seen: Counter[str | None] = Counter()
    train: list[Row] = []
    test: list[Row] = []
    for row in rows:
        (train if seen[row.key] < firsts[row.key] else test).append(row)
        seen[row.key] += 1
    if not train or not test:
        raise InputError(
            f"{where}: data.text.test_share = {config.test_share:g} of {len(rows)} texts leaves {len(train)} training "
            f"and {len(test)} test texts; expected both"
        )
    return TextSplit(train, test)


def own_texts(
    parts: Sequence[Sequence[Row]],
    config: CorpusConfig,
    place: Place,
    named: tuple[str, ...] = (),
    unread: tuple[str, ...] = (),
) -> Arrays:
    """Return texts of one's own, training and test ones, or of one part the last ones of each key as test texts.

    ``named``: the labels; else they are read off the texts. ``unread``: columns of the file that are not read.
    """
    part = TextSplit(*parts) if len(parts) > 1 else split_by_key(parts[0], config, place.path)
    given = [row.label for rows in part for row in rows if row.label is not None]
    words = named or ordered_words(given, f"{place.path}: column {config.label!r}")
    arrays = arrays_of(part, dict(zip(words, words, strict=True)), config, place.root, place.path, read_off=not named)
    return replace(arrays, unread=unread)


def arrays_of(
    part: TextSplit, labels: Mapping[str, str], config: CorpusConfig, root: Path, where: str, read_off: bool = False
) -> Arrays:
    """Return texts as tokens; ``read_off``: whether the labels are known from nothing but the texts."""
    task = config.task or ("classify" if labels else "next")
    if not part.train or not part.test:
        raise InputError(f"{where}: {len(part.train)} training and {len(part.test)} test texts; expected both")
    part, marks = _as_texts(part, config, where)
    keys = Keys.of(*([row.key or "" for row in rows] for rows in part))
    parts = (part.train, keys.train), (part.test, keys.test)
    tokenizer = open_tokenizer(config, root, [row.text for row in part.test])
    facts = TextFacts(task, tokenizer, config.pack, *marks)
    warnings: tuple[str, ...] = ()
    if task == "classify":
        if not labels:
            raise InputError(where=where, key="data.text.task", given="classify", allowed="the texts have no labels")
        if config.pack:
            raise InputError(f"{where}: data.text.pack = true lays texts end to end, and labels are of single ones")
        made = [_Made.labelled(*each, labels, tokenizer, config, where) for each in parts]
        classes = tuple(labels.values())
    else:
        made = [
            _Made(*next_tokens(facts, [row.text for row in rows], owners.tolist(), config.length))
            for rows, owners in parts
        ]
        classes = tuple(str(token) for token in range(tokenizer.size))
        warnings = _silent(made, config, where)
    train, test = made[0], made[1].drawn(config.tests)
    tokens = [each.x.astype(np.int32)[:, None] for each in (train, test)]
    whose = Keys(train.owners, test.owners, keys.names) if part.train[0].key is not None else None
    return Arrays(
        *(tokens[0], train.y, tokens[1], test.y, classes),
        notes=_notes(task, config, read_off),
        warnings=warnings,
        text=facts,
        keys=whose,
    )


def _silent(made: Sequence[_Made], config: CorpusConfig, where: str) -> tuple[str, ...]:
    """Warn of texts in which nothing is learnt; refuse a part without any other."""
    silent = [(each.y < 0).all(axis=1) for each in made]
    for each, name in zip(silent, SPLITS, strict=True):
        if each.all():
            allowed = f"no {name} text has a response within so many tokens"
            raise InputError(where=where, key="data.text.length", given=config.length, allowed=allowed)
    count = sum(int(each.sum()) for each in silent)
    return (f"Texts without a response within data.text.length: {count:,}.",) if count else ()


def _as_texts(part: TextSplit, config: CorpusConfig, where: str) -> tuple[TextSplit, tuple[str, ...]]:
    """Texts with prompts and roles in them, and the marks around what the loss counts; none: it counts all."""
    rows, response = [*part.train, *part.test], config.response
    chats = [row.chat for row in rows if row.chat]
    if not chats:
        return (_prompted(part, response, where), (response,)) if response else (part, ())
    if len(chats) < len(rows):
        raise InputError(f"{where}: {len(chats):,} of {len(rows):,} texts are chats; expected all or none")
    if config.prompt or response not in ("", ASSISTANT):
        key, given = ("prompt", config.prompt) if config.prompt else ("response", response)
        allowed = f"of chats leave prompt out, and response may be {ASSISTANT!r}"
        raise InputError(where=where, key=f"data.text.{key}", given=given, allowed=allowed)
    template = open_template(config)
    texts = template.texts(chats, where, marked=bool(response))
    whole = [row._replace(text=text) for row, text in zip(rows, texts, strict=True)]
    first = len(part.train)
    return TextSplit(whole[:first], whole[first:]), template.marks if response else ()


def _prompted(part: TextSplit, response: str, where: str) -> TextSplit:
    """Texts with what stands before them; refuse those in which nobody can tell where the response begins."""
    rows = [*part.train, *part.test]
    early = sum(response in (row.prompt or "") for row in rows)
    if early:
        raise InputError(f"{where}: {early:,} cells of the prompt have data.text.response = {response!r} in them")
    if response == ASSISTANT and any(row.text.startswith("[{") for row in rows):
        raise InputError(f"{where}: its chats are written as texts; JSON lines and Parquet hold them as lists")
    lacking = sum(row.prompt is None and response not in row.text for row in rows)
    if lacking:
        raise InputError(f"{where}: {lacking:,} of {len(rows):,} texts lack data.text.response = {response!r}")
    whole = [row if row.prompt is None else row._replace(text=f"{row.prompt}{response}{row.text}") for row in rows]
    return TextSplit(whole[: len(part.train)], whole[len(part.train) :])


def _notes(task: Literal["classify", "next"], config: CorpusConfig, read_off: bool) -> tuple[str, ...]:
    if task == "classify":
        return (_LABELS,) if read_off else ()
    if config.response:
        return ("The loss counts responses alone; what is proven of an example covers its prompt, too.",)
    if not config.pack:
        return ()
    return (
        f"An example is a sequence of {config.length} tokens: a text may lie in several, and what is proven of an "
        "example is not about the whole text.",
    )


class _Made(NamedTuple):
    """Tokens (N, T), targets (N,) or (N, T), and the numbers of their owners' keys (N,)."""

    x: NDArray[np.int64]
    y: NDArray[np.int64]
    owners: NDArray[np.int64]

    @staticmethod
    def labelled(
        rows: Sequence[Row],
        owners: NDArray[np.int64],
        labels: Mapping[str, str],
        tokenizer: Tokenizer,
        config: CorpusConfig,
        where: str,
    ) -> _Made:
        numbers = {label: number for number, label in enumerate(labels)}
        strange = next((row.label for row in rows if row.label not in numbers), None)
        if strange is not None:
            raise InputError(f"{where}: the label {strange!r} is none of {some_of(list(labels))}")
        x = labelled(tokenizer, [row.text for row in rows], config.length)
        return _Made(x, np.array([numbers[row.label or ""] for row in rows], dtype=np.int64), owners)

    def drawn(self, count: int | None) -> _Made:
        """So many of them; the same for all experiments."""
        if count is None or count >= len(self.x):
            return self
        from fedpriv.core.randomness import numpy_stream  # with torch

        rows = np.sort(numpy_stream(PUBLIC_SEED, "test sequences").choice(len(self.x), count, replace=False))
        return _Made(self.x[rows], self.y[rows], self.owners[rows])


def _unpacked(path: Path) -> int:
    """About the bytes of a file's text: packed ones have a third of them."""
    return path.stat().st_size * (3 if path.suffix == ".gz" else 1)
