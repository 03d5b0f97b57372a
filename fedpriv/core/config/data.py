"""The section [data] of an experiment: which data, where they lie, and how clients share them."""

import csv
import math
from collections.abc import Iterator, Mapping
from operator import not_
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo
from typing_extensions import override

from fedpriv.core.errors import InputError, some_of
from fedpriv.core.registry import DATASETS
from fedpriv.core.sections import added_keys
from fedpriv.core.settings import (
    Count,
    Epsilon,
    Extensible,
    Groups,
    Integer,
    Positive,
    Real,
    Registered,
    Settings,
    absent,
    named_once,
)

_LONGEST_HEADER = 1 << 20  # characters
_SHARE = Annotated[Real, Field(gt=0, lt=1)]


class ColumnConfig(Settings):
    """One column, ``[[data.table.columns]]``; what is not told is inferred."""

    name: str = Field(description="as in the file's header")
    kind: Literal["category", "number", "ignore"] | None = Field(
        None, description="unset: number if most cells are numbers, else category; ignore: the column is not read"
    )
    values: tuple[str, ...] = Field((), description="all values of a category; none: the values of the training rows")
    low: Real | None = Field(None, description="number that is scaled to 0, a public constant; smaller ones are cut")
    high: Real | None = Field(None, description="number that is scaled to 1, a public constant; larger ones are cut")

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if (self.low is None) != (self.high is None):
            raise InputError(f"column {self.name!r}: give low and high together")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise InputError(f"column {self.name!r}: low = {self.low:g} is not below high = {self.high:g}")
        if self.low is not None and self.high is not None and not math.isfinite(self.high - self.low):
            raise InputError(f"column {self.name!r}: high - low is no finite number")
        if self.values and (self.low is not None or self.kind not in (None, "category")):
            raise InputError(f"column {self.name!r}: values are of categories, low and high of numbers")
        if self.low is not None and self.kind not in (None, "number"):
            raise InputError(f"column {self.name!r}: low and high are of numbers; given kind = {self.kind!r}")
        if len(set(self.values)) < len(self.values):
            raise InputError(f"column {self.name!r}: a value is given twice")
        return self


def _require_label(name: str, path: str, table: Any) -> None:
    """Refuse a table without a label, and name the columns where its file is a readable CSV file."""
    if not isinstance(table, Mapping) or "label" in table:
        return
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig") as file:
            header = next(csv.reader([file.readline(_LONGEST_HEADER)], delimiter=table.get("delimiter", ",")), [])
    except (OSError, RuntimeError, ValueError, TypeError, csv.Error):  # whoever reads the file says what is wrong
        header = []
    hint = f"{path} has {some_of(header)}" if header else ""
    raise InputError(f"name = {name!r} needs data.table.label, the column that is predicted", hint=hint)


class TableConfig(Settings):
    """How rows of a CSV or Parquet file become numbers."""

    label: str = Field(description="the column that is predicted")
    classes: Annotated[tuple[str, ...], AfterValidator(named_once)] = Field(
        (), description="values of the label; none: the values of the training rows, sorted"
    )
    columns: tuple[ColumnConfig, ...] = Field((), description="settings of columns; others are inferred")
    test_path: str = Field("", description="file with the test rows; empty: test_share of the rows, drawn once for all")
    test_share: _SHARE = Field(0.2, description="share of the rows that is the test set, without test_path")
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = Field(",", description="of the cells of a CSV file")
    empty: tuple[str, ...] | None = Field(
        None,
        exclude_if=absent,
        description="texts that mean that a cell is empty; unset: none at all, and where a column is numbers otherwise "
        "NA, N/A, NaN, nan, NULL, ? and .",
    )
    missing: Literal["refuse", "own"] = Field(
        "refuse", description="empty cells. own: a value of its own; for a number, also a second feature that says so"
    )
    unknown: Literal["refuse", "other"] = Field(
        "refuse", description="values of a category that are not listed or not in the training rows. other: one value"
    )
    bounds_epsilon: Epsilon | None = Field(
        None, description="pure epsilon of low and high here, if fedpriv data --bounds made them of the rows"
    )

    @field_validator("delimiter")
    @classmethod
    def _is_read_as_one_byte(cls, delimiter: str) -> str:
        if delimiter != "\t" and (not " " <= delimiter <= "~" or delimiter in "\"'"):
            raise InputError("expected one printable ASCII character, or a tab, and no quote")
        return delimiter

    @model_validator(mode="after")
    def _each_column_once(self) -> Self:
        names = [column.name for column in self.columns]
        named_once([f"column {name!r}" for name in names])
        if self.label in names:
            raise InputError(f"column {self.label!r} is the label; give its values as classes")
        return self


class CorpusConfig(Settings):
    """How texts are read, cut into tokens and laid into sequences."""

    task: Literal["classify", "next"] | None = Field(
        None,
        description="classify: the label of a text; next: each token from those before it; unset: classify where the "
        "texts have labels, else next",
    )
    tokenizer: Literal["byte", "word", "bpe", "llama"] = Field(
        "byte",
        description="byte: the bytes of UTF-8; word: the commonest words of a public list (word_freq_en.csv.gz in the "
        "folder of the data sets); bpe: pairs of bytes merged by the library tokenizers; llama: the 512 tokens of "
        "stories260k.npz",
    )
    vocabulary: Annotated[Integer, Field(ge=16, le=1_000_000)] = Field(
        4096, description="word, bpe: number of tokens, the four with a meaning and punctuation included"
    )
    vocabulary_file: str = Field(
        "", description="bpe: a tokenizer.json of the library tokenizers; empty: trained on the test texts"
    )
    length: Annotated[Integer, Field(ge=2, le=8192)] = Field(64, description="tokens of a sequence")
    pack: bool = Field(
        False,
        description="next: lay the texts of a key end to end and cut them into sequences; false: a sequence is one "
        "text, cut off or padded",
    )
    text: Annotated[str, Field(min_length=1)] = Field(
        "text",
        description="own files: the column of the texts, or of chats: lists of messages, each with role and content",
    )
    prompt: str = Field(
        "", description="own files: the column of what stands before each text, with response between them; empty: none"
    )
    response: str = Field(
        "",
        description="next: the loss counts only what follows these characters, where a text has them first, such as "
        "'<|assistant|>'; of chats 'assistant': the messages of this role alone; empty: it counts all",
    )
    label: str = Field("", description="own files: the column of the labels; empty: none")
    test_share: Annotated[Real, Field(gt=0, lt=1)] = Field(
        0.1, description="share of the texts that is the test set, the last ones of each key, where no column says so"
    )
    tests: Count | None = Field(None, description="use only so many test sequences, drawn once for all; unset: all")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.pack and self.task == "classify":
            raise InputError("pack = true lays texts end to end, and task = 'classify' needs each by itself")
        if self.prompt and not self.response:
            example = 'such as response = "\\n### Response:\\n"'
            raise InputError(f"prompt = {self.prompt!r}: response says what stands between it and the text, {example}")
        if self.response and (self.pack or self.task == "classify"):
            given = "pack = true" if self.pack else "task = 'classify'"
            raise InputError(f"response = {self.response!r} is for next tokens of texts that are not packed; {given}")
        if self.vocabulary_file and self.tokenizer != "bpe":
            raise InputError(f"vocabulary_file goes with tokenizer = 'bpe'; given {self.tokenizer!r}")
        if self.tokenizer == "bpe" and not self.vocabulary_file and self.vocabulary < _BYTES:
            raise InputError(f"tokenizer = 'bpe' has {_BYTES} tokens before it merges; vocabulary = {self.vocabulary}")
        return self


_BYTES = 256 + 3
"""Every byte, and the tokens that pad, begin and end."""


_Copies = Annotated[Integer, Field(ge=1, le=100_000)]
_MOST_BITS = 256  # of a secret: its exposure is a number of bits


class CanaryConfig(Settings):
    """Random sequences in the training data, after Carlini et al. 2019 (The Secret Sharer)."""

    count: Annotated[Integer, Field(ge=1, le=1000)] = Field(8, description="secrets that are put in, each its own draw")
    copies: Annotated[tuple[_Copies, ...], Field(min_length=1)] = Field(
        (1,), description="how often each is put in; several numbers are gone through again and again"
    )
    length: Annotated[Integer, Field(ge=1, le=256)] = Field(4, description="tokens of a secret")
    alphabet: Annotated[str, Field(min_length=2)] = Field(
        "0123456789", description="the characters that its tokens are drawn from"
    )
    prefix: str = Field("the secret number is ", description="what stands before each, and is public")
    client: Annotated[Integer, Field(ge=0)] = Field(0, description="whose training sequences are replaced")

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        if len(set(self.alphabet)) != len(self.alphabet):
            raise InputError(f"alphabet = {self.alphabet!r} has a character twice")
        # As many again are drawn that are not put in.
        if 2 * self.count > self.space:
            raise self.wrong(
                "count", f"alphabet and length make {self.space} secrets, and twice as many as count are drawn"
            )
        if self.space.bit_length() > _MOST_BITS:
            raise self.wrong("length", f"a secret of more than {_MOST_BITS} bits")
        return self

    @property
    def space(self) -> int:
        """How many secrets there are: |R|."""
        return int(len(self.alphabet) ** self.length)

    def copies_of(self, canary: int) -> int:
        """Return how often a secret is put in."""
        return self.copies[canary % len(self.copies)]

    @property
    def rows(self) -> int:
        """How many training sequences are replaced."""
        return sum(map(self.copies_of, range(self.count)))


class PartitionerConfig(Settings):
    """A partitioner of flwr-datasets by name, and its arguments, any that it has."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="such as pathological, exponential or grouped-natural-id")

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, tree: Any) -> Any:
        return {key: _fixed(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree

    @property
    def arguments(self) -> dict[str, Any]:
        """All but the name."""
        return dict(self.model_extra or {})


def _fixed(value: Any) -> Any:
    return tuple(map(_fixed, value)) if isinstance(value, list | tuple) else value


class DataConfig(Extensible):
    """Which data, where they lie, and how clients share them."""

    name: Annotated[str, Registered(DATASETS)] = Field("digits", description="data set, as fedpriv data lists them")
    path: str = Field("", description="your own file or folder; data sets that have a name ignore it")
    root: str = Field("", description="folder of the data sets; empty: $FEDPRIV_DATA, else ./data")
    download: bool = Field(True, description="fetch a data set that is not in the folder")
    memory: Annotated[Integer, Field(ge=1, le=1_000_000)] = Field(
        4096, description="MiB that reading a data file may take: its arrays, unpacked, and the tensors made of them"
    )
    train_examples: Count | None = Field(None, description="use only this many training examples, drawn by the seed")
    groups: Groups | None = Field(
        None, description="classes that become one, such as [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]; unset: each is its own"
    )
    partition: Literal["iid", "dirichlet", "shards", "overlapping", "key", "partitioner"] = Field(
        "iid",
        description="how clients share the training data; overlapping: each draws examples from all, so there may be "
        "more clients than examples, and a claim is about one client's copy of an example; key: a client has the "
        "examples of one key, such as a speaker's texts, keys with most examples first; with fewer than "
        "training.batch_size it trains on all of them; partitioner: by data.partitioner, which sets this",
    )
    partitioner: PartitionerConfig | None = Field(
        None,
        exclude_if=absent,
        description="name and arguments of a partitioner of flwr-datasets; its columns are label and key; it gets the "
        "examples shuffled, the number of clients and a seed that follows from ours",
    )
    alpha: Positive = Field(0.5, description="Dirichlet concentration; small: clients hold few classes")
    shards_per_client: Count = Field(2, description="label-sorted shards a client gets, for partition = 'shards'")
    examples_per_client: Count | None = Field(
        None,
        exclude_if=absent,
        description="examples that each client draws, for partition = 'overlapping'; else unset",
    )
    key: str = Field(
        "",
        exclude_if=not_,
        description="own files: the column, or array, that says whose an example is, for partition = 'key'; folder: "
        "client, the level above the classes; empty: the form's own, if it has one",
    )
    owner: str = Field(
        "",
        exclude_if=not_,
        description="csv, hub, object, npz: the column, or array, that says which person an example is of; folder: "
        "folder, the level below the classes, or name, the file's up to _; that of data.key in every form that reads "
        "it; the ledger then also has what is proven about a person over all clients that hold examples of them; "
        "empty: nobody says",
    )
    label: str = Field(
        "",
        exclude_if=not_,
        description="hub: the column of the classes; empty: the one of that type, or label",
    )
    size: Annotated[Integer, Field(ge=1, le=4096)] | None = Field(
        None,
        exclude_if=absent,
        description="own pictures: scale the shorter side to so many pixels (bilinear) and cut the middle square out; "
        "unset: all have one size",
    )
    channels: Literal["first", "last"] | None = Field(
        None,
        exclude_if=absent,
        description="own arrays: which axis of an image holds its channels, or a volume's slices; of (N, channels, T) "
        "or (N, T, channels) it says that these are signals; unset: the axis of 1 or 3, else the shorter",
    )
    test_share: Annotated[Real, Field(gt=0, lt=1)] | None = Field(
        None,
        exclude_if=absent,
        description="own pictures and arrays: share of each client's examples, or of all, that is the test set, drawn "
        "once for all, where the files have no test set; unset: 0.2",
    )
    table: TableConfig | None = Field(
        None,
        exclude_if=absent,
        description="the columns of your own table (csv, and tables in hub and object); else unset",
    )
    text: CorpusConfig | None = Field(
        None, exclude_if=absent, description="how texts become sequences of tokens; else unset"
    )
    canaries: CanaryConfig | None = Field(
        None,
        exclude_if=absent,
        description="random secrets in a client's texts, to measure what a model remembers of them; unset: none",
    )

    @model_validator(mode="before")
    @classmethod
    def _says_what_follows(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        name, said = tree.get("name"), dict(tree)
        if isinstance(name, str) and ":" in name:  # short for the data set object, whose path that is
            said |= {"name": "object", "path": name}
        elif isinstance(name, str) and name in DATASETS and DATASETS[name].is_text and said.get("text") is None:
            said["text"] = {}
        if isinstance(name, str) and name in DATASETS and DATASETS[name].needs_table and said.get("path"):
            _require_label(name, str(said["path"]), said.get("table") or {})
        if said.get("partitioner") is not None:
            said.setdefault("partition", "partitioner")
        return said

    @model_validator(mode="after")
    def _one_partition(self) -> Self:
        if (self.partition == "partitioner") != (self.partitioner is not None):
            wanted = "leave it out" if self.partitioner else "set data.partitioner = {name = ...}"
            raise self.wrong("partition", f"with data.partitioner, and only then: {wanted}")
        return self

    @classmethod
    @override
    def entries(cls) -> Iterator[tuple[type[Any], str, FieldInfo]]:
        """Keys of capabilities."""
        yield from added_keys("data")

    @property
    def is_text(self) -> bool:
        """Whether these are texts."""
        return self.text is not None

    @property
    def bounds_epsilon(self) -> float:
        """What an estimate of the table's bounds cost; 0 where they are public constants."""
        return 0.0 if self.table is None or self.table.bounds_epsilon is None else self.table.bounds_epsilon

    @property
    def is_natural(self) -> bool:
        """Whether clients hold what is theirs, so that some may have fewer examples than a batch."""
        return self.partition in ("key", "partitioner")

    @property
    def overlaps(self) -> bool:
        """Whether several clients may hold copies of one example."""
        return self.partition == "overlapping"

    @model_validator(mode="after")
    def _copies_have_a_number(self) -> Self:
        if self.overlaps != (self.examples_per_client is not None):
            wanted = "needs data.examples_per_client" if self.overlaps else "does not read data.examples_per_client"
            raise InputError(f"partition = {self.partition!r} {wanted}")
        if self.overlaps and self.canaries is not None:
            raise InputError("canaries with partition = 'overlapping': others hold copies of one client's canary")
        if self.overlaps and self.bounds_epsilon:
            raise InputError(
                "table.bounds_epsilon with partition = 'overlapping': the estimate counts a row once, "
                "and clients hold copies; tell bounds that are public"
            )
        return self

    @model_validator(mode="after")
    def _has_its_file(self) -> Self:
        source = DATASETS[self.name]
        if source.needs_path and not self.path:
            raise InputError(f"name = {self.name!r} needs data.path, the file")
        if "table" not in source.reads and not source.needs_table and self.table is not None:
            raise InputError(f"name = {self.name!r} needs no section data.table")
        reads = source.reads if self.table is None else ("key", "owner")
        form = f"name = {self.name!r}" + (" with data.table" if reads != source.reads else "")
        for key in ("key", "owner", "label", "size", "channels", "test_share"):
            if getattr(self, key) and key not in reads and not (key == "owner" and self.owner == self.key):
                hint = ", but for that of data.key" if key == "owner" and "key" in reads else ""
                raise InputError(f"{form} does not read data.{key}{hint}")
        if self.table is not None and not source.needs_table and (self.table.test_path or self.table.delimiter != ","):
            raise InputError(f"{form} reads neither data.table.test_path nor delimiter; test rows are its part 'test'")
        for section in ("text", "canaries"):
            if getattr(self, section) is not None and not source.is_text and "text" not in reads:
                raise InputError(f"{form} are no texts, of which the section data.{section} tells")
        return self
