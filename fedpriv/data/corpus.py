"""Texts as data sets of experiments: from a file to sequences of tokens, their targets, and whose they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from typing_extensions import override

from fedpriv.core.config.corpus import CorpusConfig
from fedpriv.core.errors import InputError, some_of
from fedpriv.data.files import Arrays, check_memory
from fedpriv.data.sequences import TextFacts, labelled, next_tokens
from fedpriv.data.source import DatasetStatus, Place, Source
from fedpriv.data.texts import Columns, Row, csv_wanted, read_texts
from fedpriv.data.tokenizers import Tokenizer, open_tokenizer, tokenizer_files

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PUBLIC_SEED = 0  # the choice of test sequences is part of the data set, the same for every experiment
# A text becomes numbers of 64 bits, a token and its target, and is held as an object of Python's meanwhile.
_MADE_OF_A_BYTE = 24


class Part(NamedTuple):
    """Training and test texts.

    Attributes:
        train: clients' texts.
        test: public ones.
    """

    train: Sequence[Row]
    test: Sequence[Row]


class Corpus(Source):
    """Texts in one file of the folder of the data sets, which is not downloaded.

    Attributes:
        file: its name.
        columns: of the file.
        labels: what stands in the file for each, and its name; empty: texts have none.
        tests: what the column split says of test texts; other texts than these and "train" are left out. Empty: there
            is no such column.
        has_repeats: whether texts that are there already are left out.
    """

    is_text = True

    file: ClassVar[str]
    columns: ClassVar[Columns]
    labels: ClassVar[tuple[tuple[str, str], ...]] = ()
    tests: ClassVar[tuple[str, ...]] = ("test",)
    has_repeats: ClassVar[bool] = False

    @classmethod
    def found(cls, place: Place) -> Path:
        """Return where the file is."""
        path = cls._path(place)
        if not path.is_file():
            raise InputError(f"data.name = {cls.name!r}: {path} is not there, and is not downloaded: {cls.wanted()}")
        return path

    @classmethod
    @override
    def files(cls, place: Place) -> tuple[Path, ...]:
        return (cls.found(place), *tokenizer_files(place.text or CorpusConfig(), place.root))

    @classmethod
    def wanted(cls) -> str:
        """Return what the file has to hold, for whoever lacks it."""
        splits = ("train", *cls.tests) if cls.tests else ()
        return f"{cls.title}, as {csv_wanted(cls.columns, (value for value, _ in cls.labels), splits)}"

    @classmethod
    @override
    def read(cls, place: Place) -> tuple[Arrays, str]:
        path, config = cls.found(place), place.text or CorpusConfig()
        part = cls._checked_parts(path, config, place.memory)
        return arrays_of(part, dict(cls.labels), config, place.root, str(path)), str(path)

    @classmethod
    def parts(cls, path: Path, config: CorpusConfig) -> Part:
        """Return the texts of the file."""
        rows = read_texts(path, cls.columns)
        if cls.has_repeats:
            rows = list({row.text: row for row in reversed(rows)}.values())[::-1]
        if not cls.tests:
            return split_by_key(rows, config, str(path))
        return Part([row for row in rows if row.split == "train"], [row for row in rows if row.split in cls.tests])

    @classmethod
    @override
    def status(cls, place: Place) -> DatasetStatus | None:
        path = cls._path(place)
        if not path.is_file():
            return DatasetStatus(cls.name, False, "", None, f"no {path.name} in {path.parent}")
        try:
            part = cls._checked_parts(path, CorpusConfig(), place.memory)
        except InputError as error:
            return DatasetStatus(cls.name, False, str(path), None, str(error))
        return DatasetStatus(cls.name, True, str(path), len(part.train) + len(part.test), "texts")

    @classmethod
    def _checked_parts(cls, path: Path, config: CorpusConfig, memory: int) -> Part:
        check_memory(path, _MADE_OF_A_BYTE * _unpacked(path), memory)
        return cls.parts(path, config)

    @classmethod
    def _path(cls, place: Place) -> Path:
        return place.root / cls.file


def split_by_key(rows: Sequence[Row], config: CorpusConfig, where: str) -> Part:
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
            f"and {len(test)} test texts; both are wanted"
        )
    return Part(train, test)


def arrays_of(part: Part, labels: Mapping[str, str], config: CorpusConfig, root: Path, where: str) -> Arrays:
    """Return texts as tokens."""
    import numpy as np

    task = config.task or ("classify" if labels else "next")
    if not part.train or not part.test:
        raise InputError(f"{where}: {len(part.train)} training and {len(part.test)} test texts; both are wanted")
    names = tuple(sorted({row.key for row in part.train if row.key is not None}))
    tokenizer = open_tokenizer(config, root, [row.text for row in part.test])
    if task == "classify":
        if not labels:
            raise InputError(f"{where}: data.text.task = 'classify', and the texts have no labels")
        if config.pack:
            raise InputError(f"{where}: data.text.pack = true lays texts end to end, and labels are of single ones")
        made = [_Made.labelled(rows, labels, tokenizer, config, where, names) for rows in part]
        classes = tuple(labels.values())
    else:
        made = [_Made.following(rows, names, tokenizer, config) for rows in part]
        classes = tuple(str(token) for token in range(tokenizer.size))
    train, test = made[0], made[1].drawn(config.tests)
    facts = TextFacts(task, tokenizer, train.keys if names else None, names, packed=config.pack)
    tokens = [each.x.astype(np.int32)[:, None] for each in (train, test)]
    return Arrays(tokens[0], train.y, tokens[1], test.y, classes, (), _notes(task, config), facts)


def _notes(task: Literal["classify", "next"], config: CorpusConfig) -> tuple[str, ...]:
    if task == "classify" or not config.pack:
        return ()
    return (
        f"An example is a sequence of {config.length} tokens: a text may lie in several, and what is proven of an "
        "example is not about the whole text.",
    )


class _Made(NamedTuple):
    """Tokens (N, T), targets (N,) or (N, T), and numbers of keys (N,)."""

    x: NDArray[np.int64]
    y: NDArray[np.int64]
    keys: NDArray[np.int64]

    @staticmethod
    def labelled(
        rows: Sequence[Row],
        labels: Mapping[str, str],
        tokenizer: Tokenizer,
        config: CorpusConfig,
        where: str,
        names: Sequence[str],
    ) -> _Made:
        import numpy as np

        numbers = {label: number for number, label in enumerate(labels)}
        strange = next((row.label for row in rows if row.label not in numbers), None)
        if strange is not None:
            raise InputError(f"{where}: the label {strange!r} is none of {some_of(list(labels))}")
        x = labelled(tokenizer, [row.text for row in rows], config.length)
        return _Made(x, np.array([numbers[row.label or ""] for row in rows], dtype=np.int64), _keys(rows, names))

    @staticmethod
    def following(rows: Sequence[Row], names: Sequence[str], tokenizer: Tokenizer, config: CorpusConfig) -> _Made:
        owners = _keys(rows, names).tolist()
        return _Made(*next_tokens(tokenizer, [row.text for row in rows], owners, config.length, config.pack))

    def drawn(self, count: int | None) -> _Made:
        """So many of them; the same for all experiments."""
        import numpy as np

        if count is None or count >= len(self.x):
            return self
        from fedpriv.core.randomness import numpy_stream  # with torch

        rows = np.sort(numpy_stream(PUBLIC_SEED, "test sequences").choice(len(self.x), count, replace=False))
        return _Made(self.x[rows], self.y[rows], self.keys[rows])


def _keys(rows: Sequence[Row], names: Sequence[str]) -> NDArray[np.int64]:
    """The number of each text's key; of texts without, and of keys without training texts, 0."""
    import numpy as np

    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers.get(row.key or "", 0) for row in rows], dtype=np.int64)


def _unpacked(path: Path) -> int:
    """About the bytes of a file's text: packed ones have a third of them."""
    return path.stat().st_size * (3 if path.suffix == ".gz" else 1)
